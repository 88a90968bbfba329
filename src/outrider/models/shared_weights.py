"""Weights that several models in memory have in common: one copy of each.

Adapters of one base change some of its matrices, and the same draft may serve several targets. Weights are equal if
they have the same bytes in the same form, whatever the models are called and wherever they come from.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from outrider.runtime.tensor_parts import stored_tensors

_LOG = logging.getLogger(__name__)


def share_weights(name: str, model: nn.Module, others: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Replace weights of a model by equal ones, of the same name, of others.

    Args:
        name: of the model, for the log.

    Returns:
        The weights that it shares now.
    """
    theirs = [dict(other.named_parameters(remove_duplicate=False)) for other in others]
    shared: dict[int, nn.Parameter] = {}
    for key, weight in list(model.named_parameters(remove_duplicate=False)):
        found = next((own[key] for own in theirs if key in own and _are_equal(weight, own[key])), None)
        if found is not None:
            module, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(module), leaf, found)
            shared[id(found)] = found
    if shared:
        num_shared, num_all = (sum(one.numel() for one in some) for some in (shared.values(), model.parameters()))
        _LOG.info("%s: %.1f%% of the weights are those of other models", name, 100 * num_shared / num_all)
        _give_back()
    return list(shared.values())


def _give_back() -> None:
    """Return freed memory to the system: glibc keeps hundreds of megabytes that loading and merging have used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if _form(one) is None or _form(one) != _form(other):
        return False
    pairs = zip(stored_tensors(one), stored_tensors(other), strict=True)
    return all(_form(a) == _form(b) and torch.equal(_bytes(a.detach()), _bytes(b.detach())) for a, b in pairs)


def _form(tensor: Tensor) -> Any:
    """All of a weight but its numbers; None if that is not known, or if they are elsewhere."""
    facts = type(tensor), tensor.dtype, tensor.shape, tensor.device
    if is_traceable_wrapper_subclass(tensor):
        return *facts, tensor.__tensor_flatten__()[1]
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return facts if is_plain else None


def _bytes(tensor: Tensor) -> Tensor:
    """Bytes, since equal numbers may differ (-0.0) and NaN does not equal itself."""
    return tensor.contiguous().flatten().view(torch.uint8)
