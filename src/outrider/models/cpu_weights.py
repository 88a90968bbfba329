"""Weights on the CPU that stay as they are stored (see kernels/narrow_weight.py): which, and how they are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from outrider.kernels.library import library
from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.kernels.row_copies import RowCopy
from outrider.models.families.table import has_plan
from outrider.models.kinds import INDEX, WHOLE
from outrider.models.memory import indexed_files, skeleton, types_of, weight_files
from outrider.models.registry import ModelSpec, Placement
from outrider.native.plan import ExpertsPlan, MatrixPlan, PerLayerPlan, Plan, parts
from outrider.runtime.weight_tensors import Room

_LEAST_NUMBERS = 2**18  # of a matrix: for smaller ones the call costs as much as the product
_LEAST_IN_ALL = 2**24  # smaller models do not repay the seconds of compiling the kernel

HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""Types of 16 bits in which matrices stay, as safetensors and GGUF files name them."""


def kept_type(
    spec: ModelSpec, placed: Placement, device: torch.device, bare: Any, stated: torch.dtype | None = None
) -> torch.dtype | None:
    """Type in which the large matrices of a checkpoint, whose skeleton is ``bare``, stay; None if all weights are to be
    plain tensors. Files that are not on this disk are downloaded, unless a type is ``stated``."""
    if device.type != "cpu" or bare.dtype != torch.float32 or not large_weights(bare) or not has_kernel(placed):
        return None
    if spec.gguf is not None or placed.quantization not in ("none", "int4"):
        return torch.float32
    if stated is not None and spec.path is None:
        return stated if stated in HALVES.values() else torch.float32
    types = types_of(files_of(spec))
    return HALVES.get(next(iter(types)), torch.float32) if len(types) == 1 else torch.float32


def has_kernel(placed: Placement) -> bool:
    """Whether our kernel may be used, and can be compiled here."""
    return placed.store != "plain" and library() is not None


def files_of(spec: ModelSpec) -> list[Path]:
    """Weight files of a checkpoint, downloaded if they are not on this disk."""
    if spec.path is not None:
        return weight_files(spec.path)
    # Files that Transformers would download next: one, or those of an index.
    if (found := spec.file(WHOLE)) is None and (found := spec.file(INDEX)) is not None:
        from huggingface_hub import snapshot_download

        snapshot_download(str(spec.hub), allow_patterns=indexed_files(found))
    return [] if found is None else weight_files(found.parent)


def large_weights(model: nn.Module) -> dict[str, ExpertLayout | None]:
    """Names of large matrices (of linear layers and embeddings), and of those of experts with their layout. None in a
    small model."""
    found: dict[str, ExpertLayout | None] = {}
    for name, module in model.named_modules():
        # Other products than nn.Linear's own (Falcon's) would widen their weights in each forward.
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if isinstance(module, nn.Embedding) or is_linear:
            found[f"{name}.weight"] = None
    experts = expert_layouts(model)
    if experts and has_plan(model.config):  # other code would widen the matrices of all experts in each forward
        found |= experts
    found = {name: layout for name, layout in found.items() if is_large(model.get_parameter(name).shape)}
    numbers = {id(weight): weight.numel() for weight in map(model.get_parameter, found)}  # shared ones once
    return found if sum(numbers.values()) >= _LEAST_IN_ALL else {}


def large_matrices(plan: Plan, shapes: Mapping[str, Sequence[int]]) -> dict[str, ExpertLayout | None]:
    """Names of the large matrices of a plan, and the layouts of those of experts. None in a small model."""
    found: dict[str, ExpertLayout | None] = {plan.embedding: None}
    for part in parts(plan):
        if isinstance(part, PerLayerPlan):
            found[part.embedding] = None
        elif isinstance(part, MatrixPlan) and not part.is_transposed:
            found.setdefault(part.weight, None)
        elif isinstance(part, ExpertsPlan):
            for one in (*part.ups, part.down):
                found[one.weight] = ExpertLayout(part.num_experts, one.num_parts if one.is_transposed else None)
    found = {name: layout for name, layout in found.items() if is_large(shapes[name])}
    is_worth = sum(math.prod(shapes[name]) for name in found) >= _LEAST_IN_ALL
    return dict(sorted(found.items())) if is_worth else {}


