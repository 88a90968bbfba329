"""Tiny random models of families.py, written to GGUF files as llama.cpp's converters (conversion/*.py and gguf-py of
llama-cpp-python 0.3.36) write them; nothing of the reader is used."""

import copy
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from families import FILES, SIZES, Case, Fields, configuration
from ggml_blocks import block_bytes

CASES = FILES
IDS = [int(i) for i in np.random.RandomState(3).randint(0, SIZES["vocab_size"], 150)]
PLACES = (7, 40, 149)  # whose logits are golden
_MXFP4 = gguf.GGMLQuantizationType.MXFP4


def config_of(case: Case) -> Any:
    return configuration(case.model_type, case.fields)


def random_case(case: Case) -> PreTrainedModel:
    """The model, float32, of numbers that are the same everywhere: the file's logits are compared with golden ones."""
    # Eager: some releases of Transformers leave Gemma 2's cap out of "sdpa".
    model = AutoModelForCausalLM.from_config(config_of(case), dtype=torch.float32, attn_implementation="eager")
    model.eval().requires_grad_(False)
    numbers = np.random.RandomState(7)  # whose stream is frozen
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in model.state_dict()]
    for _, parameter in (*sorted(model.named_parameters()), *sorted(buffers)):
        drawn = numbers.standard_normal(parameter.numel()).reshape(parameter.shape)
        if parameter.ndim == 1:
            if parameter.min() < parameter.max():  # begins with random numbers
                parameter.zero_()
            parameter.add_(torch.from_numpy(0.2 * drawn))  # norms around what they begin with
        else:
            parameter.copy_(torch.from_numpy(drawn / np.sqrt(parameter.shape[-1]) * 1.3))
            if case.has_mxfp4 and parameter.ndim == 3:
                rows = parameter.transpose(1, 2).contiguous().numpy()
                rounded = gguf.dequantize(gguf.quantize(rows, _MXFP4), _MXFP4)
                parameter.copy_(torch.from_numpy(rounded).transpose(1, 2))
    return model


def write_case(
    file: Path, case: Case, model: PreTrainedModel | None = None, *, keys: dict[str, Any] | None = None, **more: Any
) -> Path:
    """Write the GGUF file of a case, with ``keys`` of the file, and more of the architecture, dots as ``__``."""
    model = random_case(case) if model is None else model
    config, architecture = model.config.get_text_config(), case.architecture
    writer = gguf.GGUFWriter(file, architecture)
    own = _keys(case, config) | case.keys | {key.replace("__", "."): value for key, value in more.items()}
    for key, value in ({f"{architecture}.{key}": value for key, value in own.items()} | (keys or {})).items():
        if value is not None:
            add_value(writer, key, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    vocabulary = ["AB", "<s>", "</s>", *(chr(ord("A") + i) for i in range(config.vocab_size - 3))]
    if "tokenizer.ggml.tokens" not in (keys or {}):
        writer.add_token_list(vocabulary)
    writer.add_token_types([1, 3, 3, *[1] * (len(vocabulary) - 3)])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model_tensors(model, architecture).items():
        numbers = np.ascontiguousarray(tensor.float().numpy())
        if case.has_mxfp4 and name.endswith("exps.weight"):
            writer.add_tensor(name, gguf.quantize(numbers, _MXFP4), raw_dtype=_MXFP4)
        else:
            writer.add_tensor(name, numbers)
    factors = _factors(config)
    for name, numbers in (case.tensors | ({} if factors is None else {"rope_freqs.weight": factors})).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


# Keys by architecture, and the names of their fields: for all, unless an architecture is named.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "n_head num_key_value_heads",
    "feed_forward_length": "intermediate_size n_inner",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps norm_eps",
    "attention.layer_norm_epsilon": "norm_epsilon layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "shortconv.l_cache": "conv_L_cache",
    "moe_latent_size": "moe_latent_size",
    "leading_dense_block_count": "first_k_dense_replace num_dense_layers",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_intermediate_size",
    "ssm.conv_kernel": "mamba_d_conv conv_kernel linear_conv_kernel_dim",
    "ssm.state_size": "mamba_d_state ssm_state_size linear_key_head_dim",
    "ssm.group_count": "mamba_n_groups n_groups linear_num_key_heads",
    "ssm.time_step_rank": "mamba_n_heads mamba_num_heads linear_num_value_heads",
}
_OF_EXPERTS = {
    "expert_count": "num_experts num_local_experts n_routed_experts",
    "expert_used_count": "num_experts_per_tok top_k_experts",
}
_OF_ROUTERS = {"expert_shared_count": "n_shared_experts", "expert_weights_norm": "norm_topk_prob"} | {
    "expert_weights_scale": "routed_scaling_factor"
}
_OF_GRANITE = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier"}
_OF_GRANITE |= {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}


