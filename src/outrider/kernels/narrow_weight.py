"""Weight matrices on the CPU that stay in their stored type and compute in a wider one.

Most checkpoints are stored in bfloat16, and processors compute in float32. Widening a matrix doubles its bytes without
adding information, and a forward of few rows takes as long as reading the bytes. ``NarrowWeight`` is a tensor of the
wider type to its users: layers and Transformers. It holds the stored numbers. Products of few rows read them
directly (library.py); all other operations use a widened copy, freed at once. So results equal those of the widened
model up to the order of sums. The stored numbers may be integers with a scale for each row of the matrix, blocks
(blocks.py), or even of the wider type themselves: the kernel is faster for few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.kernels.blocks import BlockType
from outrider.kernels.library import WEIGHT_TYPES, dequantize_rows, few_row_matmul, separate
from outrider.kernels.row_copies import RowCopy, copy_rows

_aten = torch.ops.aten
_MAX_ROWS, _MAX_ROWS_STORED = 64, 128
_PANEL_NUMBERS = 2**20  # of a matrix in blocks, widened at a time for more rows: they stay in the processor's cache
_PLAIN: Any = Tensor.__torch_function__
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_KEPT = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


class ExpertLayout(NamedTuple):
    """Matrices of experts in one tensor."""

    number: int  # E
    # None for a tensor [E, O, I]. Else its matrices are transposed [E, I, O], and each has so many parts whose columns
    # alternate:
    num_parts: int | None = None

    def tensor(self, rows: Tensor) -> Tensor:
        """Tensor of the rows of all experts, part by part. [E * O, I] -> [E, O, I] or [E, I, O]"""
        if self.num_parts is None:
            return rows.view(self.number, -1, rows.shape[-1])
        parts = rows.view(self.number, self.num_parts, -1, rows.shape[-1])
        return parts.transpose(1, 2).flatten(1, 2).transpose(1, 2)

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of a tensor; of biases [E, O] too, which become [E * O]."""
        if self.num_parts is None:
            return tensor.flatten(0, 1)
        rows = tensor.transpose(1, -1)
        return rows.reshape(self.number, -1, self.num_parts, *rows.shape[2:]).transpose(1, 2).flatten(0, 2)


class NarrowWeight(Tensor):
    """Matrix [O, I] of the type ``dtype``, or matrices of experts."""

    # Its numbers, in a type that the kernel supports [O, I]; or bytes of its blocks [O, bytes of a row], interleaved
    # (interleaved.h). Of experts: the rows of all [E * O, ...]:
    stored: Tensor
    scale: Tensor | None  # of each row, if the numbers are integers; in ``dtype``. [O, 1]
    blocks: BlockType | None  # their type, if it is stored in blocks
    order: Tensor | None  # column of the matrix that each stored column is, if they are in another order. int32 [I]
    experts: ExpertLayout | None  # their layout; None for one matrix

    @staticmethod
    def __new__(
        cls,
        stored: Tensor,
        dtype: torch.dtype,
        scale: Tensor | None = None,
        blocks: BlockType | None = None,
        order: Tensor | None = None,
        experts: ExpertLayout | None = None,
    ) -> NarrowWeight:
        stored = stored.contiguous()  # the kernel requires it
        num_channels, width = stored.shape
        if blocks is not None:
            width = blocks.width_of(width)
        shape: tuple[int, ...] = num_channels, width
        if experts is not None:
            shape = experts.number, num_channels // experts.number, width
            shape = shape if experts.num_parts is None else (shape[0], shape[2], shape[1])
        # Private to PyTorch. A view of one number would be public, and what took its pointer would read beyond its end.
        weight: NarrowWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=stored.device)
        weight.stored, weight.scale, weight.blocks, weight.order = stored, scale, blocks, order
        weight.experts = experts
        return weight

    @classmethod
    def of_blocks(cls, rows: Tensor, block_type: BlockType, order: Tensor | None = None) -> NarrowWeight:
        """Matrix of float32 in blocks of this type, as checkpoints have them (uint8 [O, bytes of a row])."""
        rows = rows.contiguous()
        stored = torch.empty_like(rows)
        copy_rows([RowCopy(rows, block_type.number, stored)], torch.get_num_threads())
        return cls(stored, torch.float32, None, block_type, order)

    @property
    def rounds(self) -> bool:
        """Whether rows are rounded before they are multiplied with it."""
        return self.blocks is not None and self.blocks.num_digits > 0

    def stored_rows(self, rows: Tensor) -> Tensor:
        """Rows [N] (int64) of a matrix in blocks, as checkpoints have them. uint8 [N, bytes of a row]"""
        assert self.blocks is not None
        return separate(self.stored, rows, self.blocks.number, self.shape[1], torch.get_num_threads())

    def wide(self) -> Tensor:
        if self.blocks is not None:
            wide = self._rows(torch.arange(len(self.stored), device=self.device))
        else:
            with torch.inference_mode(False):  # a normal tensor, which may have views
                wide = self.stored.to(self.dtype)
                wide = wide if self.scale is None else wide * self.scale
        return wide if self.experts is None else self.experts.tensor(wide)

    def _rows(self, rows: Tensor) -> Tensor:
        """Numbers of some of its rows [N, I], if it has no scale."""
        with torch.inference_mode(False):
            if self.blocks is None:
                return self.stored.index_select(0, rows).to(self.dtype)
            width = self.blocks.width_of(self.stored.shape[1])
            wide = dequantize_rows(self.stored, rows, self.blocks.number, width, torch.get_num_threads())
            wide = wide if self.order is None else wide.index_select(-1, self.order.argsort())
            return wide.to(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = f"stored={self.stored}, scale={self.scale}, blocks={self.blocks}, order={self.order}"
        return f"NarrowWeight({self.dtype}, {parts})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[torch.dtype, BlockType | None, ExpertLayout | None]]:
        there = {"stored": self.stored, "scale": self.scale, "order": self.order}
        return [name for name, part in there.items() if part is not None], (self.dtype, self.blocks, self.experts)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], kind: tuple[torch.dtype, BlockType | None, ExpertLayout | None], *_: Any
    ) -> NarrowWeight:
        dtype, blocks, experts = kind
        return cls(inner["stored"], dtype, inner.get("scale"), blocks, inner.get("order"), experts)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            result = _product(*args, **kwargs)
            if result is not None:
                return result
        if func == _SET_DATA:  # a module is moved or converted
            weight, other = args
            if not isinstance(other, cls):
                other = cls(other, other.dtype)
            weight.stored, weight.scale, weight.blocks = other.stored, other.scale, other.blocks
            weight.order, weight.experts = other.order, other.experts
        return _PLAIN(func, (), args, kwargs)  # of no subclass: results are plain tensors

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _KEPT:
            (weight,) = args
            with torch.inference_mode(False):
                given = weight.dtype, weight.scale, weight.blocks, weight.order, weight.experts
                return cls(func(weight.stored, **kwargs), *given)
        # In place (aten.add_.Tensor), or given by name, as results are ("out").
        written = [*args[: str(func).split(".")[1].endswith("_")], *kwargs.values()]
        if any(isinstance(one, cls) for one in written):
            raise RuntimeError("a weight kept in its stored type is read-only: load the model with store='plain'")
        if func is _aten.embedding.default and args[0].scale is None:
            weight, ids, *_ = args  # the others concern gradients
            return weight._rows(ids.reshape(-1).long().contiguous()).view(*ids.shape, weight.shape[1])
        return func(*map(_widen, args), **{name: _widen(one) for name, one in kwargs.items()})


