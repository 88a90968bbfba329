"""Matrices in the blocks of GGUF files: of any bytes, since the package ``gguf`` has no quantizer for most forms."""

from typing import Any

import gguf
import numpy as np

# Places of a block's scales, and of its offsets, all numbers of 16 bits; in MXFP4, of an exponent.
_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
_HALVES |= {"Q6_K": (208,), "MXFP4": ()}


def block_bytes(shape: tuple[int, int], form: str, seed: int = 0, factor: float = 1.0) -> Any:
    """Bytes of any values, with scales of a usual size, times a factor. [O, bytes of a row]"""
    num_numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form]]
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (shape[0] * shape[1] // num_numbers, size), dtype=np.uint8)
    for place in _HALVES.get(form, (0,)):
        scales = generator.standard_normal((len(blocks), 1)) / (10_000 if num_numbers == 256 else 500) * factor
        blocks[:, place : place + 2] = scales.astype(np.float16).view(np.uint8)
    if form == "MXFP4":
        blocks[:, 0] = generator.integers(118, 124, len(blocks)) + round(np.log2(factor))
    return blocks.reshape(shape[0], -1)


def numbers_of(blocks: Any, form: str) -> Any:
    """What they mean, by the package. float32 [O, I]"""
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[form])