def expert_layouts(model: nn.Module) -> dict[str, ExpertLayout]:
    """Layouts of the matrices of experts that Transformers' own functions multiply (its integrations/moe.py)."""
    found = {}
    for name, module in model.named_modules():
        is_joined = getattr(module, "is_concatenated", None)
        for leaf, weight in module.named_parameters(recurse=False):
            if is_joined is not None and weight.ndim == 3:
                num_parts = 1 if is_joined or leaf != "gate_up_proj" else 2
                found[f"{name}.{leaf}"] = ExpertLayout(len(weight), num_parts if module.is_transposed else None)
    return found


def is_large(shape: Sequence[int]) -> bool:
    """Whether a matrix of this shape repays the kernel's call."""
    return len(shape) > 1 and math.prod(shape) >= _LEAST_NUMBERS


def narrow_weights(model: nn.Module, stored: torch.dtype, *, only_by_columns: bool = False) -> None:
    """Keep the large matrices of a model in the type ``stored``, and those in torchao's int8 as they are; products of
    few rows then use our kernel. With ``only_by_columns`` only those of experts by columns (gpt-oss), which the native
    engine would copy."""
    narrow: dict[int, nn.Parameter] = {}
    for name, layout in large_weights(model).items():
        weight = model.get_parameter(name)
        by_columns = layout is not None and layout.num_parts is not None
        if isinstance(weight, NarrowWeight) or (only_by_columns and not by_columns):  # in blocks; as they are
            continue
        if id(weight) not in narrow:  # shared weights once
            numbers, scale = _of_int8(weight) or (weight.detach().to(stored), None)
            numbers = numbers if layout is None else layout.rows(numbers)
            kept = NarrowWeight(numbers, torch.float32, scale, experts=layout)
            narrow[id(weight)] = nn.Parameter(kept, requires_grad=False)
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, narrow[id(weight)])


def _of_int8(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Integers [O, I] and scales [O, 1] of a weight quantized by torchao; None for other weights."""
    if type(weight) is nn.Parameter:
        return None
    from torchao.quantization import Int8Tensor

    is_known = isinstance(weight, Int8Tensor) and weight.act_quant_kwargs is None
    return (weight.qdata, weight.scale) if is_known and weight.scale.shape == (weight.shape[0], 1) else None


def widen_weights(narrow: Any, config: Any) -> Any:
    """Convert a model of 16 bits to float32, except its large matrices, which keep their tensors. The module tree is
    rebuilt: buffers, and constants in its code, take the type in which it is built."""
    wide = without_weights(config)
    kept = large_weights(wide).keys()
    numbers: dict[str, Tensor] = narrow.state_dict()
    widened = {name: one.float() for name, one in numbers.items() if name not in kept and one.is_floating_point()}
    wide.load_state_dict(numbers | widened, assign=True)
    wide.tie_weights()
    wide.generation_config = narrow.generation_config
    return wide


def without_weights(config: Any) -> Any:
    """Model in float32 without its parameters, which are on the device "meta"."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return skeleton(config, torch.float32)


class StoredWeights(NamedTuple):
    """Weights of a checkpoint by their names in the model; large matrices stay as they are stored.

    Attributes:
        kept: bytes of the matrices that stay in blocks, or are of 16 bits.
        others: bytes of the other weights.
        read: reads one of the others, in float32.
        stored: allocates a matrix with the second argument; returns the matrix and the copies that will fill it.
        has_blocks: whether a matrix stays in blocks.
    """

    kept: Mapping[str, int]
    others: Mapping[str, int]
    read: Callable[[str], Tensor]
    stored: Callable[[str, Callable[[Sequence[int], torch.dtype], Tensor]], tuple[NarrowWeight, list[RowCopy]]]
    has_blocks: bool = True

    @property
    def num_bytes(self) -> int:
        return sum(self.kept.values()) + sum(self.others.values())

    def made(self) -> tuple[dict[str, Tensor], list[RowCopy]]:
        """All weights, and the copies that will fill the matrices that stay, in huge pages."""
        room = Room(self.kept.values())
        made = {name: self.stored(name, room.empty) for name in self.kept}
        weights: dict[str, Tensor] = {name: weight for name, (weight, _) in made.items()}
        weights |= {name: self.read(name) for name in self.others}
        return weights, [copy for _, copies in made.values() for copy in copies]
