"""Which weights of a model on the CPU stay as they are stored (see kernels/narrow_weight.py), and how it is made so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.memory import INDEX, WHOLE, indexed, only_type, skeleton, weight_files
from outrider.models.placement import Placement
from outrider.models.registry import ModelSpec

_LEAST_NUMBERS = 2**18  # of a matrix: products with smaller ones take no longer than the calls
_LEAST_IN_ALL = 2**24  # smaller models are not worth the seconds in which the kernel is compiled


def kept_type(
    spec: ModelSpec, placed: Placement, device: torch.device, bare: Any, stated: torch.dtype | None = None
) -> torch.dtype | None:
    """The type in which the large matrices of a checkpoint stay; None if the model is to be one of plain tensors.

    Args:
        placed: neither spread over devices nor over processes; not quantized, or in int8.
        bare: the model without its numbers, in the type of the arithmetic.
        stated: the type that the checkpoint's configuration states, which stands for that of its files where they are
            not on this disk; None to fetch them.
    """
    if placed.store == "plain" or device.type != "cpu" or bare.dtype != torch.float32 or not narrow_layers(bare):
        return None
    from outrider.kernels.library import library

    if library() is None:
        return None
    if spec.gguf is not None or placed.quantization != "none":
        return torch.float32
    if stated is not None and spec.path is None:
        return torch.bfloat16 if stated == torch.bfloat16 else torch.float32
    return torch.bfloat16 if only_type(_files(spec)) == "BF16" else torch.float32  # neither loses anything


def _files(spec: ModelSpec) -> list[Path]:
    if spec.path is not None:
        return weight_files(spec.path)
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    # What Transformers would fetch next: one file, or those of an index.
    for name in (WHOLE, INDEX):
        try:
            found = Path(hf_hub_download(str(spec.hub), name))
        except EntryNotFoundError:
            continue
        if name == INDEX:
            snapshot_download(str(spec.hub), allow_patterns=indexed(found))
        return weight_files(found.parent)
    return []


def narrow_layers(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights are large matrices, by name: linear ones and embeddings. None in a small model."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Embedding) or _is_linear(module)) and module.weight.numel() >= _LEAST_NUMBERS
    }
    numbers = {id(layer.weight): layer.weight.numel() for layer in layers.values()}  # shared ones once
    return layers if sum(numbers.values()) >= _LEAST_IN_ALL else {}


def _is_linear(module: nn.Module) -> bool:
    """Those with a product of their own (Falcon's) would widen their weights in each forward."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def narrowed(model: nn.Module, stored: torch.dtype) -> None:
    """Keep the large matrices of a model in the type ``stored``, and those in torchao's int8 as they are; multiply few
    rows with them by our kernel."""
    from outrider.kernels.narrow_weight import NarrowWeight

    narrow: dict[int, nn.Parameter] = {}
    for layer in narrow_layers(model).values():
        weight = layer.weight
        if id(weight) not in narrow:  # else two layers share it
            numbers, scale = _of_int8(weight) or (weight.detach().to(stored), None)
            narrow[id(weight)] = nn.Parameter(NarrowWeight(numbers, torch.float32, scale), requires_grad=False)
        layer.weight = narrow[id(weight)]


def _of_int8(weight: Any) -> tuple[Tensor, Tensor] | None:
    """Whole numbers [O, I] and scales [O, 1] of a weight that torchao has quantized."""
    if type(weight) is nn.Parameter:
        return None
    from torchao.quantization import Int8Tensor

    is_known = isinstance(weight, Int8Tensor) and weight.act_quant_kwargs is None
    return (weight.qdata, weight.scale) if is_known and weight.scale.shape == (weight.shape[0], 1) else None


def widened(narrow: Any, config: Any) -> Any:
    """A model in float32 with the numbers of one in bfloat16, whose large matrices it takes as they are.

    The model itself is made anew: buffers, and constants of its code, are of the type that it is made in.
    """
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        wide = skeleton(config, torch.float32)
    kept = {f"{name}.weight" for name in narrow_layers(wide)}
    numbers: dict[str, Tensor] = narrow.state_dict()
    wide.load_state_dict(
        {
            name: tensor if name in kept or not tensor.is_floating_point() else tensor.float()
            for name, tensor in numbers.items()
        },
        assign=True,
    )
    wide.tie_weights()
    wide.generation_config = narrow.generation_config
    return wide
