"""Drafts in training: the parts that the trainer sees, and a draft model before training, its shape and its initial
weights.

A draft model has the target's architecture with fewer layers and a smaller width, so that any engine that runs the
target runs the draft too.
"""

from __future__ import annotations

import copy
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.drafters.base import Drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.measure.along import measure_alpha
from outrider.measure.teacher_forcing import Text
from outrider.models.few_tokens import with_few_tokens
from outrider.models.kinds import auto_class
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.weights import widened_weights
from outrider.records import Interval
from outrider.runtime.lm import LM
from outrider.runtime.modules import recorded_states

# Fused weights: their leading part is not composed of leading parts.
_FUSED = ("qkv", "query_key_value", "gate_up", "c_attn", "Wqkv", "att_proj")
_LAYER = re.compile(r"^(.*\.(?:layers|h|blocks)\.)(\d+)(\..*)$")  # weight names in most of Transformers

TOKENS = "tokens.jsonl"  # file of the tokens that a draft model with a reduced vocabulary drafts

Pair = tuple[Tensor, Tensor]
Shape = tuple[int, int]
"""Layers and width of a draft."""


def read_target(
    target: LM, ids: Tensor, features: Sequence[int] = (), token_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Logits of a target after each token, of these token ids or all; and its hidden states, of which index i is the
    input of decoder layer i. [B, T] -> [B, T, D], [B, T, F]"""
    with torch.no_grad(), recorded_states(target.model, features) as found:
        logits = target.model(input_ids=ids, use_cache=False).logits[..., : target.vocab_size].to(ids.device)
    states = [found[i].to(ids.device) for i in features]
    logits = logits if token_ids is None else logits[..., token_ids]
    return logits, torch.cat(states, dim=-1) if states else logits[..., :0]


class Student(ABC):
    """A draft in training.

    Attributes:
        module: what the trainer runs, trains and stores, in float32; it takes ``input_ids`` [B, T].
        later: weight of the loss at a drafted token, over that at the one before it: rounds often end before them.
    """

    target: LM
    module: nn.Module
    later: float = 1.0

    @abstractmethod
    def pairs(self, outputs: Any, ids: Tensor) -> Sequence[Pair]:
        """Logits of the target and of the draft at the same positions, from the outputs of the module for ids [B, T].

        Returns:
            [B, T', D] and [B, T', D], for the first drafted token of a round, the second, ...; for a draft that reads
            nothing but the sequence all of them are alike, and there is one pair.
        """

    @abstractmethod
    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        """The drafter that will be loaded from the files: its weights are rounded to their type."""

    @abstractmethod
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        """alpha of a drafter from ``as_stored`` on texts, for the first drafted token of a round, the second, ... as in
        ``pairs``. Raises NumericsError: there is no distribution at some position."""

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the files of a checkpoint."""


class _FewTokens(nn.Module):
    """A draft model that computes logits of D tokens only: [B, T] -> [B, T, D]"""

    def __init__(self, model: Any, token_ids: Tensor) -> None:
        super().__init__()
        self.model, self._token_ids = model, token_ids

    def forward(self, input_ids: Tensor) -> Any:
        head = self.model.get_output_embeddings()

        def product(states: Tensor) -> Tensor:
            bias = None if head.bias is None else head.bias[self._token_ids]
            return functional.linear(states, head.weight[self._token_ids], bias)

        head.forward = product
        try:
            return self.model(input_ids=input_ids)
        finally:
            del head.forward


class ModelStudent(Student):
    """A draft model, in float32, with the target's tokens. It drafts those of ``token_ids``, ascending, or all; its
    files have the others, too."""

    def __init__(self, target: LM, model: Any, tokenizer: Any, token_ids: Tensor | None = None) -> None:
        self.target, self.module = target, model if token_ids is None else _FewTokens(model, token_ids)
        model.config.use_cache = False
        self._model, self._tokenizer, self._token_ids = model, tokenizer, token_ids

    def pairs(self, outputs: Any, ids: Tensor) -> list[Pair]:
        target_logits, _ = read_target(self.target, ids, token_ids=self._token_ids)
        return [(target_logits, outputs.logits[..., : target_logits.shape[-1]])]

    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        model = copy.deepcopy(self._model)
        for parameter in model.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(torch.float32)
        lm = build_lm(Checkpoint(name, model, self._tokenizer), self.target.vocab_size)
        return model_drafter(lm if self._token_ids is None else with_few_tokens(lm, self._token_ids))

    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        return (measure_alpha(self.target, drafter, texts),)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        model: Any = copy.deepcopy(self._model).to(dtype)
        model.config.use_cache = True
        model.save_pretrained(folder)
        if self._token_ids is not None:
            (folder / TOKENS).write_text(json.dumps({"token_ids": self._token_ids.tolist()}) + "\n", encoding="utf-8")
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)


