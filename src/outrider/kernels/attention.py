"""Attention of few queries in programs for the CPU: the kernel of attention.cpp instead of PyTorch's
scaled-dot-product attention.

Hugging Face's modelling code looks up its attention function by name. While a step is traced, models that use ``sdpa``
get one that calls the kernel, with the same arguments. Models with their own attention (soft caps, sinks), and calls
with other types, do not use it.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from outrider.kernels.library import library

# Declaration for compiled programs.
ATTENTION_SHIM = (
    "AOTITorchError aoti_torch_cpu_few_query_attention(AtenTensorHandle query, AtenTensorHandle key, "
    "AtenTensorHandle value, AtenTensorHandle mask, double scale, int64_t num_threads, AtenTensorHandle* result)"
)
KEY_DTYPES = (torch.float32, torch.bfloat16)


@torch.library.custom_op("outrider::few_query_attention", mutates_args=())
def few_query_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, num_threads: int
) -> Tensor:
    """Attention softmax(scale * query key' + mask) value, where consecutive heads share keys and values (GQA).

    Args:
        query: float32. [B, H, T, D]
        key, value: of one type among KEY_DTYPES; G divides H. [B, G, L, D], [B, G, L, E]
        mask: float32, additive. [B or 1, H or 1, T, L]

    Returns:
        float32, accumulated in float32; zeros for a query whose keys are all masked. [B, T, H, E]
    """
    kernel = library()
    assert kernel is not None and query.dtype == mask.dtype == torch.float32 and key.dtype == value.dtype in KEY_DTYPES
    num_rows, num_heads, num_queries, width = query.shape
    _, num_groups, num_places, value_width = value.shape
    out = query.new_empty(num_rows, num_queries, num_heads, value_width)
    mask = mask.expand(num_rows, num_heads, num_queries, num_places)
    tensors = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value, mask)]
    arguments: list[Any] = []
    for tensor in tensors:
        arguments += [ctypes.c_void_p(tensor.data_ptr()), (ctypes.c_int64 * 3)(*tensor.stride()[:3])]
    shape = num_rows, num_heads, num_groups, num_queries, num_places, width, value_width
    kernel.outrider_few_query_attention(
        (ctypes.c_int64 * len(shape))(*shape),
        *arguments,
        ctypes.c_int64(8 * key.itemsize),
        ctypes.c_float(scale),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(num_threads),
    )
    return out


@few_query_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, num_threads: int) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


ATTENTION = torch.ops.outrider.few_query_attention.default


def register(num_threads: int) -> str:
    """Register the kernel with Transformers; return the name of the attention implementation."""
    name = f"outrider_{num_threads}"
    AttentionInterface.register(name, partial(_attention, num_threads))
    return name


def _attention(
    num_threads: int,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Replacement of ``sdpa_attention_forward``: [B, H, T, D] -> [B, T, H, D]"""
    is_known = query.dtype == key.dtype == value.dtype in KEY_DTYPES and query.shape[1] % key.shape[1] == 0
    if not is_known or attention_mask is None or dropout or others.get("position_bias") is not None:
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return found
    mask = attention_mask
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result: Tensor = ATTENTION(query.float(), key, value, mask.float(), scale, num_threads)
    return result.to(query.dtype), None
