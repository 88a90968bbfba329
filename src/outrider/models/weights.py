"""Weights of a loaded model: their bytes, their checksum, the share that is quantized, and their numbers."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.weight_tensors import stored_tensors, tp_size_of, whole
from outrider.system.ranks import current_ranks


def weights_checksum(model: nn.Module) -> str:
    """SHA-256 of names, shapes, types and bytes of all weights. Weights that the processes of a job share are gathered
    one by one. Quantized shares cannot be gathered; then it is the SHA-256 of the checksums of all processes."""
    checksums = current_ranks().lead(_checksum, (model,)) if tp_size_of(model) > 1 else [_checksum(model)]
    if len(set(checksums)) == 1:
        return str(checksums[0])
    return hashlib.sha256("".join(checksums).encode()).hexdigest()


def _checksum(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        for stored in portable_tensors(whole(weight.detach())):
            # As bytes: NumPy does not support all of torch's types.
            digest.update(stored.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def portable_tensors(weight: Tensor, num_rows: int | None = None) -> list[Tensor]:
    """Tensors with the bytes of a weight, the same on all processors. (In memory, as many rows of blocks are
    interleaved as the processor's vectors have lanes.) Of a weight in blocks, about so many rows, evenly spaced."""
    if not isinstance(weight, NarrowWeight) or weight.blocks is None:
        return stored_tensors(weight)
    step = 1 if num_rows is None else max(1, len(weight) // num_rows)
    rows = weight.stored_rows(torch.arange(0, len(weight), step))
    return [rows] if weight.order is None else [rows, weight.order]


def quantized_share(model: nn.Module) -> float:
    """Fraction of the weights that is quantized, by count. Embeddings and the LM head are not, nor are layers whose
    width the group size does not divide."""
    quantized = total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        number = state.shape.numel() if state is not None else parameter.numel()
        total += number
        quantized += number * _is_quantized(parameter)
    return quantized / total if total else 0.0


def _is_quantized(parameter: Tensor) -> bool:
    return any(not inner.is_floating_point() or inner.itemsize == 1 for inner in stored_tensors(parameter))


@torch.no_grad()
def widened_weights(model: nn.Module) -> dict[str, Tensor]:
    """Weights by name, quantized ones dequantized: a layer's outputs for the unit vectors, in any library."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    weights |= dict(model.named_buffers(remove_duplicate=False))
    dtype = next(one.dtype for one in weights.values() if one.is_floating_point())
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _is_quantized(module.weight):
            units = torch.eye(module.in_features, dtype=dtype, device=module.weight.device)
            products = module(units) if module.bias is None else module(units) - module.bias
            weights[f"{name}.weight"] = products.T.contiguous()
    return weights
