"""What the layers of a model keep of a text, and where: the side of a SlotCache that the modelling code sees.

Attention keeps keys and values of each token. Layers with a recurrence or a convolution keep a state of fixed size in
their place; some layers have both. In a recurrent state all earlier tokens are mixed, and it cannot be cropped. So a
forward here never changes one: it leaves the new state beside the old one, and the cache decides later which of them
stays. What a convolution keeps are its inputs of the last few tokens. In models that keep nothing else (LFM2) they have
places, as keys have.

This is the only file that knows the cache classes of Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

WINDOW = 64
"""R: of so many tokens of a row the inputs of convolutions are kept. What is rejected and what a convolution still sees
must fit in."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a row.

    Attributes:
        kind: "conv", the last inputs of a convolution; "recurrent"; or "window", inputs of a convolution by place.
        index: a layer may have several of a kind.
        size: without the rows.
        width: of a window: W, the tokens that a forward sees before its own.
    """

    kind: str
    index: int
    size: tuple[int, ...]
    dtype: torch.dtype
    width: int = 0

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps: of a token H keys of ``key_dim`` and H values of ``value_dim`` numbers (H is 0 without
    attention), and of a row its states."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    states: tuple[StateShape, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        return sum(state.num_bytes for state in self.states)


def layer_shapes(model: Any, device: torch.device) -> tuple[LayerShape, ...]:
    """Learned from what the model puts into a cache of its own; configurations do not state all of it. If its only
    states are the inputs of convolutions, they are kept by place."""
    ids = torch.zeros(1, 1, dtype=torch.long, device=device)
    with torch.inference_mode():
        try:
            output = model(input_ids=ids, use_cache=True)
        except ValueError:
            output = model(input_ids=ids, past_key_values=_WithoutLength(config=model.config))
    # Models without attention have another name for it.
    caches = (getattr(output, name, None) for name in ("past_key_values", "cache_params"))
    cache = next((one for one in caches if one is not None), None)
    if cache is None:
        raise ValueError("it gives back no keys and values")
    shapes = tuple(_shape_of(layer, device) for layer in cache.layers)
    is_recurrent = any(state.kind == "recurrent" for shape in shapes for state in shape.states)
    if is_recurrent or any(shape.states and shape.num_heads for shape in shapes):
        return shapes
    return tuple(replace(shape, states=tuple(map(_by_place, shape.states))) for shape in shapes)


def _by_place(state: StateShape) -> StateShape:
    num_channels, width = state.size
    return StateShape("window", state.index, (WINDOW + 2, num_channels), state.dtype, width)


class _WithoutLength(DynamicCache):
    """An empty cache for models that ask for its length although none of their layers attends. (Transformers' own cache
    then raises an error, an LFM2 of convolutions alone cannot run with it.)"""

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


@dataclass(slots=True)
class Plan:
    """What all layers need to know of the next forward. (Theirs to share: a layer that pointed back to its cache would
    keep both alive until the garbage collector comes by.)

    Attributes:
        capacity: L.
        places: where its tokens go, in the flattened [B * (L+1)] block.
        is_padding: which they are. [B, T]
        view_len: it sees the places 0 .. view_len-1.
        windows: if layers have some.
        sums: if only finite numbers may be kept: over the numbers of each token, which tell whether all of them are
            finite. [B, T] each
    """

    capacity: int
    places: Tensor
    is_padding: Tensor
    view_len: int = 0
    windows: Windows | None = None
    sums: list[Tensor] | None = None

    def kept(self, values: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Numbers of tokens, with zeros for those that are not finite, if only finite ones may be kept.

        Args:
            dims: all but those of rows and tokens.
        """
        if self.sums is None:
            return values
        self.sums.append(values.sum(dim=dims, dtype=torch.promote_types(values.dtype, torch.float32)))
        return values.nan_to_num(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Windows:
    """Where the inputs of convolutions are read and written, in flattened [B * (R+2)] blocks.

    Attributes:
        is_fed: tokens that are no padding. [B, T]
        seen: places of the tokens before those that are fed, and of these. [B, W+T]
        written: places of those that are fed. [B, T]
    """

    is_fed: Tensor
    seen: Tensor
    written: Tensor

    @classmethod
    def at(cls, positions: Tensor, width: int) -> Windows:
        """
        Args:
            positions: of tokens, which follow one another in each row; -1 is padding. [B, T]
            width: W
        """
        num_rows, num_columns = positions.shape
        offsets = torch.arange(-width, num_columns, device=positions.device)
        is_fed = positions >= 0
        # Where padding at the left end would begin; before every text in a row of nothing else.
        begins = torch.where(is_fed, positions - offsets[width:], -num_columns).amax(dim=1, keepdim=True)
        seen = begins + offsets
        row_starts = torch.arange(num_rows, device=positions.device)[:, None] * (WINDOW + 2)
        is_kept = is_fed & (positions > positions.amax(dim=1, keepdim=True) - WINDOW)  # places are written once
        return cls(
            is_fed,
            row_starts + torch.where(seen >= 0, seen % WINDOW, WINDOW + 1),
            row_starts + torch.where(is_kept, positions % WINDOW, WINDOW),
        )


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, [B, L+1, H, D]; the last place of a row takes what padding tokens write."""

    is_sliding = False

    def __init__(self, plan: Plan, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._plan = plan
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("a slot layer is made with its storage")

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, T, D] at the positions announced by ``SlotCache.at``; give back all places in view."""
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, store: Tensor, states: Tensor) -> Tensor:
        # Even a masked place takes part in 0 * value, so a NaN would reach tokens before it.
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
    """States of one layer, [B, ...] each. A forward starts from them; ``settle`` puts the new ones in their place."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]]) -> None:
        super().__init__(number_of_states=1 + max(shape.index for shape, _ in states))
        self._stores = {(shape.kind, shape.index): store for shape, store in states}
        self._new: dict[tuple[str, int], Tensor] = {}
        for kind, index in self._stores:
            flags = self.is_conv_states_initialized if kind == "conv" else self.is_recurrent_states_initialized
            flags[index] = self.has_previous_state[index] = True
        self.begin(is_single=False)

    def begin(self, *, is_single: bool) -> None:
        """A forward starts.

        Args:
            is_single: layers are given one token a row at a time. Then the modelling code writes into the states that
                it finds, so it finds copies.
        """
        found = {key: store.clone() if is_single else store for key, store in self._stores.items()}
        self._new = dict(found) if is_single else {}
        for (kind, index), state in found.items():
            (self.conv_states if kind == "conv" else self.recurrent_states)[index] = state

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Put the window before the new inputs [B, C, T], and note the window behind them. [B, C, W+T]"""
        window = self.conv_states[state_idx]
        assert window is not None
        inputs = torch.cat((window, conv_states), dim=-1)
        self._new["conv", state_idx] = inputs[..., -window.shape[-1] :]
        return inputs

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Note the new state."""
        self._new["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def settle(self, is_kept: Tensor) -> None:
        """In the rows that ``is_kept`` [B] names the state after the last forward stays, in others the one before."""
        for key, store in self._stores.items():
            rows = is_kept.to(store.device).view(-1, *[1] * (store.ndim - 1))
            store.copy_(torch.where(rows, self._new[key].to(store.dtype), store))
        self._new = {}


class WindowLayer(LinearAttentionLayer):
    """Inputs of convolutions, [B, R+2, C] each; those of position j have the place j mod R. Place R takes what padding
    writes; place R+1 holds the zeros before the beginning of a text."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]], plan: Plan) -> None:
        super().__init__(number_of_states=len(states))
        self._plan = plan
        self._states = {shape.index: (shape, store) for shape, store in states}
        self.record_past = True  # single tokens are not written into a state, but come to ``update_conv_state`` as well
        for index in self._states:
            self.is_conv_states_initialized[index] = self.has_previous_state[index] = True

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Tensor:
        """Put the window before the new inputs [B, C, T], and keep these. [B, C, W+T]

        Padding may stand before the tokens that are fed, where the cache has those tokens already: their inputs are
        read.
        """
        windows, (shape, store) = self._plan.windows, self._states[state_idx]
        assert windows is not None
        conv_states = self._plan.kept(conv_states, (1,))
        num_seen = shape.width + conv_states.shape[-1]
        seen = windows.seen[:, -num_seen:].to(store.device)
        inputs = store.flatten(0, 1).index_select(0, seen.flatten()).unflatten(0, seen.shape).transpose(1, 2)
        is_fed, written = windows.is_fed.to(store.device), windows.written.to(store.device)
        store.flatten(0, 1).index_copy_(0, written.flatten(), conv_states.transpose(1, 2).flatten(0, 1))
        fed = torch.where(is_fed[:, None], conv_states, inputs[..., shape.width :])
        return torch.cat((inputs[..., : shape.width], fed), dim=-1)


