"""Tensor parallelism: the processes of a job share each layer of a model, by Transformers' plan for its kind.

Models that cannot be shared are refused by their configuration, before weights are read.
"""

from __future__ import annotations

from typing import Any

import torch

from outrider.errors import DeviceError, OptionError, UnsupportedModel
from outrider.models.placement import Placement
from outrider.system.ranks import current_ranks, join

_ATTENTION = ("attn", "attention")  # names of attention modules in plans
_SPLIT = ("colwise", "packed_colwise")  # styles where each process computes part of a module's outputs


def num_shares(name: str, placed: Placement, *, is_target: bool) -> int:
    """Number of processes that share each layer of a model. By default all of the job share a target. (A draft is
    small: all-reduces would cost more time than sharing saves.)

    Raises:
        OptionError, DeviceError: there are not as many processes, or devices, as stated.
    """
    stated = placed.tensor_parallel
    if stated is None:
        return current_ranks().size if is_target else 1
    size = join().size if stated > 1 else current_ranks().size
    if stated == size or (stated == 1 and not is_target):
        return stated
    remedy = f"torchrun --nproc-per-node {stated} -m outrider COMMAND ..." if stated > 1 else "run it without torchrun"
    raise OptionError("tensor_parallel", stated, f"{name} needs that many processes, not {size}: {remedy}")


def check_shares(
    name: str, size: int, placed: Placement, device: torch.device, config: Any, method: str | None
) -> None:
    """Refuse a model that ``size`` processes cannot share.

    Args:
        config: of the model.
        method: by which its checkpoint is quantized, if it is.

    Raises:
        OptionError, DeviceError: it is placed otherwise, or quantized in a way that keeps weights whole.
        UnsupportedModel: there is no plan for its kind, or its heads cannot be divided.
    """
    if placed.device_map != "none":
        raise OptionError(
            "device_map", placed.device_map, f"{name} is shared by {size} processes: choose sharing or a map"
        )
    if method is not None or placed.quantization in ("8bit", "nf4"):
        raise OptionError(
            "quantization",
            method or placed.quantization,
            f"{name} is shared by {size} processes, which works with torchao's int8, int4 and fp8 of a checkpoint that "
            "is not quantized",
        )
    has_cuda = torch.cuda.is_available()
    if device.type != ("cuda" if has_cuda else "cpu") or device.index is not None:
        remedy = "leave out --device" if device.type != "cpu" else "hide the CUDA devices (CUDA_VISIBLE_DEVICES=)"
        raise DeviceError(
            f"{name} is shared by {size} processes, each on the CUDA device of its rank or, where there are none, on "
            f"the CPU, but not on {device}: {remedy}"
        )
    text_config = config.get_text_config(decoder=True)
    plan: dict[str, str] = getattr(text_config, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModel(
            f"{name} ({config.model_type}) cannot be shared by {size} processes: Transformers has no tensor-parallel "
            "plan for it (base_model_tp_plan); spread its layers instead, with --device-map auto and without torchrun"
        )
    has_shared_heads = any(
        style in _SPLIT and any(word in module for word in _ATTENTION) for module, style in plan.items()
    )
    num_heads = text_config.num_attention_heads
    for what, number in (
        ("attention", num_heads),
        ("key-value", getattr(text_config, "num_key_value_heads", None) or num_heads),
    ):
        if has_shared_heads and number % size:
            raise UnsupportedModel(
                f"{name} has {number} {what} heads, which {size} processes cannot share evenly: choose a divisor of "
                f"{number} for --nproc-per-node"
            )
