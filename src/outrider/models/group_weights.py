"""Checkpoints in groups of 4 bits (group_layouts.py) on the CPU: large matrices stay in groups, others are widened.

Neither the package that made a checkpoint nor Transformers' quantizers are needed. The model is that of the widened
weights, (q - z) * s in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.block_weights import BlockWeights
from outrider.models.cpu_weights import files_of, narrow_layers
from outrider.models.group_layouts import Layout
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)


class _Checkpoint(Mapping[str, Tensor]):
    """Tensors of safetensors files, in memory that the system reads when it is used."""

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def group_weights(
    spec: ModelSpec, layout: Layout, bare: nn.Module, *, keeps: bool, rounds: bool = False
) -> BlockWeights | None:
    """Find the matrices of a checkpoint that can stay in groups; None if its weights are not those of the model, by
    names and shapes (some are converted by Transformers: experts, for example).

    Args:
        bare: the skeleton.
        keeps: whether matrices may stay in groups; else all are widened.
        rounds: whether rows are rounded to 8 bits before they are multiplied with groups.
    """
    tensors = _Checkpoint(files_of(spec))
    suffix = f".{layout.words}"
    quantized = {name.removesuffix(suffix) for name in tensors if name.endswith(suffix)}
    linear = {name: module for name, module in bare.named_modules() if isinstance(module, nn.Linear)}
    plain = tensors.keys() & bare.state_dict().keys()
    found = plain | {f"{layer}.weight" for layer in quantized}
    aliases: dict[int, set[str]] = {}
    for name, parameter in bare.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), set()).add(name)
    if not quantized <= linear.keys() or not all(names & found for names in aliases.values()):
        _LOG.info("%s: its weights are not those of the model, by name", spec.name)
        return None
    large = narrow_layers(bare) if keeps else {}
    in_bfloat16 = {name for name in plain & {f"{one}.weight" for one in large} if tensors[name].dtype == torch.bfloat16}
    kept = {name: NarrowWeight(tensors[name].to("meta"), torch.float32) for name in in_bfloat16}
    for layer in sorted(quantized):
        groups, width = layout.read(tensors, layer), linear[layer].in_features
        form = groups.form(width) if layer in large else None
        if layer in large and form is None:
            _LOG.warning("%s: %s is widened, since no form of groups holds it", spec.name, layer)
        if form is not None:
            shape = linear[layer].out_features, width // form.num_numbers * form.num_bytes
            order = None if groups.order is None else groups.order.to("meta")
            in_bytes = torch.empty(shape, dtype=torch.uint8, device="meta")
            kept[f"{layer}.weight"] = NarrowWeight(in_bytes, torch.float32, None, replace(form, rounds=rounds), order)

    def matrix(name: str, empty_like: Callable[[Tensor], Tensor]) -> NarrowWeight:
        form = kept[name].blocks
        if form is None:
            return NarrowWeight(tensors[name], torch.float32)
        return layout.read(tensors, name.removesuffix(".weight")).weight(form, empty_like)

    def numbers(name: str) -> Tensor:
        if name not in tensors:
            return layout.read(tensors, name.removesuffix(".weight")).numbers()
        return tensors[name].float() if tensors[name].is_floating_point() else tensors[name]

    return BlockWeights(kept, frozenset(found - kept.keys()), matrix, numbers)
