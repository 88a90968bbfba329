"""Checkpoints in GGUF files: configuration, tokenizer and weights, large matrices in the file's own blocks
(kernels/blocks.py) or numbers of 16 bits where they may stay so. Each tensor is used, and each parameter found, or the
file is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.library import FORMS
from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.kernels.row_copies import RowCopy
from outrider.models.cpu_weights import HALVES, StoredWeights
from outrider.models.gguf.families import StatedModel, stated_model
from outrider.models.gguf.family import Family, place_of
from outrider.models.gguf.file import GgufFile, StoredTensor, is_readable, shards_of, type_name
from outrider.models.memory import skeleton
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)
_HALVES = {FORMS[dtype]: dtype for dtype in HALVES.values()}


def gguf_file(spec: ModelSpec) -> GgufFile:
    """The file of a checkpoint, all its shards at hand. Raises ModelNotFound, ModelCorrupt."""
    assert spec.gguf is not None
    if spec.path is not None:
        return GgufFile.open(spec.path / spec.gguf)
    from huggingface_hub import hf_hub_download

    files = [Path(hf_hub_download(str(spec.hub), str(shard))) for shard in shards_of(Path(spec.gguf))]
    return GgufFile.open(files[0])


def gguf_config(spec: ModelSpec) -> Any:
    """Transformers' configuration of a checkpoint. Raises UnsupportedModel, ModelCorrupt."""
    return stated_model(gguf_file(spec), spec.name).config


