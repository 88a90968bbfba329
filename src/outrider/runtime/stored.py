"""The plain tensors behind a parameter. A quantized weight has several: its numbers, and their scales."""

from __future__ import annotations

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def stored_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the bytes of a parameter, in the order in which torch takes it apart."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in stored_tensors(getattr(tensor, name))]
    scales = [getattr(tensor, "SCB", None)]  # of bitsandbytes' two kinds of parameters
    state = getattr(tensor, "quant_state", None)
    if state is not None:
        scales += [state.absmax, state.code]
    return [tensor, *(scale for scale in scales if isinstance(scale, Tensor))]
