"""Tiny Gemma 4 models and their assistants, with random weights, as Transformers saves them."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

import toys
from outrider.drafters.base import Drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.heads import head_drafter
from outrider.models.heads.loading import load_head
from outrider.models.registry import ModelSpec
from outrider.runtime.lm import LM
from toys import as_lm, random_model

WIDTH, WINDOW = 32, 6
_KINDS = ("sliding_attention", "full_attention")


def _config(vocab_size: int, size: int, layer_types: list[str], **options: Any) -> Gemma4TextConfig:
    """Head sizes and windows differ by type; a wrong window is seen."""
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": size, "intermediate_size": size + 16}
    sizes |= {"num_hidden_layers": len(layer_types), "layer_types": layer_types, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": WINDOW}
    sizes |= {"initializer_range": 0.3, "max_position_embeddings": 256, "hidden_size_per_layer_input": 0}
    sizes |= {"vocab_size_per_layer_input": 0}
    return Gemma4TextConfig(**sizes | options, bos_token_id=None, eos_token_id=None, pad_token_id=None)


def tiny_gemma4(vocab_size: int = 60, seed: int = 0, **options: Any) -> PreTrainedModel:
    """Six layers, with per-layer embeddings. The last two have no keys: an assistant reads those of layers 2 and 3."""
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": vocab_size, "num_kv_shared_layers": 2}
    config = _config(vocab_size, WIDTH, [*_KINDS, *_KINDS, *_KINDS], **per_layer | options)
    return random_model(Gemma4ForCausalLM, config, seed)


def tiny_assistant(
    vocab_size: int = 60, *, num_groups: int = 0, num_chosen: int = 1, num_sliding: int = 2, **options: Any
) -> PreTrainedModel:
    """An assistant whose last layer has full attention, after ``num_sliding`` others; ``num_groups`` of an ordered
    vocabulary, or 0 for a usual LM head."""
    types = [*[_KINDS[0]] * num_sliding, _KINDS[1]]
    config = Gemma4AssistantConfig(
        text_config=_config(vocab_size, 16, types, num_kv_shared_layers=len(types), **options),
        backbone_hidden_size=WIDTH,
        use_ordered_embeddings=num_groups > 0,
        num_centroids=num_groups,
        centroid_intermediate_top_k=num_chosen,
    )
    model = random_model(Gemma4AssistantForCausalLM, config, 1)
    if num_groups:
        order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(1))
        model.masked_embedding.token_ordering.copy_(order)
    return model


def load_assistant(model: PreTrainedModel, target: LM) -> LM:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        head = load_head(ModelSpec(name="assistant", path=Path(folder)), target)
    head.execution = toys.execution()
    return head


def assistant_pair(vocab_size: int, *, min_prob: float = 0.0, **sizes: Any) -> tuple[LM, Drafter]:
    """Two layers each; the target's last one has keys and values of one projection."""
    own = _config(vocab_size, WIDTH, [*_KINDS], attention_k_eq_v=True, num_global_key_value_heads=1)
    target = as_lm(random_model(Gemma4ForCausalLM, own, 0))
    options = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    head = load_assistant(tiny_assistant(vocab_size, num_sliding=1, **sizes, **options), target)
    return target, head_drafter(head, DraftOptions(min_prob=min_prob))
