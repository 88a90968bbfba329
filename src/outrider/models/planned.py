"""From the files of a model to what the native engine runs: a plan, and weights under the names of its parameters.

Transformers is not needed. A model whose files state what no plan knows, or name weights otherwise than the plan, is no
planned model: Transformers loads it (loading.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from outrider.kernels.library import WEIGHT_TYPES
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.kernels.row_copies import BackgroundCopies, RowCopy
from outrider.models.cpu_weights import StoredWeights, files_of, large_matrices, stored_type, without_weights
from outrider.models.families.config import ModelConfig
from outrider.models.families.table import config_of, plan_of
from outrider.models.gguf.checkpoint import planned_weights
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.model import stated_model, transformers_config
from outrider.models.kinds import ADAPTER_CONFIG, check_counts, check_head, check_task
from outrider.models.memory import check_fits, tensor_shapes, types_of
from outrider.models.quantize import plain_config
from outrider.models.reading import read_config
from outrider.models.registry import ModelSpec
from outrider.native.plan import NotPlanned, Plan, weight_names
from outrider.native.planned_model import PlannedModel

Planned = tuple[PlannedModel, BackgroundCopies]
"""A model, whose large matrices are still being filled."""


def planned_file(spec: ModelSpec, file: GgufFile, num_digits: int, *, needs_blocks: bool) -> Planned:
    """Begin to load a GGUF file; for ``num_digits`` see ``BlockType``. If it ``needs_blocks``, a file without blocks is
    no planned model. Raises NotPlanned, UnsupportedModel, ModelCorrupt, DeviceError."""
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

    return _begun(spec, config, plan, weights, build)


def planned_folder(spec: ModelSpec) -> Planned:
    """Begin to load a folder or hub repository with weights in safetensors. Raises NotPlanned, UnsupportedModel,
    ModelCorrupt, DeviceError."""
    config = config_of(_stated(spec))
    check_task(spec.name, config)
    plan, files = plan_of(config), files_of(spec)
    if strange := types_of(files) - {"F32", "F16", "BF16"}:
        raise NotPlanned(f"its files have weights of the type {min(strange)}")
    opened: list[Any] = [safe_open(file, "pt") for file in files]
    places: dict[str, Any] = {name: one for one in opened for name in one.keys()}  # noqa: SIM118 - no dictionary
    names, shapes = weight_names(plan), {name: shape for file in files for name, shape in tensor_shapes(file).items()}

    def tensor_of(name: str) -> Tensor:
        return places[name].get_tensor(name)  # type: ignore[no-any-return]

    if missing := sorted(names - places.keys()):
        raise NotPlanned(f"its files have no {missing[0]}")
    for other in sorted(places.keys() - names):  # some files have a copy of a tied head
        one, tied = tensor_of(other), tensor_of(plan.embedding)
        if other != "lm_head.weight" or one.dtype != tied.dtype or not torch.equal(one, tied):
            raise NotPlanned(f"its plan does not know {other}")
    dtype, large = stored_type(types_of(files)), large_matrices(plan, shapes)

    def stored(name: str, empty: Callable[[Sequence[int], torch.dtype], Tensor]) -> tuple[NarrowWeight, list[RowCopy]]:
        given, layout = tensor_of(name), large[name]
        rows = (given if layout is None else layout.rows(given)).to(dtype).contiguous()
        matrix = empty(rows.shape, dtype)
        return NarrowWeight(matrix, torch.float32, experts=layout), [RowCopy(rows, WEIGHT_TYPES[dtype], matrix)]

    sizes = {name: math.prod(shapes[name]) * (dtype.itemsize if name in large else 4) for name in sorted(names)}
    kept = {name: size for name, size in sizes.items() if name in large}
    others_of = {name: size for name, size in sizes.items() if name not in large}
    weights = StoredWeights(kept, others_of, lambda name: tensor_of(name).float(), stored)
    return _begun(spec, config, plan, weights, lambda: without_weights(plain_config(read_config(spec))))


def _begun(
    spec: ModelSpec, config: ModelConfig, plan: Plan, weights: StoredWeights, build: Callable[[], Any]
) -> Planned:
    check_fits(spec.name, weights.num_bytes, torch.device("cpu"))
    tensors, copies = weights.begin()
    return PlannedModel(config, plan, tensors, build), copies


def _stated(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a model whose weights are not quantized. Raises NotPlanned, UnsupportedModel, ModelCorrupt."""
    path = spec.file("config.json")
    if path is None or (path.parent / ADAPTER_CONFIG).is_file():
        raise NotPlanned("it is no model by itself")
    stated: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    check_head(spec.name, stated)
    check_counts(spec.name, stated)
    if any(stated.get(key) for key in ("quantization_config", "quantization", "transformers_weights", "auto_map")):
        raise NotPlanned("it is quantized, or names other files")
    return stated | {"_name_or_path": spec.location}
