"""Which execution runs a model: eager (any model), native (known families on the CPU), captured (CUDA graphs)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from outrider.errors import OptionError
from outrider.kernels.library import library
from outrider.models.families.table import has_plan, plan_of
from outrider.models.probe import probe
from outrider.native.engine import NativeForward
from outrider.native.plan import NotPlanned
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.execution import EagerExecution, NativeExecution
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward

_LOG = logging.getLogger(__name__)


def choose_execution(lm: LM, name: str = "auto") -> LM:
    """A model of Transformers with one of EXECUTIONS (registry.py). "auto" is "native" on the CPU for models that the
    native engine knows, "captured" on a CUDA device, until a captured step fails or differs, and else "eager". A model
    that runs in its own code is probed. Raises OptionError: the model or its device has not got the execution;
    UnsupportedModel: its cache cannot be rolled back."""
    is_on_cuda = lm.device.type == "cuda"
    if name == "captured" and not is_on_cuda:
        raise OptionError("execution", name, f"CUDA graphs need a CUDA device, and {lm.name} is on {lm.device}")
    if name == "captured" and lm.num_shares > 1:
        raise OptionError("execution", name, f"{lm.name} is shared by {lm.num_shares} processes: leave it out")
    if name == "native" or name == "auto" and not is_on_cuda:
        try:
            return native_lm(lm)
        except NotPlanned as reason:
            if name == "native":
                raise OptionError("execution", name, f"{lm.name} runs eagerly: {reason}") from None
            _LOG.info("%s runs eagerly: %s", lm.name, reason)
    probe(lm)
    is_alone = lm.num_shares == 1 and len({parameter.device for parameter in lm.weights.parameters()}) == 1
    if name == "captured" or name == "auto" and is_on_cuda and is_alone:
        return capture(lm, is_required=name == "captured")
    return lm


def native_lm(lm: LM) -> LM:
    """This model by the native engine. Raises NotPlanned: the engine does not know the model."""
    if not isinstance(lm.backend, NativeForward):
        if lm.device.type != "cpu" or lm.dtype != torch.float32 or lm.num_shares > 1:
            raise NotPlanned(f"it computes in {lm.dtype} on {lm.device}, in {lm.num_shares} shares")
        plan, weights = plan_of(lm.weights.config), lm.weights.state_dict(keep_vars=True)
        head = weights.get("lm_head.weight")
        if plan.lm_head.weight == plan.embedding and head is not None and head is not weights[plan.embedding]:
            raise NotPlanned("its configuration ties its LM head, which is another matrix than its embedding")
        lm = lm.with_backend(NativeForward(lm.weights, plan))
    return lm.with_execution(NativeExecution())


def predicted_execution(config: Any, device: torch.device) -> str:
    """The execution that "auto" gives a model alone on a device, as far as its configuration tells."""
    if device.type == "cuda":
        return CapturedExecution.name
    is_native = device.type == "cpu" and library() is not None and has_plan(config)
    return NativeExecution.name if is_native else EagerExecution.name


def capture(lm: LM, *, is_required: bool = False) -> LM:
    """This model in CUDA graphs (see ``CapturedExecution``)."""
    if isinstance(lm.backend, TransformersForward):
        lm.backend.mixers  # noqa: B018 - found now, or that forward would be captured with a step
    return lm.with_execution(CapturedExecution(is_required=is_required))


def beside(head: LM, target: LM) -> LM:
    """A head with the execution of its target. A head that the native engine does not know runs eagerly there."""
    if target.execution.is_prepared:
        return capture(head)
    if not isinstance(target.backend, NativeForward):
        return head
    try:
        forward = NativeForward(head.model, head.model.plan(), is_part=True)
    except NotPlanned as reason:
        _LOG.info("%s runs eagerly: %s", head.name, reason)
        return head
    forward.layer_shapes, forward.lock = head.layer_shapes, head.lock
    return head.with_backend(forward).with_execution(target.execution)
