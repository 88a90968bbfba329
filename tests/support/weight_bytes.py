"""Bytes of the weights of a model in memory."""

from typing import Any

from torch import Tensor, nn

from outrider.runtime.weight_tensors import stored_tensors


def num_bytes(model: Any) -> int:
    """Bytes of all weights and buffers, shared ones once."""
    stored = [inner for tensor in (*model.parameters(), *model.buffers()) for inner in stored_tensors(tensor)]
    modules = model.modules() if isinstance(model, nn.Module) else ()
    # bitsandbytes moves the scales there when a layer is first used.
    scales = [getattr(getattr(module, "state", None), "SCB", None) for module in modules]
    stored += [scale for scale in scales if isinstance(scale, Tensor)]
    return sum({inner.data_ptr(): inner.numel() * inner.element_size() for inner in stored}.values())