@contextmanager
def without_rounding(model: nn.Module) -> Iterator[None]:
    """Multiply rows of float32 with the model's blocks for a while."""
    rounding = [one for one in model.parameters() if isinstance(one, NarrowWeight) and one.rounds]
    types = [one.blocks for one in rounding]
    try:
        for weight, block_type in zip(rounding, types, strict=True):
            weight.blocks = None if block_type is None else replace(block_type, num_digits=0)
        yield
    finally:
        for weight, block_type in zip(rounding, types, strict=True):
            weight.blocks = block_type


def _widen(argument: Any) -> Any:
    if isinstance(argument, list | tuple):
        return [_widen(one) for one in argument]
    return argument.wide() if isinstance(argument, NarrowWeight) else argument


def _product(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """``functional.linear`` by the kernel: [..., I] -> [..., O]; None if the kernel does not apply."""
    x = input
    if not isinstance(weight, NarrowWeight) or (x.requires_grad and torch.is_grad_enabled()) or weight.experts:
        return None
    stored, (num_channels, width) = weight.stored, weight.shape
    weight_type = WEIGHT_TYPES.get(stored.dtype) if weight.blocks is None else weight.blocks.number
    if x.shape[-1] != width or x.dtype != torch.float32 or weight.dtype != torch.float32 or weight_type is None:
        return None
    if x.device.type != "cpu" or stored.device.type != "cpu":
        return None
    num_rows = x.numel() // width
    # With more rows, a library is faster, for stored numbers even if it needs a widened copy; but none rounds rows.
    most_rows = _MAX_ROWS if stored.dtype == weight.dtype else _MAX_ROWS_STORED
    if num_rows > most_rows and not weight.rounds:
        return None if weight.blocks is None else _by_panels(x, weight, bias)
    rows = (x if weight.order is None else x.index_select(-1, weight.order)).reshape(num_rows, width)
    num_digits = 0 if weight.blocks is None else weight.blocks.num_digits
    result = few_row_matmul(rows, stored, weight_type, torch.get_num_threads(), num_digits)
    if weight.scale is not None:
        result = result * weight.scale[:, 0]
    result = result.view(*x.shape[:-1], num_channels)
    return result if bias is None else result + bias


def _by_panels(x: Tensor, weight: NarrowWeight, bias: Tensor | None) -> Tensor:
    """``functional.linear`` with a matrix in blocks. Some of its rows at a time are widened."""
    num_channels, width = weight.shape
    step = max(1, _PANEL_NUMBERS // width)
    result = x.new_empty(*x.shape[:-1], num_channels)
    for begin in range(0, num_channels, step):
        panel = torch.arange(begin, min(begin + step, num_channels))
        part = functional.linear(x, weight._rows(panel), None if bias is None else bias[begin : begin + step])
        result[..., begin : begin + step] = part
    return result
