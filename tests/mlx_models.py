"""Folders of tiny models as mlx-lm writes them, of any integers and scales; nothing of the reader is used.

Sources: documentation of mlx.core.quantize (MLX 0.32) for groups and their packing; mlx-lm 0.32: ``sanitize`` of models
llama, qwen3, qwen3_moe and qwen3_5 for names and changed numbers, utils.py for config.json; mlx-vlm:
speculative/drafters/qwen3_5_mtp for heads.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pairs import word_tokenizer

IDS = [int(i) for i in np.random.RandomState(4).randint(0, 90, 30)]
_SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "bos_token_id": None,
    "eos_token_id": None,
}
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "tie_word_embeddings": True,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
AFFINE = {"group_size": 64, "bits": 4, "mode": "affine"}
_MANY = {
    "model.embed_tokens": {"group_size": 32, "bits": 6},
    "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 3},
    "model.layers.0.self_attn.k_proj": {"group_size": 32, "bits": 2},
    "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 5},
    "model.layers.0.self_attn.o_proj": {"group_size": 64, "bits": 8},
    "model.layers.0.mlp.gate_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "model.layers.0.mlp.up_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
    "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    "model.layers.1.mlp.down_proj": False,
}
# Type of model; fields of its configuration; settings of single layers.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}, {}),
    "qwen3, many modes": ("qwen3", {"tie_word_embeddings": True}, _MANY),
    "qwen3_moe": ("qwen3_moe", _MOE | {"norm_topk_prob": True, "tie_word_embeddings": False}, {}),
    "qwen3_5_text": ("qwen3_5_text", _HYBRID, {}),
}
_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "model.norm")  # of the hybrids, plus 1


def random_mlx(name: str, folder: Path) -> PreTrainedModel:
    """Write the folder of a case. Returns the model that it means, in float32."""
    model_type, fields, single = CASES[name]
    config = AutoConfig.for_model(model_type, **(_SIZES | fields))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    model.eval().requires_grad_(False)
    numbers, tensors = np.random.RandomState(9), dict[str, Tensor]()
    weights = {key: value for key, value in sorted(model.named_parameters())}
    for key, weight in weights.items():
        for part, own in _parts(key, weight):
            layer = part.removesuffix(".weight")
            settings = single.get(layer, AFFINE)
            is_matrix = (
                key.endswith(("proj.weight", "embed_tokens.weight", "lm_head.weight", "gate.weight")) or own.ndim == 3
            )
            if settings is not False and is_matrix and "conv1d" not in key and own.shape[-1] % 64 == 0:
                stored, meant = in_groups(own.shape, settings, numbers)
                tensors |= {f"{layer}.{kind}": value for kind, value in stored.items()}
                own.copy_(meant)
                continue
            drawn = torch.from_numpy(numbers.standard_normal(tuple(own.shape))).float()
            more = 1.0 if "qwen3_5" in name and layer.endswith(_NORMS) else 0.0
            stored = ((0.25 * drawn if own.ndim > 1 else own + 0.25 * drawn) + more).to(torch.bfloat16)
            own.copy_(stored.float() - more)
            tensors[part] = stored.transpose(1, 2) if "conv1d" in key else stored
    if "qwen3_5" in name:
        tensors = {f"language_model.{key}": value for key, value in tensors.items()}
        single = {f"language_model.{key}": value for key, value in single.items()}
    stated = config.to_dict() | {"rope_theta": 500.0, "num_experts": fields.get("num_experts", 0)}  # as mlx-lm reads
    write_mlx(folder, stated, AFFINE | single, tensors)
    word_tokenizer(config.vocab_size).save_pretrained(folder)
    return model


def write_mlx(folder: Path, stated: dict[str, Any], settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stated = stated | {"quantization": settings, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(stated))
    tensors = {key: value.contiguous().clone() for key, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})


def _parts(key: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Parts of a parameter by their names in MLX: views of it."""
    base, _, kind = key.rpartition(".")
    if not base.endswith(".experts"):
        return [(key, weight)]
    base = base.removesuffix("experts") + "switch_mlp"
    if kind == "down_proj":
        return [(f"{base}.down_proj.weight", weight)]
    gate, up = weight.chunk(2, dim=1)
    return [(f"{base}.gate_proj.weight", gate), (f"{base}.up_proj.weight", up)]


def in_groups(shape: Any, settings: dict[str, Any], numbers: np.random.RandomState) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of a layer in groups, and the numbers that they mean."""
    bits, size, mode = settings["bits"], settings["group_size"], settings.get("mode", "affine")
    *outer, width = shape
    wholes = numbers.randint(0, 2**bits, (*outer, width))
    if mode == "mxfp8":
        wholes = np.where(wholes & 127 == 127, 0, wholes)  # no NaN
    stored = {"weight": _packed(wholes, bits)}
    groups = (*outer, width // size)
    if mode == "affine":
        scales = torch.from_numpy(numbers.standard_normal(groups) * 0.3 / 2**bits).to(torch.bfloat16)
        biases = torch.from_numpy(numbers.standard_normal(groups) * 0.05).to(torch.bfloat16)
        stored |= {"scales": scales, "biases": biases}
        of_scale, of_bias = (np.repeat(one.double().numpy(), size, -1) for one in (scales, biases))
        return stored, torch.from_numpy(wholes * of_scale + of_bias).float()
    if mode == "nvfp4":
        codes = numbers.randint(8, 48, groups).astype(np.uint8)  # around 0.03
        of_scale = _e4m3(codes)
    else:
        codes = numbers.randint(122, 125, groups).astype(np.uint8) - (6 if bits == 8 else 0)
        of_scale = 2.0 ** (codes.astype(float) - 127)
    stored["scales"] = torch.from_numpy(codes)
    values = _e4m3(wholes) if bits == 8 else _e2m1(wholes)
    return stored, torch.from_numpy(values * np.repeat(of_scale, size, -1)).float()


def _packed(wholes: Any, bits: int) -> Tensor:
    """Integers as bits, from the lowest bit of the first word on."""
    stream = (wholes[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(*wholes.shape[:-1], -1)
    return torch.from_numpy(np.packbits(stream, axis=-1, bitorder="little")).view(torch.uint32)


def _e2m1(codes: Any) -> Any:
    """Floats of a sign, two bits of exponent and one of mantissa."""
    sign, exponent, mantissa = 1 - 2 * (codes >> 3), codes >> 1 & 3, codes & 1
    return sign * np.where(exponent == 0, 0.5 * mantissa, (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))


def _e4m3(codes: Any) -> Any:
    """Floats of a sign, four bits of exponent and three of mantissa."""
    codes = np.asarray(codes, int)
    sign, exponent, mantissa = 1 - 2 * (codes >> 7), codes >> 3 & 15, codes & 7
    return sign * np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
