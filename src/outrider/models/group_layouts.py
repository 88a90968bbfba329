"""Layouts of matrices in groups of 4 bits in checkpoints: GPTQ, AWQ (``gemm``) and compressed-tensors
(``pack-quantized``), each as the package that writes it defines it.

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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.blocks import GROUP_FORMS, GROUP_SIZES, BlockForm, in_groups, is_symmetric
from outrider.kernels.narrow_weight import NarrowWeight

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of eight outputs
_EIGHT_ONES = 0x11111111
Tensors = Mapping[str, Tensor]  # of a checkpoint


@dataclass(frozen=True, slots=True)
class Groups:
    """Matrix [O, I] in groups.

    Attributes:
        words: as the checkpoint has them.
        wholes_of: the integers in them. uint8 [O, I]
        scales: in the checkpoint's type. [O, groups]
        zeros: uint8 [O, groups]; None for 8 everywhere.
        group_of: of each input, if groups are not consecutive. [I]
    """

    words: Tensor
    wholes_of: Callable[[Tensor], Tensor]
    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor | None

    def numbers(self) -> Tensor:
        """The weights. float32 [O, I]"""
        wholes = self.wholes_of(self.words)
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
        wholes = self.wholes_of(self.words)
        repeats = wholes.shape[1] // self.scales.shape[1] // form.num_numbers
        scales, zeros, order = self.scales.half().repeat_interleave(repeats, 1), self.zeros, self.order
        if zeros is not None:
            zeros = zeros.repeat_interleave(repeats, 1)
        if order is not None:
            wholes = wholes[:, order]
        return NarrowWeight.of_blocks(in_groups(wholes, scales, zeros), form, order, empty_like)

    @property
    def order(self) -> Tensor | None:
        """Inputs, sorted by their groups, if these are not consecutive. [I]"""
        return None if self.group_of is None else self.group_of.argsort(stable=True).int()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a layer are, and what they mean.

    Attributes:
        words: suffix of the tensor with the integers.
        read: the matrix of a layer, by its name.
    """

    words: str
    read: Callable[[Tensors, str], Groups]


def layout_of(stated: Mapping[str, Any]) -> Layout | None:
    """The layout that a checkpoint's ``quantization_config`` states; None if it is not known here."""
    method = stated.get("quant_method")
    if method == "gptq" and stated.get("bits") == 4 and not stated.get("adapter") and not stated.get("rotation"):
        form = stated.get("checkpoint_format") or stated.get("format") or "gptq"
        added = {"gptq": _EIGHT_ONES, "gptq_v2": 0}.get(str(form).lower())
        is_packed_in_words = stated.get("pack_dtype") in (None, "int32")
        if added is None or not is_packed_in_words:
            return None
        return Layout("qweight", lambda tensors, layer: _gptq(tensors, layer, added))
    if method == "awq" and stated.get("bits", stated.get("w_bit")) == 4:
        is_gemm = str(stated.get("version") or "gemm").lower() == "gemm"
        return Layout("qweight", _awq) if is_gemm and stated.get("zero_point", True) else None
    if method == "compressed-tensors" and _is_packed(stated):
        return Layout("weight_packed", _compressed)
    return None


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


def _gptq(tensors: Tensors, layer: str, added: int) -> Groups:
    # Zeros were made smaller by 1 before they were packed, as if a word were one number.
    zeros = _eighths(tensors[f"{layer}.qzeros"] + added).T.contiguous()
    scales, group_of = tensors[f"{layer}.scales"].T.contiguous(), tensors.get(f"{layer}.g_idx")
    return _groups(tensors[f"{layer}.qweight"], lambda words: _eighths(words.T), scales, zeros, group_of)


def _awq(tensors: Tensors, layer: str) -> Groups:
    def wholes_of(words: Tensor) -> Tensor:  # [n, O / 8] -> [O, n]
        in_order: Tensor = _eighths(words).unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)]
        return in_order.flatten(1).T.contiguous()

    scales = tensors[f"{layer}.scales"].T.contiguous()
    return _groups(tensors[f"{layer}.qweight"], wholes_of, scales, wholes_of(tensors[f"{layer}.qzeros"]), None)


def _compressed(tensors: Tensors, layer: str) -> Groups:
    number, width = tensors[f"{layer}.weight_shape"].tolist()
    zeros, group_of = tensors.get(f"{layer}.weight_zero_point"), tensors.get(f"{layer}.weight_g_idx")
    if zeros is not None:
        zeros = _eighths(zeros.T).T[:number].contiguous()
    words, scales = tensors[f"{layer}.weight_packed"], tensors[f"{layer}.weight_scale"]
    return _groups(words, lambda words: _eighths(words)[:, :width].contiguous(), scales, zeros, group_of)


def _groups(
    words: Tensor, wholes_of: Callable[[Tensor], Tensor], scales: Tensor, zeros: Tensor | None, group_of: Tensor | None
) -> Groups:
    """Groups, with the zeros and places that are usual left out."""
    if zeros is not None and is_symmetric(zeros):
        zeros = None
    if group_of is not None:
        group_of = group_of.long()
        if torch.equal(group_of, _consecutive(group_of.numel(), scales.shape[1])):
            group_of = None
    return Groups(words, wholes_of, scales, zeros, group_of)


def _consecutive(width: int, num_groups: int) -> Tensor:
    """Group of each input, if each has as many consecutive ones. [I]"""
    return torch.arange(width) // -(-width // num_groups)


def _eighths(words: Tensor) -> Tensor:
    """Eight integers of 4 bits in each word, the lowest bits first. int32 [n, m] -> uint8 [n, 8 * m]

    Raises:
        ValueError: they are not in words of 32 bits.
    """
    if words.dtype != torch.int32:
        raise ValueError(f"integers of 4 bits are packed in {words.dtype}, not in int32")
    in_bytes = words.contiguous().view(torch.uint8)
    return torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(1)
