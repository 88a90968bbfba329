"""Shapes of a cache, and what its layers share in a forward."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOW = 64
"""R: inputs of convolutions and of the native engine's recurrences are kept for the last R tokens of a row: those that
may be rejected, those that a convolution still sees, and those that a state has not consumed (recurrence.h)."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One state of a row."""

    # "conv", the last inputs of a convolution, or "recurrent": both are kept at an anchor, from which tokens are fed
    # again; "window", inputs by place; or "replayed": kept at an anchor, from which such inputs are consumed again (the
    # native engine's):
    kind: str
    index: int  # a layer may have several of a kind
    size: tuple[int, ...]  # without the rows
    dtype: torch.dtype
    width: int = 0  # W of a window: the number of earlier tokens that a convolution sees

    @property
    def num_bytes(self) -> int:
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def is_fed_again(self) -> bool:
        """Whether a forward feeds the tokens since the state's anchor again."""
        return self.kind in ("conv", "recurrent")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Cache of one layer: per token H keys of ``key_dim`` and H values of ``value_dim`` numbers (H is 0 without
    attention), per row its states; and, with the first layer, an offset of positions if images have other places than
    their tokens (``SlotCache.shift``), and the memory that forwards need beside their results. In tensor parallelism
    H is that of one process's share."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device
    states: tuple[StateShape, ...] = ()
    has_offset: bool = False
    scratch_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        return sum(state.num_bytes for state in self.states)


@dataclass(slots=True)
class Feed:
    """The next forward, shared by all layers. (A layer that pointed back to its cache would make a reference cycle.)"""

    capacity: int  # L
    places: Tensor  # indices of its tokens in the flattened block [B * (L+1)]
    is_padding: Tensor  # [B, T]
    view_len: int = 0  # it sees the places 0 .. view_len-1
    # The places at which layers with convolution windows read and write (``windows_at``); None without such layers:
    windows: tuple[Tensor, Tensor, Tensor] | None = None
    # If the cache is to stay finite: sums over the numbers of each token, not finite if one of them is not. [B, T]
    # each:
    sums: list[Tensor] | None = None

    def kept(self, values: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Numbers of tokens, with zeros for those that are not finite if the cache is to stay finite. ``dims`` are all
        but those of rows and tokens."""
        if self.sums is None:
            return values
        self.sums.append(values.sum(dim=dims, dtype=torch.promote_types(values.dtype, torch.float32)))
        return values.nan_to_num(0.0, 0.0, 0.0)


def windows_at(positions: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Indices at which convolution inputs are read and written, in flattened blocks [B * (R+2)]: tokens that are not
    padding [B, T]; the W tokens before those that are fed, then these [B, W+T]; and the tokens that are fed [B, T].
    Positions follow one another in each row; -1 is padding. [B, T]"""
    num_rows, num_columns = positions.shape
    offsets = torch.arange(-width, num_columns, device=positions.device)
    is_fed = positions >= 0
    # Where left padding would begin; before the sequence in a row of padding alone.
    begins = torch.where(is_fed, positions - offsets[width:], -num_columns).amax(dim=1, keepdim=True)
    seen = begins + offsets
    row_starts = torch.arange(num_rows, device=positions.device)[:, None] * (WINDOW + 2)
    is_kept = is_fed & (positions > positions.amax(dim=1, keepdim=True) - WINDOW)  # each place is written once
    return (
        is_fed,
        row_starts + torch.where(seen >= 0, seen % WINDOW, WINDOW + 1),
        row_starts + torch.where(is_kept, positions % WINDOW, WINDOW),
    )
