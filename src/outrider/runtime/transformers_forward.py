"""Forwards of a model in its own code, Transformers'. This module adds the mask, the cache, and the hooks that record
hidden states or call recurrent layers as their states need it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.forward import Results
from outrider.runtime.modules import cache_argument, find_mixers, recorded_states, token_by_token, with_finite_numbers
from outrider.runtime.weight_tensors import tp_size_of
from outrider.system.ranks import any_process


class TransformersForward:
    """A causal language model of Transformers. Attributes as of ``Forward``."""

    is_batch_invariant = False

    def __init__(self, model: Any) -> None:
        self.model = self.weights = model
        self.device = next(model.parameters()).device
        # Masks match the type of the activations: quantized weights are integers.
        self.dtype = next(one.dtype for one in model.parameters() if one.is_floating_point())
        self.num_shares = tp_size_of(model)
        self.is_stepped = False
        self.lock = threading.RLock()  # hooks and captures change the model for all threads

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of a cache's layers, found by running the model."""
        from outrider.runtime.cache_layers import layer_shapes  # which imports Transformers

        return layer_shapes(self.model, self.device)

    @cached_property
    def visibility(self) -> Visibility:
        return Visibility.of(self.model)

    @cached_property
    def _cache_name(self) -> str:
        return cache_argument(self.model)

    @cached_property
    def mixers(self) -> tuple[nn.Module, ...]:
        """Modules that update the states kept at an anchor."""
        if not any(state.is_fed_again for shape in self.layer_shapes for state in shape.states):
            return ()
        whole = copy.copy(self)
        whole.is_stepped = False
        cache = SlotCache.empty(self.layer_shapes, 1, 2)
        columns = torch.arange(2, device=self.device)[None]
        with self.lock, torch.inference_mode(), find_mixers(self.model, cache.state_layers) as found:
            whole(torch.zeros_like(columns), columns, cache, 2)
        return tuple(found)

    @property
    def num_embedded(self) -> int:
        return len(self.model.get_input_embeddings().weight)

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        columns: Tensor | None = None,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> Results:
        assert states is None, "a model reads no states of another"
        model = self.model
        wanted = None if columns is None else columns[:, -(num_logits or 0) :]
        is_single = self.is_stepped or positions.shape[1] == 1
        cache.at(positions, view_len, is_single=is_single, keeps_finite=keeps_finite)
        with self.lock, recorded_states(model, features) as found, ExitStack() as stack:
            if self.is_stepped:
                stack.enter_context(token_by_token(self.mixers))
            if keeps_finite:
                stack.enter_context(with_finite_numbers(self.mixers, (len(ids), ids.shape[1]), cache.kept))
            if wanted is not None:
                # The LM head is often the largest product: compute it for the wanted columns only.
                num_logits = None
                hook = model.get_output_embeddings().register_forward_pre_hook(
                    lambda _, arguments: (take_columns(arguments[0], wanted), *arguments[1:])
                )
                stack.callback(hook.remove)
            arguments: dict[str, Any] = {self._cache_name: cache.argument}
            kept: int | Tensor = num_logits or 0
            if features and num_logits:  # given a number, Gemma 4 drops other columns before its last layers
                kept = torch.arange(ids.shape[1] - num_logits, ids.shape[1], device=ids.device)
            position_ids = positions.clamp_min(0)
            if cache.offsets is not None:
                position_ids = position_ids + cache.offsets[:, None]
            # A model without attention may take a mask for something else.
            has_mask = any(shape.num_heads for shape in self.layer_shapes)
            output = model(
                input_ids=ids,
                attention_mask=self.visibility.masks(positions, view_len, self.dtype) if has_mask else None,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=kept,
                **arguments,
            )
        broken = cache.find_broken()
        broken = None if broken is None else any_process(broken)
        return Results(output.logits, tuple(found[i] for i in features), broken)


def take_columns(values: Tensor, columns: Tensor) -> Tensor:
    """Gather columns of each row: [B, W, D], [B, T] -> [B, T, D]"""
    return values.gather(1, columns[..., None].expand(-1, -1, values.shape[-1]).to(values.device))