def gguf_numbers(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint, widened; names are those in the model."""
    from transformers.utils.logging import tqdm  # whose bars can be switched off

    file = gguf_file(spec)
    model = stated_model(file, spec.name)
    with torch.device("meta"):
        bare = skeleton(model.config, dtype)
    found = tqdm(_sources(file, model, bare, spec.name).items(), desc="Reading tensors")
    return {name: source.numbers().to(dtype) for name, source in found}


def gguf_weights(
    spec: ModelSpec,
    bare: nn.Module,
    large: Mapping[str, ExpertLayout | None],
    num_digits: int = 0,
    config: Any | None = None,
) -> StoredWeights:
    """Find which of the ``large`` matrices can stay in the file's blocks; experts have layouts. Matrices remain in the
    file until they are loaded.

    Args:
        bare: skeleton of the model.
        num_digits: of the integers to which rows are rounded before products (``BlockForm``).
        config: configuration of this file, if it was made before.
    """
    file = gguf_file(spec)
    found = _sources(file, stated_model(file, spec.name, config), bare, spec.name)
    large = {name: layout for name, layout in sorted(large.items()) if name in found}
    kept = {name: found[name].num_bytes for name, layout in large.items() if found[name].stays(layout)}
    if large:  # a large model
        others = {name: one for name, one in found.items() if name in large or len(one.tensors[0].shape) > 2}
        _tell_widened(spec.name, [one for name, one in others.items() if name not in kept])

    has_blocks = any(found[name].tensors[0].kind in BLOCK_FORMS for name in kept)
    return StoredWeights(
        kept,
        frozenset(found.keys() - kept.keys()),
        lambda name: found[name].numbers(),
        lambda name, empty: found[name].stored(num_digits, empty, large[name]),
        has_blocks,
    )


def _tell_widened(name: str, sources: Sequence[Source]) -> None:
    """Log which matrices take more memory than in the file."""
    tensors = [one for source in sources for one in source.tensors if one.num_bytes < 4 * math.prod(one.shape)]
    if not tensors:
        return
    more = sum(4 * math.prod(one.shape) - one.num_bytes for one in tensors)
    by_type: dict[str, list[str]] = {}
    for one in tensors:
        by_type.setdefault(type_name(one.kind), []).append(one.name)
    parts = (f"{len(names)} of {kind} ({names[0]}{', ...' if names[1:] else ''})" for kind, names in by_type.items())
    _LOG.warning(
        "%s: tensors are widened to float32: %s; %.1f GB more than in the file", name, ", ".join(parts), more / 1e9
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is in a file."""

    tensors: tuple[StoredTensor, ...]  # joined along their rows if there are several
    order: Tensor | None  # rows by their places in the file; None for the file's order
    columns: Tensor | None  # likewise
    change: Callable[[Tensor], Tensor] | None  # undoes the file's own form of the numbers; None if there is none

    @property
    def shape(self) -> tuple[int, ...]:
        # Without operators on the device "meta", whose first use imports seconds of PyTorch's compiler.
        first, *others = (one.shape for one in self.tensors)
        if any(len(other) != len(first) or len(first) < 2 for other in others):
            return ()  # of no parameter
        if others:
            first = (*first[:-2], sum(one.shape[-2] for one in self.tensors), first[-1])
        return first if self.change is None else tuple(self.change(torch.zeros(()).expand(first)).shape)

    def stays(self, layout: ExpertLayout | None = None) -> bool:
        """Whether products read it as it is stored: in one form, whose rows are whole. A layout of transposed matrices
        does what else ``change`` does."""
        kinds, is_changed = {one.kind for one in self.tensors}, self.change is not None
        is_laid_out = layout is not None and layout.num_parts is not None
        return is_changed == is_laid_out and len(kinds) == 1 and kinds <= BLOCK_FORMS.keys() | _HALVES.keys()

    @property
    def num_bytes(self) -> int:
        has_places = self.columns is not None and self.tensors[0].kind in BLOCK_FORMS  # of columns
        return 4 * self.shape[-1] * has_places + sum(one.num_bytes for one in self.tensors)

    def numbers(self) -> Tensor:
        parts = [one.numbers() for one in self.tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        ordered = joined if self.order is None else joined[self.order]
        ordered = ordered if self.columns is None else ordered[..., self.columns]
        return ordered if self.change is None else self.change(ordered).contiguous()

    def stored(
        self,
        num_digits: int,
        empty: Callable[[Sequence[int], torch.dtype], Tensor],
        layout: ExpertLayout | None = None,
    ) -> tuple[NarrowWeight, list[RowCopy]]:
        """The parameter as it is stored, if it stays, in memory that ``empty`` makes, and the copies that fill this.

        Args:
            num_digits: see ``BlockForm``.
        """
        kind = self.tensors[0].kind
        parts = [torch.from_numpy(one.raw()).view(_HALVES.get(kind, torch.uint8)) for one in self.tensors]
        form, columns = None, None
        if kind in BLOCK_FORMS:
            # Columns stay in the file's order, since a block has many of them.
            form, columns = replace(BLOCK_FORMS[kind], num_digits=num_digits), self.columns
            columns = None if columns is None else columns.argsort().int()
        elif self.columns is not None:
            parts = [one[..., self.columns] for one in parts]
        rows = [one.flatten(0, -2) for one in parts]
        num_rows = sum(map(len, rows))
        places: Sequence[Tensor | None] = [None]
        if len(parts) > 1 or self.order is not None:
            all_places = torch.arange(num_rows) if self.order is None else self.order.argsort()
            of_parts = all_places.view(*parts[0].shape[:-2], -1).split([one.shape[-2] for one in parts], dim=-1)
            places = [one.flatten() for one in of_parts]
        matrix = empty((num_rows, rows[0].shape[1]), rows[0].dtype)
        copies = [RowCopy(one, kind, matrix, place) for one, place in zip(rows, places, strict=True)]
        return NarrowWeight(matrix, torch.float32, None, form, columns, layout), copies


def _sources(file: GgufFile, model: StatedModel, bare: nn.Module, name: str) -> dict[str, Source]:
    """Sources of all parameters of a model by name; of shared ones, under one of their names. Raises UnsupportedModel
    for a tensor without a place in the model, ModelCorrupt for a parameter that is missing or has another shape."""
    parameters = bare.state_dict(keep_vars=True)
    parts: dict[str, list[str]] = {}
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for tensor in file.tensors:
        stack = model.family.stacks.get(tensor)
        for i in range(file.tensors[tensor].shape[0] if stack else 0):
            parameter = str(stack).format(i)
            parts[parameter], changes[parameter] = [tensor], itemgetter(i)
        if stack is None and tensor not in model.others:
            parts.setdefault(_parameter(tensor, model.family, parameters, name), []).append(tensor)
    found = {}
    for parameter, tensors in parts.items():
        # A gate comes first: "ffn_gate_exps" before "ffn_up_exps".
        stored = tuple(file.tensors[one] for one in sorted(tensors))
        for one in stored:
            if not is_readable(one.kind):
                raise UnsupportedModel(
                    f"{name}: the tensor {one.name} is of the type {type_name(one.kind)}, which the package gguf "
                    "cannot read: choose a file of another type"
                )
        leaf = place_of(stored[0].name)[1]
        expected = tuple(parameters[parameter].shape) if parameter in parameters else ()  # too many in a stack
        source = Source(stored, None, None, changes.get(parameter, model.family.changes.get(leaf)))
        if source.shape != expected:  # before an order is made, which may be as long as the metadata state
            raise ModelCorrupt(
                f"{name}: the tensor {tensors[0]} has the shape {list(stored[0].shape)}, which does not fit "
                f"the file's metadata: {list(expected)} by these"
            )
        module = leaf.rpartition(".")[0] or leaf
        order, columns = (rule(module, model.config) for rule in (model.family.order, model.family.columns))
        found[parameter] = replace(source, order=order, columns=columns)
    shared = {parameters[parameter] for parameter in found}
    if missing := sorted(key for key, parameter in parameters.items() if parameter not in shared):
        raise ModelCorrupt(f"{name}: the file lacks {len(missing)} of the model's weights, {missing[0]} among them")
    return found


def _parameter(tensor: str, family: Family, parameters: dict[str, Any], name: str) -> str:
    """Name of the parameter that a tensor belongs to. Raises UnsupportedModel."""
    layer, leaf = place_of(tensor)
    names, prefix = (family.ends, "") if layer is None else (family.tensors, f"{family.layers}.{layer}.")
    module, _, kind = leaf.rpartition(".") if "." in leaf else (leaf, "", "weight")
    # Some parameters are no part of a layer of their own: a layer's experts.
    for candidate in (
        f"{prefix}{names.get(leaf)}",
        f"{prefix}{names.get(module)}.{kind}",
        f"{prefix}{names.get(module)}",
    ):
        if candidate in parameters:
            return candidate
    raise UnsupportedModel(
        f"{name}: the file has a tensor {tensor}, for which {family.model_type} models have no place: another model "
        "would run without it"
    )
