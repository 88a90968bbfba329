"""Parameters of a model in the tensors of a GGUF file: each tensor is used, and each parameter found, or the file is
refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.gguf.families import Family, StatedModel
from outrider.models.gguf.file import GgufFile, StoredTensor

_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is in a file.

    Attributes:
        tensors: joined along their rows if there are several.
        order: rows by their places in the file; None for the file's order.
        change: undoes the file's own form of the numbers; None if there is none.
    """

    tensors: tuple[StoredTensor, ...]
    order: Tensor | None
    change: Callable[[Tensor], Tensor] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        # Without operators on the device "meta", whose first use imports seconds of PyTorch's compiler.
        first, *others = (one.shape for one in self.tensors)
        if any(len(other) != len(first) or len(first) < 2 for other in others):
            return ()  # of no parameter
        if others:
            first = (*first[:-2], sum(one.shape[-2] for one in self.tensors), first[-1])
        return first if self.change is None else tuple(self.change(torch.zeros(()).expand(first)).shape)

    def numbers(self) -> Tensor:
        """The parameter, float32."""
        return self._join([one.numbers() for one in self.tensors])

    def _join(self, parts: list[Tensor]) -> Tensor:
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        ordered = joined if self.order is None else joined[self.order.to(joined.device)]
        return ordered if self.change is None else self.change(ordered).contiguous()


def sources(file: GgufFile, model: StatedModel, bare: nn.Module, name: str) -> dict[str, Source]:
    """Sources of all parameters of a model, by name; of shared ones, under one of their names.

    Args:
        bare: the skeleton of the model.
        name: for errors.

    Raises:
        UnsupportedModel: a tensor of the file has no place in the model.
        ModelCorrupt: a parameter is missing, or has another shape.
    """
    parameters = dict(bare.named_parameters(remove_duplicate=False))
    parts: dict[str, list[str]] = {}
    for tensor in file.tensors:
        if tensor not in model.tensors:
            parts.setdefault(_parameter(tensor, model.family, parameters, name), []).append(tensor)
    found = {}
    for parameter, tensors in parts.items():
        leaf, expected = _leaf(tensors[0]), tuple(parameters[parameter].shape)
        # A gate comes first: "ffn_gate_exps" before "ffn_up_exps".
        stored = tuple(file.tensors[one] for one in sorted(tensors))
        source = Source(stored, None, model.family.changes.get(leaf))
        if source.shape != expected:  # before an order is made, which may be as long as the metadata state
            raise ModelCorrupt(
                f"{name}: the tensor {tensors[0]} has the shape {list(stored[0].shape)}, which does not fit "
                f"the file's metadata: {list(expected)} by these"
            )
        source = replace(source, order=model.family.order(leaf.rpartition(".")[0], model.config))
        found[parameter] = source
    shared = {parameters[parameter] for parameter in found}
    if missing := sorted(key for key, parameter in parameters.items() if parameter not in shared):
        raise ModelCorrupt(f"{name}: the file lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return found


def _leaf(tensor: str) -> str:
    """Name of a tensor within its layer."""
    found = _OF_LAYER.fullmatch(tensor)
    return tensor if found is None else found[2]


def _parameter(tensor: str, family: Family, parameters: dict[str, Any], name: str) -> str:
    """Name of the parameter that a tensor belongs to. Raises UnsupportedModel."""
    found = _OF_LAYER.fullmatch(tensor)
    leaf, names = (tensor, family.ends) if found is None else (found[2], family.tensors)
    prefix = "" if found is None else f"{family.layers}.{found[1]}."
    module, _, kind = leaf.rpartition(".")
    # Some parameters are no part of a layer of their own: "ssm_a", and a layer's experts.
    for candidate in (
        f"{prefix}{names.get(module)}.{kind}",
        f"{prefix}{names.get(module)}",
        f"{prefix}{names.get(leaf)}",
    ):
        if candidate in parameters:
            return candidate
    raise UnsupportedModel(
        f"{name}: the file has a tensor {tensor}, for which {family.model_type} models have no place: another model "
        "would run without it"
    )
