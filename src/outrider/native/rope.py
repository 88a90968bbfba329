"""Frequencies of rotary position embeddings (Su et al. 2104.09864) and their scalings.

Powers are computed in float64: the last bit of PyTorch's own in float32 depends on the processor's vectors.

Sources: position interpolation (Chen et al. 2306.15595), YaRN (Peng et al. 2309.00071), LongRoPE (Ding et al.
2402.13753), Llama 3's scaling (Llama 3.1's config.json); Transformers' modeling_rope_utils.py, to whose bits the tests
hold them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.native.plan import NotPlanned, RopePlan


def rope_plan(stated: Mapping[str, Any], head_dim: int, context_len: int, *, is_interleaved: bool) -> RopePlan:
    """Rope of ``rope_parameters`` as a config.json states them, for heads of ``head_dim`` numbers, of which the share
    ``partial_rotary_factor`` is rotated, and a model made for ``context_len`` tokens. Raises NotPlanned, KeyError."""
    kind, base = stated["rope_type"], stated["rope_theta"]
    share = stated.get("partial_rotary_factor") or 1.0
    width, scale = int(head_dim * share), 1.0
    if kind == "proportional":
        num_rotated = int(share * head_dim // 2)
        rotated = 1.0 / _powers(base, 2 * num_rotated, head_dim)
        frequencies = torch.cat((rotated, torch.zeros(head_dim // 2 - num_rotated))) / stated.get("factor", 1.0)
        return RopePlan(tuple(frequencies.tolist()), scale, is_interleaved)
    powers = _powers(base, width, width)
    match kind:
        case "default":
            frequencies = 1.0 / powers
        case "linear":
            frequencies = 1.0 / powers / stated["factor"]
        case "llama3":
            frequencies = _llama3(1.0 / powers, stated)
        case "yarn":
            frequencies, scale = _yarn(powers, stated, width, context_len)
        case "longrope" if stated["short_factor"] == stated["long_factor"]:
            frequencies, scale = 1.0 / (torch.tensor(stated["short_factor"]) * powers), _long_scale(stated, context_len)
        case "dynamic" | "longrope":
            raise NotPlanned("its rope depends on the length of the text")
        case _:
            raise NotPlanned(f"its plan does not know ropes of {kind}")
    return RopePlan(tuple(frequencies.tolist()), scale, is_interleaved)


def _powers(base: float, width: int, of: int) -> Tensor:
    """base ** (2 i / of), i < width / 2"""
    exponents = torch.arange(0, width, 2, dtype=torch.float) / of
    return torch.pow(base, exponents.double()).float()


def _llama3(frequencies: Tensor, stated: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, leave high ones, and interpolate between the two."""
    factor, low, high = stated["factor"], stated["low_freq_factor"], stated["high_freq_factor"]
    original = stated["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > original / low, wavelengths < original / high
    divided = torch.where(is_long, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    between = (1 - smooth) * divided / factor + smooth * divided
    return torch.where(~is_long & ~is_short, between, divided)


def _yarn(powers: Tensor, stated: Mapping[str, Any], width: int, context_len: int) -> tuple[Tensor, float]:
    original, base = stated["original_max_position_embeddings"], stated["rope_theta"]
    factor = stated["factor"] or context_len / original

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale, one, all_dims = (stated.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if scale is None:
        scale = float(mscale(one) / mscale(all_dims)) if one and all_dims else mscale(1)

    def dimension(num_rotations: float) -> float:
        """Dimension that rotates so many times within the original context."""
        return width * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(stated.get("beta_fast") or 32), dimension(stated.get("beta_slow") or 1)
    if stated.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    kept = 1 - ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, scale


def _long_scale(stated: Mapping[str, Any], context_len: int) -> float:
    original, scale = stated["original_max_position_embeddings"], stated.get("attention_factor")
    factor = stated.get("factor") or context_len / original
    if scale is not None:
        return float(scale)
    return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
