"""Tiny models with recurrent and convolutional state, of all families that work, with random weights."""

from typing import Any

import torch
from transformers import PreTrainedModel

import toys
from outrider.models.loading import Checkpoint, build_lm
from outrider.runtime.lm import LM
from scripts import script

tiny_models = script("benchmarks/tiny_models.py")

V: int = tiny_models.V
FAMILIES = (
    "qwen3_5_text qwen3_next lfm2 granitemoehybrid falcon_h1 bamba olmo_hybrid kimi_linear nemotron_h zamba2 mamba2 "
    "mamba falcon_mamba jamba zamba"
).split()


def hybrid(name: str, seed: int = 1, **options: Any) -> PreTrainedModel:
    """In float64, but where grouped experts allow no more than float32. (The recurrences compute in float32 anyway.)"""
    model: PreTrainedModel = tiny_models.tiny(name, seed, **options)
    has_experts = any("experts" in parameter for parameter, _ in model.named_parameters())
    return model if has_experts else model.to(torch.float64)


def hybrid_lm(model: PreTrainedModel, name: str = "target") -> LM:
    lm = build_lm(Checkpoint(name, model, tokenizer=None), min(V, model.config.vocab_size))
    lm.execution = toys.execution()
    return lm
