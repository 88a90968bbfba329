"""Quantized weights: quantized while loading, or in the checkpoint.

A quantized target is another target: all guarantees hold for the model as loaded. They need one property of its
kernels, which the probe checks: the logits of a token do not depend on later tokens or on other rows. So activations
are not quantized (weights only), or have a scale per row.

| name | weights | by |
|---|---|---|
| int8 | 8 bits, a scale for each output channel | torchao ``Int8WeightOnlyConfig`` |
| int4 | 4 bits, a scale and a zero for each 32 inputs | on the CPU in float32, group_rounding.py |
| int4 | 4 bits, a scale and an offset for each 128 (or 32) inputs | elsewhere, torchao |
| fp8 | e4m3, a scale for each output channel | torchao ``Float8WeightOnlyConfig`` |
| 8bit | 8 bits, a scale for each output channel; activations with one for each row | bitsandbytes LLM.int8() |
| nf4 | 4 bits, a scale for each 64 numbers | bitsandbytes |

Weights in blocks (GGUF) or groups of 4 bits are multiplied on the CPU with activations in one of three arithmetics
(kernels/rounded_rows.h):

| name | activations | default for |
|---|---|---|
| a32 | float32 | |
| a15 | 15 bits, a scale for each 32 numbers: as good as float32, and faster | groups, which Transformers widens |
| a8 | 8 bits, a scale for each 32 numbers | GGUF files, as in llama.cpp |
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import MissingExtra, ModelCorrupt, OptionError
from outrider.models.notices import drop_cast_notices
from outrider.models.registry import ARITHMETICS
from outrider.runtime.tensor_parts import stored_tensors

# Extras that Transformers needs to read a checkpoint, by its ``quant_method``, with their packages.
_EXTRAS = {
    "bitsandbytes": ("quantize", ("bitsandbytes",)),
    "torchao": ("quantize", ("torchao",)),
    "compressed-tensors": ("quantize", ("compressed_tensors",)),
    "gguf": ("quantize", ("gguf",)),
    "gptq": ("gptq", ("gptqmodel", "optimum")),
    "awq": ("gptq", ("gptqmodel",)),
}
_GROUPS = (128, 32)  # sizes, in order of preference
_NF4_BLOCK, _NF4_CODES = 64, 16


def check_quantization(name: str, quantization: str, method: str | None) -> None:
    """Refuse a quantization that is impossible for a model, before weights are read.

    Args:
        method: by which its checkpoint is quantized, if it is.

    Raises:
        OptionError: the checkpoint is quantized already.
        ModelCorrupt: it is quantized in an unknown way.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if quantization == "8bit" or method == "bitsandbytes":
        drop_cast_notices()
    if quantization == "none":
        if method is not None:
            if method not in (*AUTO_QUANTIZATION_CONFIG_MAPPING, "bitsandbytes", "gguf"):  # Transformers ignores these
                raise ModelCorrupt(f"{name} is quantized with {method}, which this release of Transformers cannot read")
        return
    if quantization in ARITHMETICS:
        if method is None:
            raise OptionError("quantization", quantization, f"for GGUF files and 4-bit checkpoints, and {name} is none")
        return
    if method is not None:
        raise OptionError("quantization", quantization, f"{name} is a checkpoint quantized with {method} already")


def by_groups(quantization: str, device_type: str, dtype: torch.dtype | None, parallel: int = 1) -> bool:
    """Whether weights are rounded to groups by ourselves (group_rounding.py): int4 on the CPU, in float32.

    Args:
        parallel: processes that share the layers.
    """
    return quantization == "int4" and device_type == "cpu" and dtype == torch.float32 and parallel == 1


def method_of(config: Any) -> str | None:
    """``quant_method`` of a checkpoint; None if it is not quantized."""
    own = own_quantization(config)
    if own is None:
        return None
    method = own.get("quant_method") if isinstance(own, dict) else own.quant_method
    return str(getattr(method, "value", method) or "bitsandbytes")  # early bitsandbytes checkpoints do not state it


def plain_config(config: Any) -> Any:
    """Copy of a configuration that states no quantization."""
    plain = copy.deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return plain


def own_quantization(config: Any) -> Any:
    """``quantization_config`` of a checkpoint, in its text model too; None if it is not quantized."""
    own = getattr(config, "quantization_config", None)
    return getattr(config.get_text_config(decoder=True), "quantization_config", None) if own is None else own


