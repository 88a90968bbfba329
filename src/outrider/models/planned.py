"""From the files of a model to what the native engine runs: a plan, and weights under the names of its parameters.

Transformers is not needed. A model whose files state what no plan knows, or name weights otherwise than the plan, is no
planned model: Transformers loads it (loading.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.kernels.library import WEIGHT_TYPES
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.kernels.row_copies import RowCopy
from outrider.models.cpu_weights import HALVES, StoredWeights, files_of, large_matrices, without_weights
from outrider.models.families.config import ModelConfig
from outrider.models.families.table import config_of, plan_of
from outrider.models.gguf.checkpoint import planned_weights
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.model import stated_model, transformers_config
from outrider.models.kinds import ADAPTER_CONFIG, check_counts, check_head, check_task, read_object
from outrider.models.memory import check_fits
from outrider.models.quantize import plain_config
from outrider.models.reading import read_config
from outrider.models.registry import ModelSpec
from outrider.native.plan import NotPlanned, Plan, weight_names
from outrider.native.planned_model import PlannedModel

Planned = tuple[PlannedModel, list[RowCopy]]
"""A model, and the copies that will fill its large matrices."""


def planned_file(spec: ModelSpec, file: GgufFile, num_digits: int, *, needs_blocks: bool) -> Planned:
    """Load a GGUF file, but not its large matrices; for ``num_digits`` see ``BlockType``. If it ``needs_blocks``, a
    file without blocks is no planned model. Raises NotPlanned, UnsupportedModel, ModelCorrupt, DeviceError."""
    check_head(spec.name, {"model_type": file.metadata.get("general.architecture")})
    stated = stated_model(file, spec.name)
    config = config_of(stated.fields | {"_name_or_path": str(file.path)})
    plan = plan_of(config)
    weights = planned_weights(file, stated, config, plan, spec.name, num_digits)
    if needs_blocks and not weights.has_blocks:
        raise NotPlanned("no matrix stays in blocks")

    def build() -> Any:
        built = transformers_config(stated, spec.name)
        built.name_or_path = str(file.path)  # where its MTP layers are
        return without_weights(built)

    return _made(spec, config, plan, weights, build)


def planned_folder(spec: ModelSpec) -> Planned:
    """Load a folder or hub repository with weights in safetensors, but not its large matrices. Raises NotPlanned,
    UnsupportedModel, ModelCorrupt, DeviceError."""
    config = config_of(_stated(spec))
    check_task(spec.name, config)
    plan = plan_of(config)
    opened: list[Any] = [safe_open(file, "pt") for file in files_of(spec)]
    places: dict[str, Any] = {name: one for one in opened for name in one.keys()}  # noqa: SIM118 - no dictionary
    headers = {name: one.get_slice(name) for name, one in places.items()}
    if strange := {one.get_dtype() for one in headers.values()} - {"F32", *HALVES}:
        raise NotPlanned(f"its files have weights of the type {min(strange)}")
    names, shapes = weight_names(plan), {name: tuple(one.get_shape()) for name, one in headers.items()}

    def tensor_of(name: str) -> Tensor:
        return places[name].get_tensor(name)  # type: ignore[no-any-return]

    if missing := sorted(names - places.keys()):
        raise NotPlanned(f"its files have no {missing[0]}")
    for other in sorted(places.keys() - names):  # some files have a copy of a tied head
        one, tied = tensor_of(other), tensor_of(plan.embedding)
        if other != "lm_head.weight" or one.dtype != tied.dtype or not torch.equal(one, tied):
            raise NotPlanned(f"its plan does not know {other}")
    large = large_matrices(plan, shapes)

    def stored(name: str, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> tuple[NarrowWeight, list[RowCopy]]:
        given, layout = tensor_of(name), large[name]
        rows = (given if layout is None else layout.rows(given)).contiguous()
        matrix = empty(rows.shape, rows.dtype)
        return NarrowWeight(matrix, torch.float32, experts=layout), [RowCopy(rows, WEIGHT_TYPES[rows.dtype], matrix)]

    kept = {name: math.prod(shapes[name]) * (2 if headers[name].get_dtype() in HALVES else 4) for name in large}
    wide = {name: 4 * math.prod(shapes[name]) for name in sorted(names - large.keys())}
    # Copied, since the file may be changed while the model runs.
    weights = StoredWeights(kept, wide, lambda one: tensor_of(one).to(torch.float32, copy=True), stored)
    return _made(spec, config, plan, weights, lambda: without_weights(plain_config(read_config(spec))))


def _made(
    spec: ModelSpec, config: ModelConfig, plan: Plan, weights: StoredWeights, build: Callable[[], Any]
) -> Planned:
    check_fits(spec.name, weights.num_bytes, torch.device("cpu"))
    tensors, copies = weights.made()
    return PlannedModel(config, plan, tensors, build), copies


def _stated(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a model whose weights are not quantized. Raises NotPlanned, UnsupportedModel, ModelCorrupt."""
    path = spec.file("config.json")
    if path is None or spec.file(ADAPTER_CONFIG) is not None:
        raise NotPlanned("it is no model by itself")
    stated = read_object(path)
    check_head(spec.name, stated)
    check_counts(spec.name, stated)
    if any(stated.get(key) for key in ("quantization_config", "quantization", "transformers_weights", "auto_map")):
        raise NotPlanned("it is quantized, or names other files")
    return stated | {"_name_or_path": spec.location}
