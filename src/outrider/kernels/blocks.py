"""Quantization types of weights: blocks of integers with scales (weight_chunks.h has their layouts), as in GGUF files,
and groups of 4 bits, which other files store in parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BlockType:
    """Quantization type of weights in blocks."""

    name: str  # in GGUF, or of a group
    number: int  # of the type in ggml; groups have their own
    num_numbers: int  # of a block
    num_bytes: int  # of a block
    # Digits of the integers to which rows are rounded before products: 1 for 8 bits, 2 for 15 bits (rounded_rows.h), 0
    # for rows of float32:
    num_digits: int = 0

    def width_of(self, num_bytes: int) -> int:
        """Numbers in so many bytes of a row."""
        return num_bytes // self.num_bytes * self.num_numbers


BLOCK_TYPES = {
    one.number: one
    for one in (
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("MXFP4", 39, 32, 17),
    )
}

# By the numbers of a group, and whether it has a zero. Groups of 32 without one are the blocks of Q4_0.
GROUP_TYPES = {
    (32, False): BLOCK_TYPES[2],
    (32, True): BlockType("group of 32 with a zero", 192, 32, 19),
    (64, False): BlockType("group of 64", 193, 64, 34),
    (64, True): BlockType("group of 64 with a zero", 194, 64, 35),
    (128, False): BlockType("group of 128", 195, 128, 66),
    (128, True): BlockType("group of 128 with a zero", 196, 128, 67),
}


def in_groups(wholes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Pack integers of 4 bits (uint8 [O, I]) as groups, which mean (integer - zero) * scale: scales are float16 [O, I /
    size], size one of GROUP_TYPES; zeros uint8 [O, I / size], None for 8 everywhere. uint8 [O, bytes of a row]"""
    number, num_groups = scales.shape
    block_type = GROUP_TYPES[wholes.shape[1] // num_groups, zeros is not None]
    part = min(block_type.num_numbers, 64)  # numbers i and i + part / 2 share a byte
    low, high = wholes.view(number, num_groups, -1, 2, part // 2).unbind(3)
    parts = [] if zeros is None else [zeros.unsqueeze(-1)]
    parts += [scales.contiguous().view(torch.uint8).view(number, num_groups, 2), (low | high << 4).flatten(2)]
    return torch.cat(parts, -1).view(number, -1)
