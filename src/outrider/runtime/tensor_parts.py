"""The plain tensors of a parameter. A quantized weight has several: its numbers and their scales."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shared(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether several processes share the tensor, each with a part."""
    module = sys.modules.get("torch.distributed.tensor")  # where none is imported, none is there
    return module is not None and isinstance(tensor, module.DTensor)


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered from all processes if they share it."""
    return tensor.full_tensor() if is_shared(tensor) else tensor


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """Tensors with the bytes of a parameter, in the order of ``__tensor_flatten__``."""
    if is_shared(tensor):
        return stored_tensors(tensor.to_local())
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in stored_tensors(getattr(tensor, name))]
    scales = [getattr(tensor, "SCB", None)]  # bitsandbytes: 8-bit parameters here, 4-bit ones below
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        scales += [state.absmax, state.code]
    return [tensor, *(scale for scale in scales if isinstance(scale, Tensor))]