_ATTENDING = ("attention", "full_attention")


def _keys(case: Case, config: Any) -> Fields:
    """Keys that follow from a configuration."""
    config, architecture = copy.deepcopy(config), case.architecture
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ

    def values(fields: dict[str, str]) -> Fields:
        found = {key: [getattr(config, name, None) for name in names.split()] for key, names in fields.items()}
        return {key: own[0] for key, given in found.items() if (own := [one for one in given if one is not None])}

    keys, types = values(_FIELDS), getattr(config, "layer_types", None) or []
    num_kv = keys["attention.head_count_kv"]
    if "head_dim" in case.fields:  # which converters write where configurations have it
        keys |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    if "ssm.state_size" in keys:
        width = values({"": "mamba_d_head mamba_head_dim linear_value_head_dim"})[""]
        keys["ssm.inner_size"] = keys["ssm.time_step_rank"] * width
    if architecture == "qwen35moe":
        del keys["feed_forward_length"]
    if architecture == "nemotron_h":  # whose configuration has numbers of experts all the same
        del keys["expert_shared_feed_forward_length"]
    elif values(_OF_EXPERTS).get("expert_count") or architecture == "granitehybrid":
        keys |= values(_OF_EXPERTS)
        width = {"gpt-oss": "intermediate_size", "granitemoe": "none", "granitehybrid": "none"}
        keys |= values({"expert_feed_forward_length": width.get(architecture, "moe_intermediate_size")})
    if architecture in ("glm4moe", "nemotron_h_moe"):
        keys |= values(_OF_ROUTERS)
    if architecture == "nemotron_h_moe":
        keys |= values({"expert_group_count": "n_group", "expert_group_used_count": "topk_group"})
    if architecture.startswith("granite"):
        keys |= values(_OF_GRANITE)
    if architecture == "granitehybrid":
        keys["rope.scaling.finetuned"] = config.position_embedding_type == "rope"
    if architecture in ("lfm2", "lfm2moe", "granitehybrid"):
        keys["attention.head_count_kv"] = [num_kv * (one in _ATTENDING) for one in types]
    if architecture.startswith("nemotron"):
        kinds = config.layers_block_type
        width = config.moe_intermediate_size if architecture.endswith("moe") else config.intermediate_size
        keys |= {"attention.head_count_kv": [num_kv * (one in _ATTENDING) for one in kinds]} | {
            "feed_forward_length": [width * (one in ("mlp", "moe")) for one in kinds],
            "rope.scaling.finetuned": False,
            "rope.dimension_count": config.hidden_size // config.num_attention_heads,
        }
    if architecture in ("gemma3n", "gemma4", "olmo2", "gemma4-assistant") and "attention.sliding_window" in keys:
        keys["attention.sliding_window_pattern"] = [one == "sliding_attention" for one in types]
    if architecture.startswith("gemma4"):
        widths = {"": case.fields["global_head_dim"], "_swa": case.fields["head_dim"]}
        for end, width in widths.items():
            keys |= {f"{key}{end}": width for key in ("attention.key_length", "attention.value_length")}
            keys[f"rope.dimension_count{end}"] = width
    return keys | _rope_keys(getattr(config, "rope_parameters", None), config, keys)


def _rope_keys(rope: Any, config: Any, keys: Fields) -> Fields:
    if rope is None:
        return {}
    whole = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rotated = int(head_dim * whole.get("partial_rotary_factor", 1.0))
    found = {
        "rope.freq_base": float(whole["rope_theta"]),
        "rope.dimension_count": keys.get("rope.dimension_count", rotated),
    }
    if config.model_type.startswith(("gemma3", "gemma4")):
        found["rope.freq_base_swa"] = rope["sliding_attention"]["rope_theta"]
    if whole["rope_type"] in ("linear", "yarn"):
        original = whole.get("original_max_position_embeddings", config.max_position_embeddings)
        found |= {"rope.scaling.type": whole["rope_type"], "rope.scaling.factor": whole["factor"]} | {
            "rope.scaling.original_context_length": original,
            "rope.scaling.finetuned": True,
        }
    return found


