"""Tiny random models of the native families (families.py). Sizes differ, and are no multiples of a vector's."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from families import FILES, VARIATIONS, Fields, configuration
from outrider.models.executions import choose_execution
from outrider.models.families.table import plan_of
from outrider.native.engine import NativeForward
from outrider.native.planned_model import PlannedModel
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward

VOCAB = 99
CONTEXT = 640
SIZES: Fields = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 80, "num_hidden_layers": 3}
SIZES |= {"max_position_embeddings": CONTEXT, "pad_token_id": 0}
# By family and name, "plain" for the first. Files of very many layers show sizes of published models alone.
CASES: dict[str, dict[str, Fields]] = {}
for _name, _case in FILES.items():
    if _case.model_type not in ("gemma3n_text", "granitemoeshared") and "62" not in _name and "46" not in _name:
        _own = CASES.setdefault(_case.model_type, {})
        _own[_name if _own else "plain"] = _case.fields
del CASES["phi3"]["phi3, longrope"]  # its rope depends on the length of the text
for _family, _rows in VARIATIONS.items():
    CASES[_family] = CASES.get(_family, {}) | _rows
ALL = [(family, name) for family, cases in CASES.items() for name in cases]


def random_model(family: str, fields: Fields, seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """A model, float32, whose logits depend on the whole text."""
    config = configuration(family, SIZES | sizes | fields)
    # Eager: "sdpa" leaves caps out.
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    buffers = [one for one in model.state_dict(keep_vars=True).values() if not isinstance(one, nn.Parameter)]
    for parameter in (*model.eval().requires_grad_(False).parameters(), *buffers):
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.2 * drawn)  # norms around what they begin with
        else:
            parameter.copy_(0.7 * drawn / parameter.shape[-1] ** 0.5)
    for name, parameter in model.named_parameters():
        if family == "gemma4_text" and name.endswith("q_norm.weight"):
            parameter.mul_(0.1)  # scores are not scaled: with large ones, a last bit of a number counts
    return model


def native_forward(model: Any) -> NativeForward:
    return NativeForward(model, model.plan if isinstance(model, PlannedModel) else plan_of(model.config))


def native_lm(model: PreTrainedModel, name: str = "target") -> LM:
    lm = choose_execution(LM(TransformersForward(model), name=name, vocab_size=VOCAB, context_len=CONTEXT), "native")
    assert isinstance(lm.backend, NativeForward) and not lm.has_states
    return lm


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def native_logits(native: NativeForward, ids: Tensor) -> Tensor:
    """Logits of texts from their beginning. [B, T, V]"""
    cache = SlotCache.empty(native.layer_shapes, *ids.shape)
    return native(ids, torch.arange(ids.shape[1]).expand(ids.shape), cache, ids.shape[1]).logits
