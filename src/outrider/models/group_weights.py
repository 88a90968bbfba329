"""Checkpoints in groups of 4 bits (group_layouts.py) on the CPU: large matrices stay in groups, others are widened.

Neither the package that made a checkpoint nor Transformers' quantizers are needed. The model is that of the widened
weights, (q - z) * s in float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.block_weights import BlockWeights
from outrider.models.cpu_weights import files_of, narrow_layers
from outrider.models.group_layouts import Layout
from outrider.models.registry import ModelSpec
from outrider.models.safetensors_files import SafetensorsFiles

_LOG = logging.getLogger(__name__)


def group_weights(
    spec: ModelSpec, layout: Layout, bare: nn.Module, *, keeps: bool, num_digits: int = 0
) -> BlockWeights | None:
    """Find the matrices of a checkpoint that can stay in groups; None if its weights are not those of the model, by
    names and shapes (some are converted by Transformers: experts, for example).

    Args:
        bare: the skeleton.
        keeps: whether matrices may stay in groups; else all are widened.
        num_digits: of the integers to which rows are rounded before products (``BlockForm``).
    """
    tensors = SafetensorsFiles(files_of(spec))
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
            kept[f"{layer}.weight"] = NarrowWeight(
                in_bytes, torch.float32, None, replace(form, num_digits=num_digits), order
            )

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