class StateSlotLayer(StateLayer, SlotLayer):
    """States, and keys and values."""

    def __init__(self, states: Sequence[tuple[StateShape, Tensor]], plan: Plan, keys: Tensor, values: Tensor) -> None:
        SlotLayer.__init__(self, plan, keys, values)
        StateLayer.__init__(self, states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a slot layer is made with its storage")

    def get_max_length(self) -> int:
        return SlotLayer.get_max_length(self)


class EmptyLayer:
    """Keeps nothing, as layers without attention and states."""

    is_compileable = True
    supports_early_init = False

    def get_max_length(self) -> int:
        return -1


def make_layers(
    shapes: Sequence[LayerShape], plan: Plan, token_stores: Iterator[Tensor], row_stores: Iterator[Tensor]
) -> list[Any]:
    """The layers of a cache over their storage, which is taken in order."""
    layers: list[Any] = []
    for shape in shapes:
        pair = [next(token_stores) for _ in range(2)] if shape.num_heads else []
        states = [(state, next(row_stores)) for state in shape.states]
        if states and states[0][0].kind == "window":
            layers.append(WindowLayer(states, plan))
        elif states and pair:
            layers.append(StateSlotLayer(states, plan, *pair))
        elif states:
            layers.append(StateLayer(states))
        else:
            layers.append(SlotLayer(plan, *pair) if pair else EmptyLayer())
    return layers
