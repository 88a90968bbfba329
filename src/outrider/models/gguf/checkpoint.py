"""Checkpoints in GGUF files: configuration, tokenizer and weights, large matrices in the file's own blocks
(kernels/blocks.py) or numbers of 16 bits where they may stay so. Each tensor is used, and each parameter found, or the
file is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.kernels.blocks import BLOCK_TYPES
from outrider.kernels.library import WEIGHT_TYPES
from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.kernels.row_copies import RowCopy
from outrider.models.cpu_weights import HALVES, StoredWeights, large_matrices
from outrider.models.families.config import ModelConfig
from outrider.models.gguf.file import GgufFile, StoredTensor, is_readable, shards_of, type_name
from outrider.models.gguf.model import StatedModel, stated_model
from outrider.models.gguf.tensors import Order, place_of, weight_of
from outrider.models.kinds import check_missing
from outrider.models.registry import ModelSpec
from outrider.native.plan import NotPlanned, Plan, weight_names

_LOG = logging.getLogger(__name__)
_HALVES = {WEIGHT_TYPES[dtype]: dtype for dtype in HALVES.values()}


def gguf_file(spec: ModelSpec) -> GgufFile:
    """The file of a checkpoint, all its shards at hand. Raises ModelNotFound, ModelCorrupt."""
    assert spec.gguf is not None
    if spec.path is not None:
        return GgufFile.open(spec.path / spec.gguf)
    from huggingface_hub import hf_hub_download

    files = [Path(hf_hub_download(str(spec.hub), str(shard))) for shard in shards_of(Path(spec.gguf))]
    return GgufFile.open(files[0])


def planned_weights(
    file: GgufFile, model: StatedModel, config: ModelConfig, plan: Plan, name: str, num_digits: int
) -> StoredWeights:
    """Weights of a plan, those of large matrices in the file's blocks or 16 bits where they can stay so. They remain in
    the file until they are read; for ``num_digits`` see ``BlockType``. Raises NotPlanned, UnsupportedModel,
    ModelCorrupt."""
    names = weight_names(plan)
    found = _sources(file, model, names, config, name)
    if missing := sorted(names - found.keys()):
        raise NotPlanned(f"the file has no {missing[0]}")
    shapes = {weight: source.shape for weight, source in found.items()}
    return stored_weights(found, large_matrices(plan, shapes), name, num_digits)


def skeleton_weights(
    file: GgufFile, bare: nn.Module, large: Mapping[str, ExpertLayout | None], name: str, num_digits: int = 0
) -> StoredWeights:
    """Weights of a model of Transformers, all that its skeleton has (shared ones under one of their names), as
    ``planned_weights`` has them; large matrices may stay."""
    parameters = bare.state_dict(keep_vars=True)
    found = _sources(file, stated_model(file, name), parameters.keys(), bare.config, name)
    for weight, source in found.items():
        expected = tuple(parameters[weight].shape) if weight in parameters else ()  # too many in a stack
        if source.shape != expected:
            raise source.misfit(name, expected)
    shared = {parameters[weight] for weight in found}
    check_missing(name, (key for key, parameter in parameters.items() if parameter not in shared))
    large = {weight: layout for weight, layout in large.items() if weight in found}
    return stored_weights(found, large, name, num_digits)


def stored_weights(
    found: Mapping[str, Source], large: Mapping[str, ExpertLayout | None], name: str, num_digits: int
) -> StoredWeights:
    """Weights of these sources; those of the ``large`` matrices stay as they are stored where they may."""
    kept = {weight: found[weight].num_bytes for weight, layout in large.items() if found[weight].stays(layout)}
    if large:  # a large model
        wide = {weight: one for weight, one in found.items() if weight in large or len(one.tensors[0].shape) > 2}
        _tell_widened(name, [one for weight, one in wide.items() if weight not in kept])

    def read(weight: str) -> Tensor:
        numbers, layout = found[weight].numbers(), large.get(weight)
        if layout is None or layout.num_parts is None:
            return numbers
        return NarrowWeight(layout.rows(numbers), torch.float32, experts=layout)  # by columns, which are not multiplied

    others = {weight: 4 * math.prod(one.shape) for weight, one in found.items() if weight not in kept}
    has_blocks = any(found[weight].tensors[0].kind in BLOCK_TYPES for weight in kept)
    return StoredWeights(
        kept, others, read, lambda weight, empty: found[weight].stored(num_digits, empty, large[weight]), has_blocks
    )


def _tell_widened(name: str, sources: Sequence[Source]) -> None:
    """Log which matrices take more memory than in the file."""
    by_type, more = dict[str, list[str]](), 0
    for one in (one for source in sources for one in source.tensors):
        if (own := 4 * math.prod(one.shape) - one.num_bytes) > 0:
            more += own
            by_type.setdefault(type_name(one.kind), []).append(one.name)
    parts = (f"{len(names)} of {kind} ({names[0]}{', ...' if names[1:] else ''})" for kind, names in by_type.items())
    if more:
        told = "%s: tensors are widened to float32: %s; %.1f GB more than in the file"
        _LOG.warning(told, name, ", ".join(parts), more / 1e9)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a parameter is in a file."""

    tensors: tuple[StoredTensor, ...]  # joined along their rows if there are several
    order: Order | None  # of rows; None for the file's
    columns: Order | None  # likewise
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

    def check(self, name: str) -> None:
        """Raises ModelCorrupt: an order, which may be as long as the metadata state, is not as long as the tensor."""
        lengths = sum(one.shape[0] for one in self.tensors), self.tensors[0].shape[-1]
        for order, length in zip((self.order, self.columns), lengths, strict=True):
            if order is not None and order.length != length:
                raise self.misfit(name, (order.length,))

    def misfit(self, name: str, expected: Sequence[int]) -> ModelCorrupt:
        return ModelCorrupt(
            f"{name}: the tensor {self.tensors[0].name} has the shape {list(self.tensors[0].shape)}, which does not "
            f"fit the file's metadata: {list(expected)} by these"
        )

    def stays(self, layout: ExpertLayout | None = None) -> bool:
        """Whether products read it as it is stored: in one form, whose rows are whole. For transposed experts the
        layout already undoes ``change``."""
        kinds, is_changed = {one.kind for one in self.tensors}, self.change is not None
        is_laid_out = layout is not None and layout.num_parts is not None
        return is_changed == is_laid_out and len(kinds) == 1 and kinds <= BLOCK_TYPES.keys() | _HALVES.keys()

    @property
    def num_bytes(self) -> int:
        has_places = self.columns is not None and self.tensors[0].kind in BLOCK_TYPES  # of columns
        return 4 * self.shape[-1] * has_places + sum(one.num_bytes for one in self.tensors)

    def numbers(self) -> Tensor:
        parts = [one.numbers() for one in self.tensors]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
        joined = joined if self.order is None else joined[self.order.places()]
        joined = joined if self.columns is None else joined[..., self.columns.places()]
        return joined if self.change is None else self.change(joined).contiguous()

    def stored(
        self, num_digits: int, empty: Callable[[Sequence[int], torch.dtype], Tensor], layout: ExpertLayout | None = None
    ) -> tuple[NarrowWeight, list[RowCopy]]:
        """The parameter as it is stored, if it stays, in memory that ``empty`` makes, and the copies that fill this."""
        kind = self.tensors[0].kind
        parts = [torch.from_numpy(one.raw()).view(_HALVES.get(kind, torch.uint8)) for one in self.tensors]
        form, columns = None, None
        if kind in BLOCK_TYPES:
            # Columns stay in the file's order, since a block has many of them.
            form = replace(BLOCK_TYPES[kind], num_digits=num_digits)
            columns = None if self.columns is None else self.columns.places().argsort().int()
        elif self.columns is not None:
            parts = [one[..., self.columns.places()] for one in parts]
        rows = [one.flatten(0, -2) for one in parts]
        num_rows = sum(map(len, rows))
        places: Sequence[Tensor | None] = [None]
        if len(parts) > 1 or self.order is not None:
            all_places = torch.arange(num_rows) if self.order is None else self.order.places().argsort()
            of_parts = all_places.view(*parts[0].shape[:-2], -1).split([one.shape[-2] for one in parts], dim=-1)
            places = [one.flatten() for one in of_parts]
        matrix = empty((num_rows, rows[0].shape[1]), rows[0].dtype)
        copies = [RowCopy(one, kind, matrix, place) for one, place in zip(rows, places, strict=True)]
        return NarrowWeight(matrix, torch.float32, None, form, columns, layout), copies


