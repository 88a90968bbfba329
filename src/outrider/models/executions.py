"""Which execution runs a model: eager (any model), native (known families on the CPU), captured (CUDA graphs)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from outrider.errors import OptionError, UnsupportedModel
from outrider.kernels.library import library
from outrider.models.probe import probe
from outrider.native.engine import NativeForward
from outrider.native.families import has_plan
from outrider.native.plan import NotPlanned
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.execution import EagerExecution
from outrider.runtime.lm import LM

_LOG = logging.getLogger(__name__)


def choose_execution(lm: LM, name: str = "auto", *, is_known: bool = False) -> LM:
    """This model with an execution, probed.

    Args:
        name: one of EXECUTIONS (registry.py); "auto" is "native" on the CPU for models that the native engine knows,
            "captured" on a CUDA device, until a captured step fails or differs, and else "eager".
        is_known: the native engine was found to give the model's logits.

    Raises:
        OptionError: the model or its device has not got the execution.
        UnsupportedModel: its cache cannot be rolled back.
    """
    is_on_cuda = lm.device.type == "cuda"
    if name == "captured" and not is_on_cuda:
        raise OptionError("execution", name, f"CUDA graphs need a CUDA device, and {lm.name} is on {lm.device}")
    if name == "captured" and lm.num_shares > 1:
        raise OptionError("execution", name, f"{lm.name} is shared by {lm.num_shares} processes: leave it out")
    if name == "native" or name == "auto" and not is_on_cuda:
        try:
            return _native(lm, is_known=is_known)
        except NotPlanned as reason:
            if name == "native":
                raise OptionError("execution", name, f"{lm.name} runs eagerly: {reason}") from None
            _LOG.info("%s runs eagerly: %s", lm.name, reason)
    probe(lm)
    is_alone = lm.num_shares == 1 and len({parameter.device for parameter in lm.weights.parameters()}) == 1
    if name == "captured" or name == "auto" and is_on_cuda and is_alone:
        return capture(lm, is_required=name == "captured")
    return lm


def predicted_execution(config: Any, device: torch.device) -> EagerExecution:
    """The execution that "auto" gives a model alone on a device, as far as its configuration tells."""
    if device.type == "cuda":
        return CapturedExecution(is_required=False)
    is_native = device.type == "cpu" and library() is not None and has_plan(config)
    return EagerExecution("native" if is_native else "eager")


def capture(lm: LM, *, is_required: bool = False) -> LM:
    """This model in CUDA graphs.

    Args:
        is_required: see ``CapturedExecution``.
    """
    lm.mixers  # noqa: B018 - found now, or that forward would be captured with a step
    return lm.with_execution(CapturedExecution(is_required=is_required))


def beside(head: LM, target: LM) -> LM:
    """A head with the execution of its target. A head that the native engine does not know runs eagerly there."""
    if target.execution.is_prepared:
        return capture(head)
    if target.native is None:
        return head
    module = head.model
    try:
        forward = NativeForward(module, module.plan())
    except NotPlanned as reason:
        _LOG.info("%s runs eagerly: %s", head.name, reason)
        return head
    head = head.with_execution(target.execution)
    head.native = forward
    return head


def _native(lm: LM, *, is_known: bool) -> LM:
    """This model by the native engine. Raises NotPlanned: the engine does not know the model, or differs from it."""
    if lm.device.type != "cpu" or lm.dtype != torch.float32 or lm.num_shares > 1:
        raise NotPlanned(f"it computes in {lm.dtype} on {lm.device}, in {lm.num_shares} shares")
    forward = NativeForward(lm.weights)
    native = lm.with_execution(EagerExecution("native"))
    native.native, native.layer_shapes = forward, forward.layer_shapes
    for name in ("has_states", "is_recurrent", "mixers"):  # of other shapes
        vars(native).pop(name, None)
    if not is_known:
        try:
            probe(native)
        except UnsupportedModel as difference:
            _LOG.warning("the native engine gives other logits than the model's own code: %s", difference)
            raise NotPlanned("the native engine gives other logits") from None
    return native
