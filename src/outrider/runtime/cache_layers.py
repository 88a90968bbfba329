"""Layers of a SlotCache: the side that the modelling code sees.

Attention keeps keys and values of each token. Recurrences and convolutions keep a state of fixed size instead; some
layers have both. A recurrent state mixes all earlier tokens and cannot be cropped, so a forward never changes one: it
stores the new state beside the old one, and the cache decides later which to keep. The state of a convolution is its
inputs of the last few tokens. In models without other states (LFM2) these are stored by position, as keys are.

This is the only file that knows the cache classes of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from outrider.runtime.cache_shapes import WINDOW, Feed, LayerShape, StateShape
from outrider.runtime.modules import cache_argument, cache_of


def layer_shapes(model: Any, device: torch.device) -> tuple[LayerShape, ...]:
    """Shapes found by running the model with its own cache; configurations do not state all of them. Convolution
    inputs are stored by position if there are no other states."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        try:
            output = model(input_ids=ids, use_cache=True)
        except ValueError:
            output = model(input_ids=ids, **{cache_argument(model): _WithoutLength(config=model.config)})
    cache = cache_of(output)
    if cache is None:
        raise ValueError("it returns no keys and values")
    shapes = tuple(_shape_of(layer, device) for layer in cache.layers)
    if not any(shape.states for shape in shapes):
        rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
        has_offset = "mrope_section" in rope  # it rotates by places in an image
        return (*(replace(first, has_offset=has_offset) for first in shapes[:1]), *shapes[1:])
    is_recurrent = any(state.kind == "recurrent" for shape in shapes for state in shape.states)
    if is_recurrent or any(shape.states and shape.num_heads for shape in shapes):
        return shapes
    return tuple(replace(shape, states=tuple(map(_by_place, shape.states))) for shape in shapes)


def _by_place(state: StateShape) -> StateShape:
    num_channels, width = state.size
    return StateShape("window", state.index, (WINDOW + 2, num_channels), state.dtype, width)


class _WithoutLength(DynamicCache):
    """Empty cache for models that ask for its length although no layer attends. (Transformers' own raises an error
    then; an LFM2 of convolutions alone cannot run with it.)"""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


def _shape_of(layer: Any, device: torch.device) -> LayerShape:
    states, dtype = [], torch.float32
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for kind, found in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
            for index, state in found.items():
                if state is not None:
                    states.append(StateShape(kind, index, tuple(state.shape[1:]), state.dtype))
                    device = state.device
    if not isinstance(getattr(layer, "keys", None), Tensor):
        return LayerShape(0, 0, 0, dtype, device, tuple(states))
    _, num_heads, _, key_dim = layer.keys.shape
    return LayerShape(num_heads, key_dim, layer.values.shape[-1], layer.keys.dtype, layer.keys.device, tuple(states))


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, L+1, H, D]. Padding tokens write to the last place of a row."""

    is_sliding = False

    def __init__(self, plan: Feed, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._plan = plan
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a slot layer is constructed with its storage")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] at the positions given to ``SlotCache.at``; return all places in view."""
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        # 0 * NaN of a masked place would reach earlier tokens.
        states = self._plan.kept(states, (1, 3))
        places = self._plan.places.to(store.device)
        store.flatten(0, 1).index_copy_(0, places, states.transpose(1, 2).flatten(0, 1))
        return store[:, : self._plan.view_len].transpose(1, 2)  # [B, H, view_len, D]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._plan.view_len, 0

    def get_seq_length(self) -> int:
        return self._plan.view_len

    def get_max_length(self) -> int:
        return self._plan.capacity