def _sources(file: GgufFile, model: StatedModel, names: Set[str], config: Any, name: str) -> dict[str, Source]:
    """Sources of the weights with these names, all that the model has. Raises UnsupportedModel for a tensor without a
    place among them, ModelCorrupt for one that is shorter or longer than the metadata state."""
    parts: dict[str, list[str]] = {}
    changes: dict[str, Callable[[Tensor], Tensor]] = {}
    for tensor in file.tensors:
        stack = model.form.stacks.get(tensor)
        for i in range(file.tensors[tensor].shape[0] if stack else 0):
            weight = str(stack).format(i)
            parts[weight], changes[weight] = [tensor], itemgetter(i)
        if stack is None and tensor not in model.others:
            if (place := weight_of(tensor, names)) is None:
                raise UnsupportedModel(
                    f"{name}: the file has a tensor {tensor}, for which {model.fields['model_type']} models have no "
                    "place: another model would run without it"
                )
            parts.setdefault(place, []).append(tensor)
    found = {}
    for weight, tensors in parts.items():
        # A gate comes first: "ffn_gate_exps" before "ffn_up_exps".
        stored = tuple(file.tensors[one] for one in sorted(tensors))
        for one in stored:
            if not is_readable(one.kind):
                raise UnsupportedModel(
                    f"{name}: the tensor {one.name} is of the type {type_name(one.kind)}, which the package gguf "
                    "cannot read: choose a file of another type"
                )
        leaf = place_of(stored[0].name)[1]
        module = leaf.rpartition(".")[0] or leaf
        order, columns = (rule(module, config) for rule in (model.form.order, model.form.columns))
        source = Source(stored, order, columns, changes.get(weight, model.form.changes.get(leaf)))
        source.check(name)
        found[weight] = source
    return found
