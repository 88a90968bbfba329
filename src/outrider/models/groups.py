"""Checkpoints in groups of 4 bits on the CPU: GPTQ, AWQ (``gemm``) and compressed-tensors (``pack-quantized``), each as
the package that writes it defines it. Large matrices stay in groups, others are widened. Neither that package nor
Transformers' quantizers are needed.

A linear layer has 4-bit integers q, eight of them in a word of 32 bits, and for each group of inputs a scale s and
perhaps a zero z, an integer too: its weights are (q - z) * s.

| layout | integers | zeros | scales |
|---|---|---|---|
| GPTQ | eight inputs in a word [I / 8, O] | eight outputs in a word [groups, O / 8]; less 1, but in v2 | [groups, O] |
| AWQ | eight outputs, in an order of their own, in a word [I, O / 8] | the same [groups, O / 8] | [groups, O] |
| compressed-tensors | eight inputs in a word [O, I / 8] | eight outputs in a word [O / 8, groups], or 8 | [O, groups] |

With ``g_idx`` (act-order) input i is in the group g_idx[i]; else groups are consecutive inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.kernels.blocks import GROUP_FORMS, GROUP_SIZES, BlockForm, in_groups, is_symmetric
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.cpu_weights import HALVES, StoredWeights, files_of, large_weights
from outrider.models.registry import ModelSpec

_LOG = logging.getLogger(__name__)
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight outputs
_EIGHT_ONES = 0x11111111
_Tensors = Mapping[str, Tensor]  # of a checkpoint


def tensors_in(files: Iterable[Path]) -> dict[str, Tensor]:
    """Tensors of safetensors files, in memory that the system reads when it is used."""
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@dataclass(frozen=True, slots=True)
class Groups:
    """Matrix [O, I] in groups.

    Attributes:
        unpack: gives the integers. uint8 [O, I]
        scales: in the checkpoint's type. [O, groups]
        zeros: uint8 [O, groups]; None for 8 everywhere.
        group_of: of each input, if groups are not consecutive. [I]
    """

    unpack: Callable[[], Tensor]
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None

    def numbers(self) -> Tensor:
        """The weights. float32 [O, I]"""
        wholes = self.unpack()
        width, num_groups = wholes.shape[1], self.scales.shape[1]
        group_of = _consecutive(width, num_groups) if self.group_of is None else self.group_of
        shifts = torch.full_like(self.scales, 8.0) if self.zeros is None else self.zeros
        return (wholes - shifts.float()[:, group_of]) * self.scales.float()[:, group_of]

    def form(self, width: int) -> BlockForm | None:
        """Form of blocks that can hold the matrix of so many inputs; None if none can."""
        num_groups = self.scales.shape[1]
        fitting = [size for size in GROUP_SIZES if width % num_groups == 0 and width // num_groups % size == 0]
        is_exact = torch.equal(self.scales.half().to(self.scales.dtype), self.scales)
        if self.group_of is not None and self.group_of.bincount(minlength=num_groups).unique().numel() > 1:
            return None
        return GROUP_FORMS[fitting[0], self.zeros is not None] if fitting and is_exact else None

    def weight(self, form: BlockForm, empty_like: Callable[[Tensor], Tensor]) -> NarrowWeight:
        """The matrix in blocks of this form (``NarrowWeight.of_blocks``). A group may become several."""
        wholes, order = self.unpack(), None
        repeats = wholes.shape[1] // self.scales.shape[1] // form.num_numbers
        scales = self.scales.half().repeat_interleave(repeats, 1)
        zeros = None if self.zeros is None else self.zeros.repeat_interleave(repeats, 1)
        if self.group_of is not None:  # inputs are sorted by their groups
            order = self.group_of.argsort(stable=True).int()
            wholes = wholes[:, order]
        return NarrowWeight.of_blocks(in_groups(wholes, scales, zeros), form, order, empty_like)


_Reader = Callable[[_Tensors, str], Groups]  # of the matrix of a layer, by its name


def layout_of(stated: Mapping[str, Any]) -> tuple[str, _Reader] | None:
    """The layout that a checkpoint's ``quantization_config`` states, as the suffix of the tensors with the integers and
    a reader; None if it is not known here."""
    method = stated.get("quant_method")
    if method == "gptq" and stated.get("bits") == 4 and not stated.get("adapter") and not stated.get("rotation"):
        form = stated.get("checkpoint_format") or stated.get("format") or "gptq"
        added = {"gptq": _EIGHT_ONES, "gptq_v2": 0}.get(str(form).lower())
        is_packed_in_words = stated.get("pack_dtype") in (None, "int32")
        return (".qweight", partial(_gptq, added=added)) if added is not None and is_packed_in_words else None
    if method == "awq" and stated.get("bits", stated.get("w_bit")) == 4:
        is_gemm = str(stated.get("version") or "gemm").lower() == "gemm"
        return (".qweight", _awq) if is_gemm and stated.get("zero_point", True) else None
    return (".weight_packed", _compressed) if method == "compressed-tensors" and _is_packed(stated) else None


def _is_packed(stated: Mapping[str, Any]) -> bool:
    """Whether all layers are in 4 bits, and activations are not quantized nor transformed."""
    sparse = (stated.get("sparsity_config") or {}).get("format", "dense")
    if stated.get("kv_cache_scheme") or stated.get("transform_config") or sparse != "dense":
        return False
    if stated.get("quantization_status") != "compressed":
        return False
    for scheme in (stated.get("config_groups") or {}).values():
        weights = scheme.get("weights") or {}
        form = scheme.get("format") or stated.get("format")
        if scheme.get("input_activations") or scheme.get("output_activations") or form != "pack-quantized":
            return False
        if (weights.get("num_bits"), weights.get("type")) != (4, "int"):
            return False
        if weights.get("strategy") not in ("group", "channel"):
            return False
    return True


def _gptq(tensors: _Tensors, layer: str, added: int) -> Groups:
    words, scales = tensors[f"{layer}.qweight"], tensors[f"{layer}.scales"].T.contiguous()
    # Zeros were made smaller by 1 before they were packed, as if a word were one number.
    zeros = _eighths(tensors[f"{layer}.qzeros"] + added).T.contiguous()
    return _groups(lambda: _eighths(words.T), scales, zeros, tensors.get(f"{layer}.g_idx"))


def _awq(tensors: _Tensors, layer: str) -> Groups:
    def unpack(words: Tensor) -> Tensor:  # [n, O / 8] -> [O, n]
        in_order: Tensor = _eighths(words).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)]
        return in_order.flatten(1).T.contiguous()

    words, scales = tensors[f"{layer}.qweight"], tensors[f"{layer}.scales"].T.contiguous()
    return _groups(lambda: unpack(words), scales, unpack(tensors[f"{layer}.qzeros"]), None)


def _compressed(tensors: _Tensors, layer: str) -> Groups:
    number, width = tensors[f"{layer}.weight_shape"].tolist()
    words, scales = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"]
    zeros = tensors.get(f"{layer}.weight_zero_point")
    if zeros is not None:
        zeros = _eighths(zeros.T).T[:number].contiguous()
    return _groups(lambda: _eighths(words)[:, :width].contiguous(), scales, zeros, tensors.get(f"{layer}.weight_g_idx"))


def _groups(unpack: Callable[[], Tensor], scales: Tensor, zeros: Tensor | None, group_of: Tensor | None) -> Groups:
    """Groups, with the zeros and places that are usual left out."""
    if zeros is not None and is_symmetric(zeros):
        zeros = None
    if group_of is not None:
        group_of = group_of.long()
        if torch.equal(group_of, _consecutive(group_of.numel(), scales.shape[1])):
            group_of = None
    return Groups(unpack, scales, zeros, group_of)


def _consecutive(width: int, num_groups: int) -> Tensor:
    """Group of each input, if each has as many consecutive ones. [I]"""
    return torch.arange(width) // -(-width // num_groups)


def _eighths(words: Tensor) -> Tensor:
    """Eight integers of 4 bits in each word, the lowest bits first. int32 [n, m] -> uint8 [n, 8 * m].
    Raises ValueError: they are not in words of 32 bits."""
    if words.dtype != torch.int32:
        raise ValueError(f"integers of 4 bits are packed in {words.dtype}, not in int32")
    in_bytes = words.contiguous().view(torch.uint8)
    return torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(1)


def group_weights(
    spec: ModelSpec, stated: Mapping[str, Any], bare: nn.Module, *, keeps: bool, num_digits: int = 0
) -> StoredWeights | None:
    """Find the matrices of a checkpoint that can stay in groups; None if its layout is not known, or its weights are
    not those of the model, by names and shapes (some are converted by Transformers: experts, for example).

    Args:
        stated: its ``quantization_config``.
        bare: the skeleton.
        keeps: whether matrices may stay in groups; else all are widened.
        num_digits: of the integers to which rows are rounded before products (``BlockForm``).
    """
    layout = layout_of(stated)
    if layout is None:
        return None
    (suffix, reader), tensors = layout, tensors_in(files_of(spec))
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
    large = {name for name, layout in large_weights(bare).items() if layout is None} if keeps else set()
    kept = {name: tensors[name].nbytes for name in plain & large if tensors[name].dtype in HALVES.values()}
    forms: dict[str, BlockForm] = {}
    for layer in sorted(quantized):
        if (name := f"{layer}.weight") not in large:
            continue
        groups, (num_channels, width) = reader(tensors, layer), linear[layer].weight.shape
        form = groups.form(width)
        if form is None:
            _LOG.warning("%s: %s is widened, since no form of groups holds it", spec.name, layer)
            continue
        forms[name] = replace(form, num_digits=num_digits)
        in_bytes, order_bytes = width // form.num_numbers * form.num_bytes, 0 if groups.group_of is None else 4 * width
        kept[name] = num_channels * in_bytes + order_bytes

    def read(name: str, empty_like: Callable[[Tensor], Tensor]) -> Tensor:
        if name in plain:
            tensor = tensors[name]
            if name in kept:
                return NarrowWeight(tensor, torch.float32)
            return tensor.float() if tensor.is_floating_point() else tensor
        groups = reader(tensors, name.removesuffix(".weight"))
        return groups.weight(forms[name], empty_like) if name in forms else groups.numbers()

    return StoredWeights(kept, frozenset(found - kept.keys()), read, bool(forms))