def _factors(config: Any) -> Any | None:
    """Divisors of the frequencies by Llama 3's rule, as converters write them."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    usual = 1.0 / rope["rope_theta"] ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return (usual / frequencies.numpy()).astype(np.float32)


_PERMUTED = "llama mistral ministral3 smollm3 granite granitemoeshared granitemoehybrid".split()
_MAMBA = "granitemoehybrid falcon_h1 nemotron_h".split()
_DELTA_NET = ("qwen3_5_text", "qwen3_5_moe_text")
_FROM_ONE = ("gemma", "gemma2", "gemma3_text", *_DELTA_NET)
# Parts of names that converters change before they look names up.
_RENAMED = {
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "layer_scalar": "layer_scalar.weight",
    "correct_output_scale": "correct_output_scale.weight",
    "dt_bias": "dt_proj.bias",
    "sinks": "sinks.weight",
    "down_proj_bias": "down_proj.bias",
    "expert_bias": "expert_bias.bias",
    "e_score_correction_bias": "e_score_correction.bias",
    "block_sparse_moe.router.weight": "block_sparse_moe.router.layer.weight",
}


def model_tensors(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """All weights of a model."""
    config = model.config.get_text_config()
    like = architecture.removesuffix("-assistant")  # which older releases of gguf do not have
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == like)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        split = _split(name, tensor, config)
        if split is not None:
            found |= split
            continue
        for end, other in _RENAMED.items():
            if name.endswith(end):
                name = name.removesuffix(end) + other
        if architecture.startswith("nemotron_h"):
            name = name.replace("model.", "backbone.", 1)
        new = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert new is not None, name
        found[new] = _as_stored(new, tensor, config)
    if config.model_type == "gemma3n_text":
        for part, new in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
            layers = getattr(model.model, part)
            found[f"{new}.weight"] = torch.stack([layer.weight for layer in layers])
    return found


def _split(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor] | None:
    """Parts of a parameter that a file has apart; None where it has the parameter."""
    if name.startswith("model.altup_"):
        return {}
    if name in ("pre_projection.weight", "post_projection.weight"):  # of assistants
        return {f"nextn.{name}": tensor}
    if not name.startswith("model.layers."):
        return None
    layer, kind = f"blk.{name.split('.')[2]}.", config.model_type
    if name.endswith("experts.gate_up_proj") and kind != "gemma4_text":  # which is not split
        if kind == "gpt_oss":  # gates and others in turn
            gate, up = tensor.mT[:, ::2], tensor.mT[:, 1::2]
        else:
            gate, up = tensor.chunk(2, dim=1)
        return {f"{layer}ffn_gate_exps.weight": gate, f"{layer}ffn_up_exps.weight": up}
    if name.endswith("experts.gate_up_proj_bias"):
        return {f"{layer}ffn_gate_exps.bias": tensor[:, ::2], f"{layer}ffn_up_exps.bias": tensor[:, 1::2]}
    if name.endswith("experts.down_proj") and kind == "gpt_oss":
        return {f"{layer}ffn_down_exps.weight": tensor.mT}
    for part in ("up", "down"):
        if name.endswith((f"mixer.experts.{part}_proj", f"block_sparse_moe.experts.{part}_proj")):
            return {f"{layer}ffn_{part}_exps.weight": tensor}
    end = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if name.endswith("shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        return {f"{layer}ffn_gate{end}.weight": gate, f"{layer}ffn_up{end}.weight": up}
    if name.endswith("shared_mlp.output_linear.weight"):
        return {f"{layer}ffn_down{end}.weight": tensor}
    return None


def _as_stored(name: str, tensor: Tensor, config: Any) -> Tensor:
    leaf, kind = name.split(".")[-2:], config.model_type
    if kind == "falcon_h1":
        tensor = _multiplied(leaf, tensor, config)
    if kind in _PERMUTED and leaf[0] in ("attn_q", "attn_k"):
        num_heads = config.num_attention_heads if leaf[0] == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if kind in _FROM_ONE and name.endswith("norm.weight") and leaf[0] != "ssm_norm":
        return tensor + 1
    if kind in _DELTA_NET:
        return _delta_net_as_stored(leaf, tensor, config)
    if kind in _MAMBA:
        return _mamba_as_stored(leaf, tensor, config)
    if kind == "gpt2" and leaf[0] in ("attn_qkv", "attn_output", "ffn_up", "ffn_down") and leaf[1] == "weight":
        return tensor.t()
    if leaf[0] == "conv" and tensor.ndim == 3:
        return tensor.squeeze(1)
    return tensor


def _delta_net_as_stored(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """Heads of values: the first of all heads of keys, then the second of all (``_LinearAttentionVReorderBase``)."""
    num_keys = config.linear_num_key_heads

    def reorder(numbers: Tensor, dim: int) -> Tensor:
        heads = numbers.unflatten(dim, (num_keys, config.linear_num_value_heads // num_keys, -1))
        return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if leaf[1] == "ssm_a":
        return reorder(-tensor.exp(), 0)
    if leaf[0] in ("ssm_alpha", "ssm_beta", "ssm_dt", "attn_gate"):
        return reorder(tensor, 0)
    if leaf[0] == "ssm_out":
        return reorder(tensor, 1)
    if leaf[0] in ("attn_qkv", "ssm_conv1d"):
        num_others = 2 * num_keys * config.linear_key_head_dim
        return torch.cat((tensor[:num_others], reorder(tensor[num_others:], 0))).squeeze(1)
    return tensor


def _mamba_as_stored(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """``Mamba2Model``."""
    if leaf[1] in ("ssm_a", "ssm_d"):
        return (-tensor.exp() if leaf[1] == "ssm_a" else tensor)[:, None]
    if leaf[0] == "ssm_norm":
        return tensor.reshape(config.n_groups if config.model_type == "nemotron_h" else config.mamba_n_groups, -1)
    return tensor.squeeze(1) if leaf == ["ssm_conv1d", "weight"] else tensor


def _multiplied(leaf: list[str], tensor: Tensor, config: Any) -> Tensor:
    """``FalconH1Model``: weights with the multipliers of the configuration."""
    if leaf[0] == "ssm_in":
        state = config.mamba_n_groups * config.mamba_d_state
        sizes = (config.mamba_d_ssm, config.mamba_d_ssm, state, state, config.mamba_n_heads)
        parts = [torch.full((size,), by) for size, by in zip(sizes, config.ssm_multipliers, strict=True)]
        return tensor * config.ssm_in_multiplier * torch.cat(parts)[:, None]
    by = {
        "ffn_down": config.mlp_multipliers[1],
        "ffn_gate": config.mlp_multipliers[0],
        "attn_k": config.key_multiplier * config.attention_in_multiplier,
        "attn_q": config.attention_in_multiplier,
        "attn_v": config.attention_in_multiplier,
        "attn_output": config.attention_out_multiplier,
        "ssm_out": config.ssm_out_multiplier,
        "output": config.lm_head_multiplier,
        "token_embd": config.embedding_multiplier,
    }
    return tensor * by.get(leaf[0], 1.0)


# Files whose matrices are in blocks: widths are whole blocks of all forms.
_WIDE = {"vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2}
_WIDE |= {"num_key_value_heads": 1, "head_dim": 128, "eos_token_id": 96}
_WIDE_DELTA_NET = {"layer_types": ["linear_attention", "full_attention"], "linear_conv_kernel_dim": 4}
_WIDE_DELTA_NET |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 2}
_WIDE_DELTA_NET |= {"linear_num_value_heads": 4}
_WIDE_DELTA_NET |= {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}}
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_OF_KINDS: dict[str, tuple[str, Fields, Fields]] = {
    "gemma2": ("gemma2", {}, dict.fromkeys(("attention.sliding_window", *_CAPS))),  # as llama.cpp has if none is stated
    "gemma3": ("gemma3_text", {}, dict.fromkeys(("attention.sliding_window", "rope.freq_base_swa"))),
    "qwen3moe": ("qwen3_moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}, {}),
    "qwen35": (
        *("qwen3_5_text", _WIDE_DELTA_NET),
        {"attention.recurrent_layers": [True, False], "rope.dimension_sections": [8, 4, 4, 0]},
    ),
}
_MANY = {"token_embd": "IQ4_XS", "attn_q": "IQ4_NL", "attn_k": "BF16", "attn_v": "IQ4_XS", "attn_output": "MXFP4"}
_MANY |= {"ffn_gate": "Q2_K", "ffn_up": "Q3_K", "ffn_down": "IQ4_NL", "output": "F16"}
IN_MANY_FORMS = "llama in many forms"
"""Name of a file beside CASES."""


def many_forms(name: str) -> str:
    """Type of a matrix of a Llama, by its name."""
    return _MANY[name.split(".")[-2]]


def write_in_blocks(file: Path, kind: str, form_of: Callable[[str], str | None]) -> Path:
    """Write the GGUF file of a random model of a kind in Transformers, for Gemma 3 of the file. Its matrices are in
    blocks, whose type ``form_of`` tells by the name of a tensor; None for float32."""
    add = gguf.GGUFWriter.add_tensor

    def add_in_blocks(writer: gguf.GGUFWriter, name: str, numbers: Any) -> None:
        form = form_of(name) if numbers.ndim > 1 and not re.search("gate_inp|conv1d", name) else None
        if form is None:
            add(writer, name, numbers)
            return
        of_form = gguf.GGMLQuantizationType[form]
        try:
            stored = gguf.quants.quantize(numbers, of_form)
        except NotImplementedError:  # any bytes, with the spread of the numbers if the package can tell what they mean
            shape, seed = (numbers[..., 0].size, numbers.shape[-1]), sum(name.encode())
            stored = block_bytes(shape, form, seed)
            with suppress(NotImplementedError):
                stored = block_bytes(shape, form, seed, float(numbers.std() / gguf.dequantize(stored, of_form).std()))
            stored = stored.reshape(*numbers.shape[:-1], -1)
        add(writer, name, stored, raw_dtype=of_form)

    model_type, fields, keys = _OF_KINDS.get(kind, (kind, {}, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_in_blocks)
        return write_case(file, Case(model_type, kind, _WIDE | fields, keys))