def default_shape(target_config: Any) -> Shape:
    """Shallow and wide shape: 1/16 of the layers, at least one, at its width (docs/benchmarks.md)."""
    text = target_config.get_text_config(decoder=True)
    return max(1, round(text.num_hidden_layers / 16)), text.hidden_size


def draft_config(target_config: Any, shape: Shape) -> Any:
    """Configuration of a draft: the target's with other numbers of layers and heads, and other widths. Raises
    OptionError: the width does not divide into heads."""
    num_layers, hidden_size = shape
    for name, value in (("num_layers", num_layers), ("hidden_size", hidden_size)):
        if value < 1:
            raise OptionError(name, value, "a whole number >= 1")
    source = target_config.get_text_config(decoder=True)
    config = copy.deepcopy(source)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config  # a draft is trained in full precision
    num_heads, num_kv = source.num_attention_heads, getattr(source, "num_key_value_heads", None)
    config.num_hidden_layers, config.hidden_size = num_layers, hidden_size
    config.num_attention_heads = max(1, round(num_heads * hidden_size / source.hidden_size))
    if getattr(source, "head_dim", None) is None and hidden_size * num_heads % source.hidden_size:
        # Heads keep their size, so that they can be copied from the target.
        raise OptionError("hidden_size", hidden_size, f"a multiple of {head_size(source)}, the target's head size")
    if num_kv is not None:
        # As many query heads per key head as in the target, if divisible; otherwise one.
        num, per_key = config.num_attention_heads, num_heads // num_kv
        config.num_key_value_heads = num // per_key if num % per_key == 0 else num
    if getattr(source, "intermediate_size", None) is not None:
        in_proportion = source.intermediate_size * hidden_size / source.hidden_size
        config.intermediate_size = max(16, round(in_proportion / 16) * 16)
    if getattr(source, "layer_types", None):
        config.layer_types = [source.layer_types[i] for i in kept_layers(source.num_hidden_layers, num_layers)]
    return config


def head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def kept_layers(num_target_layers: int, num_layers: int) -> list[int]:
    """Indices of the target's layers that initialise a draft: evenly spaced, including the first and the last."""
    return [round(i * (num_target_layers - 1) / max(1, num_layers - 1)) for i in range(num_layers)]


def new_draft(target_config: Any, shape: Shape, seed: int) -> Any:
    """Create a draft with random weights, in float32."""
    config = draft_config(target_config, shape)
    with torch.random.fork_rng(devices=[]):  # weights are created on the CPU
        torch.manual_seed(seed)
        return auto_class("the draft", config).from_config(config, dtype=torch.float32, trust_remote_code=False)


@torch.no_grad()
def copy_slices(target: Any, draft: Any) -> None:
    """Initialise from the target: the leading part of every weight, from some of its layers. Raises OptionError: some
    of the target's weights cannot be sliced.

    The leading features and heads of the target become those of the draft. That is not a good model, but a better start
    than random weights (its embeddings relate to each other like the target's).
    """
    source = widened_weights(target)
    num_target = target.config.get_text_config(decoder=True).num_hidden_layers
    layers = kept_layers(num_target, draft.config.num_hidden_layers)
    parts: dict[str, Tensor] = {}
    for name, weight in draft.state_dict().items():
        match = _LAYER.match(name)
        whole = source.get(name if match is None else f"{match[1]}{layers[int(match[2])]}{match[3]}")
        part = None if whole is None else whole[tuple(slice(size) for size in weight.shape[: whole.ndim])]
        is_fused = any(fused in name for fused in _FUSED) and whole is not None and whole.shape != weight.shape
        if part is None or is_fused or not part.is_floating_point() or part.shape != weight.shape:
            kind = type(target).__name__
            raise OptionError("init", "target", f"{kind} has nothing to copy for the draft's {name}: use scratch")
        parts[name] = part
    draft.load_state_dict(parts)
