"""Layers of Mamba-2, in plans and in GGUF files.

Source of what GGUF files state: llama.cpp's src/models/mamba-base.cpp and conversion/mamba.py, in the build of
llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.models.families import parts
from outrider.models.families.family import Fields
from outrider.models.gguf.keys import Stated
from outrider.native.plan import NotPlanned, RecurrencePlan

RECURRENT = ("linear_attention", "mamba")
"""Layers: the new name and the old."""
OWN = "mamba_n_heads mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size"
USUAL: Fields = {"time_step_limit": None, "mamba_proj_bias": False, "mamba_conv_bias": True}
_INFINITE = float("inf")


def check_silu(config: Any) -> None:
    """Raises NotPlanned: the convolutions of recurrences have another activation."""
    if parts.activation_of(config) != "silu":
        raise NotPlanned(f"its plan does not know hidden_act={config.hidden_act} of convolutions")


def mamba2(at: str, *, has_bias: bool, has_taps_bias: bool, **others: Any) -> RecurrencePlan:
    fields: Fields = {
        "conv_width": 2 * others["num_groups"] * others["key_width"] + others["num_heads"] * others["value_width"],
        "taps": f"{at}.conv1d.weight",
        "taps_bias": f"{at}.conv1d.bias" if has_taps_bias else None,
        "inputs": (parts.linear(f"{at}.in_proj", has_bias),),
        "out": parts.linear(f"{at}.out_proj", has_bias),
        "rates": f"{at}.A_log",
        "step_bias": f"{at}.dt_bias",
        "skips": f"{at}.D",
    }
    return RecurrencePlan("mamba2", **(fields | others))


def mamba2_of(config: Any, at: str, **others: Any) -> RecurrencePlan:
    least, most = config.time_step_limit or (0.0, _INFINITE)
    if most != _INFINITE:
        raise NotPlanned(f"its plan does not know time_step_limit={config.time_step_limit}")
    fields: Fields = {
        "has_bias": bool(config.mamba_proj_bias),
        "has_taps_bias": bool(config.mamba_conv_bias),
        "num_heads": config.mamba_n_heads,
        "num_groups": config.mamba_n_groups,
        "key_width": config.mamba_d_state,
        "value_width": config.mamba_d_head,
        "num_taps": config.mamba_d_conv,
        "out_norm": parts.rms(config, f"{at}.norm"),
        "least_step": least,
    }
    return mamba2(at, **(fields | others))


def sizes_of(stated: Stated) -> Fields:
    inner, num_heads = stated.take("ssm.inner_size"), stated.take("ssm.time_step_rank")
    return {
        "mamba_d_conv": stated.take("ssm.conv_kernel"),
        "mamba_d_state": stated.take("ssm.state_size"),
        "mamba_n_groups": stated.take("ssm.group_count"),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
    }


def rates_of(numbers: Tensor) -> Tensor:
    """Logarithms of the rates of decay. In float64, since the last bit of PyTorch's float32 depends on its build."""
    return numbers.neg().double().log().float()


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
    "ssm_norm.weight": torch.flatten,  # a row for each group
    "ssm_a": lambda numbers: rates_of(numbers).flatten(),
    "ssm_d": torch.flatten,
}
