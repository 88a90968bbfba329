"""Weight matrices on the CPU that stay in their stored type and compute in a wider one.

Most checkpoints are stored in bfloat16, and processors compute in float32. Widening a matrix doubles its bytes without
adding information, and a forward of few rows takes as long as reading the bytes. ``NarrowWeight`` is a tensor of the
wider type to its users: layers, Transformers, torch.export. It holds the stored numbers. Products of few rows read them
directly (library.py); all other operations use a widened copy, freed at once. So results equal those of the widened
model up to the order of sums. The stored numbers may be integers with a scale for each row of the matrix, or even of
the wider type themselves: the kernel is faster for few rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

from outrider.kernels.library import WEIGHT_DTYPES, few_row_matmul, into

_aten = torch.ops.aten
# Most rows for the kernel. With more, a library is faster; for stored numbers even if it needs a widened copy.
_MAX_ROWS, _MAX_ROWS_STORED = 64, 128
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_KEPT = (_aten.detach.default, _aten.alias.default, _aten.clone.default)


class NarrowWeight(Tensor):
    """Matrix [O, I] of the type ``dtype``.

    Attributes:
        stored: its numbers, in a type that the kernel supports. [O, I]
        scale: of each row, if the numbers are integers; in ``dtype``. [O, 1]
    """

    stored: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> NarrowWeight:
        stored = stored.contiguous()  # the kernel requires it
        weight: NarrowWeight = Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=dtype, device=stored.device
        )
        weight.stored, weight.scale = stored, scale
        return weight

    def wide(self) -> Tensor:
        """Plain copy in the wider type."""
        with torch.inference_mode(False):  # a normal tensor, which may have views
            wide = self.stored.to(self.dtype)
            return wide if self.scale is None else wide * self.scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NarrowWeight({self.dtype}, stored={self.stored}, scale={self.scale})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["stored"] if self.scale is None else ["stored", "scale"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: torch.dtype, *_: Any) -> NarrowWeight:
        return cls(inner["stored"], dtype, inner.get("scale"))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            result = _product(*args, **kwargs)
            if result is not None:
                return result
        if func == _SET_DATA:  # a module is moved or converted
            weight, other = args
            weight.stored, weight.scale = (other.stored, other.scale) if isinstance(other, cls) else (other, None)
        with torch._C.DisableTorchFunctionSubclass():  # results are plain tensors
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _KEPT:
            (weight,) = args
            with torch.inference_mode(False):
                return cls(func(weight.stored, **kwargs), weight.dtype, weight.scale)
        if any(isinstance(one, cls) for one in _written(func, args, kwargs)):
            raise RuntimeError("a weight kept in its stored type is read-only: load the model with store='plain'")
        if func is _aten.embedding.default and args[0].scale is None:
            weight, *others = args
            return func(weight.stored, *others, **kwargs).to(weight.dtype)
        args, kwargs = tree_map(lambda one: one.wide() if isinstance(one, cls) else one, (args, kwargs))
        return func(*args, **kwargs)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    names = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    return [given.get(name) for name in names]


def _product(input: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor | None:
    """``functional.linear`` by the kernel: [..., I] -> [..., O]; None if the kernel does not apply."""
    x = input
    if not isinstance(weight, NarrowWeight) or (x.requires_grad and torch.is_grad_enabled()):
        return None
    stored = weight.stored
    num_channels, width = stored.shape
    if x.shape[-1] != width or x.dtype != torch.float32 or weight.dtype != torch.float32:
        return None
    if x.device.type != "cpu" or stored.device.type != "cpu" or stored.dtype not in WEIGHT_DTYPES:
        return None
    num_rows = x.numel() // width
    if num_rows > (_MAX_ROWS if stored.dtype == weight.dtype else _MAX_ROWS_STORED):
        return None
    rows, num_threads = x.reshape(num_rows, width), torch.get_num_threads()
    if type(rows) is Tensor:
        # Bypasses the dispatcher, which takes longer than many products.
        rows = rows.contiguous()  # named, so that a copy outlives the call
        result = rows.new_empty(num_rows, num_channels)
        into(result, rows, [stored], num_threads)()
    else:  # traced, or fake
        result = few_row_matmul(rows, [stored], num_threads)
    if weight.scale is not None:
        result = result * weight.scale[:, 0]
    result = result.view(*x.shape[:-1], num_channels)
    return result if bias is None else result + bias