class StateLayer(LinearAttentionLayer):
    """States of one layer, [B, ...] each. A forward starts from them; ``settle`` replaces them with the new ones."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]]) -> None:
        super().__init__(number_of_states=1 + max(shape.index for shape, _ in states))
        self._stores = {(shape.kind, shape.index): store for shape, store in states}
        self._new: dict[tuple[str, int], Tensor] = {}
        for kind, index in self._stores:
            flags = self.is_conv_states_initialized if kind == "conv" else self.is_recurrent_states_initialized
            flags[index] = self.has_previous_state[index] = True
        self.begin(is_single=False)

    def begin(self, *, is_single: bool) -> None:
        """Start a forward. If layers get a single token per row at a time, the modelling code writes into the states
        that it is given, so it gets copies."""
        found = {key: store.clone() if is_single else store for key, store in self._stores.items()}
        self._new = dict(found) if is_single else {}
        for (kind, index), state in found.items():
            (self.conv_states if kind == "conv" else self.recurrent_states)[index] = state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Prepend the window to the new inputs [B, C, T], and keep the last inputs as new window. [B, C, W+T]"""
        window = self.conv_states[state_idx]
        assert window is not None
        inputs = torch.cat((window, conv_states), dim=-1)
        self._new["conv", state_idx] = inputs[..., -window.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Keep the new state beside the old one."""
        self._new["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def settle(self, is_kept: Tensor) -> None:
        """Replace the states by those of the last forward, in the rows ``is_kept``. [B]"""
        for key, store in self._stores.items():
            rows = is_kept.to(store.device).view(-1, *[1] * (store.ndim - 1))
            store.copy_(torch.where(rows, self._new[key].to(store.dtype), store))
        self._new = {}


class WindowLayer(LinearAttentionLayer):
    """Convolution inputs, [B, R+2, C] each, position j at place j mod R. Place R takes the writes of padding; place
    R+1 holds the zeros before a sequence."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]], plan: Feed) -> None:
        super().__init__(number_of_states=len(states))
        self._plan = plan
        self._states = {shape.index: (shape, store) for shape, store in states}
        self.record_past = True  # single tokens go through ``update_conv_state`` too
        for index in self._states:
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = True

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Prepend the window to the new inputs [B, C, T], and store these. [B, C, W+T]

        Left padding may stand for tokens that are cached already: their inputs are read.
        """
        windows, (shape, store) = self._plan.windows, self._states[state_idx]
        assert windows is not None
        conv_states = self._plan.kept(conv_states, (1,))
        num_seen = shape.width + conv_states.shape[-1]
        is_fed, seen, written = (one.to(store.device) for one in windows)
        seen = seen[:, -num_seen:]
        inputs = store.flatten(0, 1).index_select(0, seen.flatten()).unflatten(0, seen.shape).transpose(1, 2)
        store.flatten(0, 1).index_copy_(0, written.flatten(), conv_states.transpose(1, 2).flatten(0, 1))
        fed = torch.where(is_fed[:, None], conv_states, inputs[..., shape.width :])
        return torch.cat((inputs[..., : shape.width], fed), dim=-1)


class StateSlotLayer(StateLayer, SlotLayer):
    """States, keys and values."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]], plan: Feed, keys: Tensor, values: Tensor) -> None:
        SlotLayer.__init__(self, plan, keys, values)
        StateLayer.__init__(self, states)

    lazy_initialization = SlotLayer.lazy_initialization
    get_max_length = SlotLayer.get_max_length


class EmptyLayer:
    """Stores nothing: for layers without attention and states."""

    is_compileable = True
    supports_early_init = False

    def get_max_length(self) -> int:
        return -1


class ModelCache(Cache):
    """Cache as models of Transformers take it."""

    def __init__(
        self, shapes: Sequence[LayerShape], plan: Feed, token_stores: Iterator[Tensor], row_stores: Iterator[Tensor]
    ) -> None:
        """Layers are built over their storage, which is consumed in order."""
        self._plan = plan
        super().__init__(layers=[_layer(shape, plan, token_stores, row_stores) for shape in shapes])

    # One answer for all layers: some models ask a layer without attention.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._plan.view_len

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._plan.view_len, 0


def _layer(shape: LayerShape, plan: Feed, token_stores: Iterator[Tensor], row_stores: Iterator[Tensor]) -> Any:
    pair = [next(token_stores) for _ in range(2)] if shape.num_heads else []
    states = [(state, next(row_stores)) for state in shape.states]
    if states and states[0][0].kind == "window":
        return WindowLayer(states, plan)
    if states:
        return StateSlotLayer(states, plan, *pair) if pair else StateLayer(states)
    return SlotLayer(plan, *pair) if pair else EmptyLayer()
