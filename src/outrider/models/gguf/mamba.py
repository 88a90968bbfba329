"""Layers of Mamba-2 in GGUF files: their sizes, names and forms of numbers.

Source: llama.cpp's src/models/mamba-base.cpp and conversion/mamba.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.models.gguf.keys import Stated


def mamba_sizes(stated: Stated) -> dict[str, Any]:
    """Sizes of all layers, under their names in most configurations."""
    inner, num_heads = stated.take("ssm.inner_size"), stated.take("ssm.time_step_rank")
    return {
        "mamba_d_conv": stated.take("ssm.conv_kernel"),
        "mamba_d_state": stated.take("ssm.state_size"),
        "mamba_n_groups": stated.take("ssm.group_count"),
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
    }


def mamba_tensors(module: str) -> dict[str, str]:
    """Names of tensors -> those of parameters, in a module of this name."""
    parameters = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
    }
    return {name: f"{module}.{parameter}" for name, parameter in parameters.items()}


def rates_of(numbers: Tensor) -> Tensor:
    """Logarithms of the rates of decay. In float64, since the last bit of PyTorch's float32 depends on its build."""
    return numbers.neg().double().log().float()


MAMBA_CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "ssm_conv1d.weight": lambda numbers: numbers.unsqueeze(1),
    "ssm_norm.weight": torch.flatten,  # a row for each group
    "ssm_a": lambda numbers: rates_of(numbers).flatten(),
    "ssm_d": torch.flatten,
}