def require_quantizer(name: str, quantization: str, method: str | None) -> None:
    """Check that what quantizes a model, or reads a quantized checkpoint, is there.

    Args:
        method: see ``check_quantization``.

    Raises:
        MissingExtra: a package is not installed.
    """
    if method is not None:
        require_packages(method, f"{name}, quantized with {method},")
    elif quantization != "none":
        method = "bitsandbytes" if quantization in ("8bit", "nf4") else "torchao"
        require_packages(method, f"quantization {quantization}")


def require_packages(method: str, needed_by: str) -> None:
    """Raises MissingExtra: a package is not installed."""
    extra, packages = _EXTRAS.get(method, ("quantize", ()))
    missing = [package.replace("_", "-") for package in packages if find_spec(package) is None]
    if missing:
        raise MissingExtra(" and ".join(missing), extra, needed_by)


def without_outliers(config: Any) -> None:
    """Turn off the outlier threshold of bitsandbytes' 8-bit products in a checkpoint. Above it, a column of activations
    is multiplied in 16 bits *for all rows* once one row has an outlier there, so that rows depend on each other."""
    own = own_quantization(config)
    if isinstance(own, dict) and own.get("load_in_8bit"):
        own["llm_int8_threshold"] = 0.0


def picks_outliers(model: nn.Module) -> bool:
    """Whether any of its 8-bit products has an outlier threshold."""
    return any(getattr(getattr(module, "state", None), "threshold", 0) > 0 for module in model.modules())


def quantizable(model: Any) -> dict[str, nn.Linear]:
    """Layers that are quantized while loading: all linear ones but the last."""
    last = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linear.items() if module is not last}


def quantization_config(
    quantization: str, device: torch.device, dtype: torch.dtype, skeleton: Any, parallel: int = 1
) -> Any:
    """Quantization config for ``from_pretrained``.

    Args:
        quantization: one of QUANTIZATIONS.
        dtype: compute type.
        skeleton: model without weight values.
        parallel: processes that share its layers.

    Raises:
        OptionError: there are no kernels for it on this device.
    """
    import transformers

    if quantization == "8bit":
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    if quantization == "nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype, bnb_4bit_use_double_quant=False
        )
    return transformers.TorchAoConfig(_torchao_config(quantization, device, skeleton, parallel))


def _torchao_config(quantization: str, device: torch.device, skeleton: Any, parallel: int) -> Any:
    import torchao.quantization as torchao

    if quantization == "int8":
        return torchao.Int8WeightOnlyConfig()
    if quantization == "fp8":
        return torchao.Float8WeightOnlyConfig()
    group_size = group_size_of(quantizable(skeleton), parallel)
    if device.type == "cpu":
        # In other types than float32, or shared. The published configuration needs a GPU package.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        return PrototypeInt4WeightOnlyConfig(group_size=group_size, set_inductor_config=False)
    if find_spec("mslk") is None:
        raise OptionError("quantization", "int4", "torchao's kernels for it need 'pip install mslk'; or choose nf4")
    return torchao.Int4WeightOnlyConfig(group_size=group_size)


def group_size_of(layers: Mapping[str, nn.Linear], parallel: int) -> int:
    """Number of inputs that share a scale in int4. torchao skips layers whose width it does not divide.

    Args:
        parallel: processes that may share the inputs of a layer.
    """
    widths = {layer.in_features // shares for layer in layers.values() for shares in (1, parallel)}
    return next((size for size in _GROUPS if all(width % size == 0 for width in widths)), _GROUPS[-1])


def linear_bytes(quantization: str, layer: nn.Linear, dtype: torch.dtype, group_size: int) -> int:
    """Bytes of the quantized weights of a layer, with their scales.

    Args:
        dtype: compute type; scales of int4 have it.
        group_size: of int4.
    """
    number, outputs = layer.weight.numel(), layer.out_features
    if quantization == "nf4":
        return number // 2 + 4 * -(-number // _NF4_BLOCK) + 4 * _NF4_CODES
    if quantization == "int4":
        if layer.in_features % group_size:
            return number * dtype.itemsize
        return number // 2 + 2 * dtype.itemsize * (number // group_size)
    return number + outputs * (4 + (quantization == "int8"))  # torchao's int8 stores zero points


def num_bytes(model: nn.Module) -> int:
    """Bytes of all weights and buffers, shared ones once."""
    stored = [inner for tensor in (*model.parameters(), *model.buffers()) for inner in stored_tensors(tensor)]
    # bitsandbytes moves the scales there when a layer is first used.
    scales = [getattr(getattr(module, "state", None), "SCB", None) for module in model.modules()]
    stored += [scale for scale in scales if isinstance(scale, Tensor)]
    return sum({inner.data_ptr(): inner.numel() * inner.element_size() for inner in stored}.values())


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
