"""Drafts with few tokens: models and heads whose LM head has rows for some tokens of the target only.

q is zero for all others, so that drafts stay exact. All else is shared with the whole draft. The rows keep their type
or their blocks, so that the logits of these tokens are those of the whole draft.

Source of the idea: the LM head is most of a small draft with a large vocabulary (FR-Spec, Zhao et al. 2502.14856).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.families.table import plan_of
from outrider.models.heads.base import Head
from outrider.native.engine import NativeForward
from outrider.native.planned_model import PlannedModel
from outrider.runtime.lm import LM


def with_few_tokens(lm: LM, token_ids: Tensor, quantization: str | None = None) -> LM:
    """A draft with logits for some tokens of the target, in ascending order [N]: a model, or a head whose execution is
    not chosen yet. If its weights are int8 or int4, the rows of the LM head, which a whole model leaves as they are,
    are rounded to 8 bits where our kernel multiplies them. (4 bits cost a tenth of alpha.) Raises UnsupportedModel:
    rows of its LM head cannot be taken, or it knows none of these tokens."""
    if lm.num_shares > 1:
        raise UnsupportedModel(f"{lm.name} is shared by {lm.num_shares} processes: leave out vocab=")
    rows = _places_of(token_ids, lm)
    is_known = rows >= 0
    token_ids, rows = token_ids[is_known].to(lm.device), rows[is_known]
    if not len(rows):
        raise UnsupportedModel(f"{lm.name} knows none of the tokens that it is to draft")
    rounds = quantization in ("int8", "int4")
    is_planned = isinstance(lm.weights, PlannedModel)
    few = lm.with_backend(_planned_rows(lm, rows) if is_planned else _module_rows(lm, rows, rounds))
    few.token_ids = token_ids
    if isinstance(few.weights, Head):
        few.weights.token_ids = token_ids
    return few


def _planned_rows(lm: LM, rows: Tensor) -> NativeForward:
    """Forward of a planned model whose LM head has these rows, under a name of its own."""
    weights: PlannedModel = lm.weights
    head, name = weights.plan.lm_head, "lm_head.weight"
    changed = {name: _rows_of(weights.tensors[head.weight], rows, lm.name)}
    if head.bias:
        changed[head.bias] = _rows_of(weights.tensors[head.bias], rows, lm.name)
    plan = replace(weights.plan, lm_head=replace(head, weight=name))
    return NativeForward(weights.with_tensors(plan, changed), plan)


def _module_rows(lm: LM, rows: Tensor, rounds: bool) -> Any:
    """Forward of a model of Transformers, or a head, whose LM head has these rows, perhaps rounded to 8 bits."""
    names = _token_weights(lm)
    changed = _with_rows(lm.weights, names, rows, lm.name)
    if rounds:
        _round(changed, names[0])
    if isinstance(lm.backend, NativeForward):
        plan = plan_of(changed.config)
        return NativeForward(changed, replace(plan, lm_head=replace(plan.lm_head, weight=names[0])), is_part=True)
    own: Any = copy.copy(lm.backend)
    own.model = own.weights = changed
    return own


def _places_of(token_ids: Tensor, lm: LM) -> Tensor:
    """Row of each token of the target in the LM head of a draft; -1 for none. [N]"""
    if lm.token_ids is not None:
        own = lm.token_ids.to(token_ids.device)
        rows = torch.searchsorted(own, token_ids).clamp_max(len(own) - 1)
        return torch.where(own[rows] == token_ids, rows, -1)
    if lm.own_ids:
        return torch.tensor(lm.own_ids)[token_ids]
    return torch.where(torch.isin(token_ids, torch.tensor(lm.unknown_ids, dtype=torch.long)), -1, token_ids)


def _token_weights(lm: LM) -> list[str]:
    """Names of the parameters with a row for each token, the LM head's first."""
    weights = lm.weights
    module = weights.lm_head if isinstance(weights, Head) else weights.get_output_embeddings()
    if not isinstance(module, nn.Linear):
        raise UnsupportedModel(f"{lm.name} has no LM head of which rows could be taken: leave out vocab=")
    if isinstance(weights, Head):
        return weights.token_weights
    name = next(name for name, one in weights.named_modules() if one is module)
    return [f"{name}.{own}" for own, _ in module.named_parameters()]


def _with_rows(model: nn.Module, names: Sequence[str], rows: Tensor, of: str) -> Any:
    """Copy of a module that shares everything but some parameters, which have these rows only."""
    changed = _copied(model)
    for name in names:
        *path, own = name.split(".")
        module = changed
        for part in path:
            child: Any = _copied(module._modules[part])
            module._modules[part] = child
            module = child
        few = _rows_of(module._parameters[own], rows, of)
        module._parameters[own] = nn.Parameter(few, requires_grad=False)
        if isinstance(module, nn.Linear):
            module.out_features = len(rows)
    return changed


def _round(model: Any, name: str) -> None:
    """Round the rows of a matrix to 8 bits, if our kernel multiplies it, by the largest number of each."""
    weight = model.get_parameter(name).detach()
    if not isinstance(weight, NarrowWeight) or weight.blocks is not None or weight.scale is not None:
        return
    wide = weight.wide()
    scale = wide.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(wide.dtype).tiny) / 127
    own = NarrowWeight((wide / scale).round().to(torch.int8), wide.dtype, scale, None, weight.order)
    path, _, leaf = name.rpartition(".")
    model.get_submodule(path)._parameters[leaf] = nn.Parameter(own, requires_grad=False)


def _copied(module: Any) -> Any:
    new = copy.copy(module)
    for kind in ("_modules", "_parameters", "_buffers"):
        vars(new)[kind] = dict(vars(module)[kind])
    return new


def _rows_of(weight: Any, rows: Tensor, of: str) -> Tensor:
    """Rows of a weight, in its type. [N, I] or [N]"""
    rows = rows.to(weight.device)
    if isinstance(weight, NarrowWeight):
        if weight.blocks is not None:
            return NarrowWeight.of_blocks(weight.stored_rows(rows), weight.blocks, weight.order)
        scale = None if weight.scale is None else weight.scale[rows]
        return NarrowWeight(weight.stored[rows], weight.dtype, scale, None, weight.order)
    if type(weight) not in (Tensor, nn.Parameter) or not weight.is_floating_point():
        kind = f"{type(weight).__name__} of {weight.dtype}"
        raise UnsupportedModel(f"the LM head of {of} is a {kind}, of which no rows are taken: leave out vocab=")
    taken: Tensor = weight.detach()[rows]
    return taken
