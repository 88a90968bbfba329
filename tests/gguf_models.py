"""Tiny random models of all families that are read from GGUF files, written as llama.cpp's converters write them.

Layouts are those of its conversion/*.py and gguf-py, in the build of llama-cpp-python 0.3.36; nothing of the reader is
used. Each case sets its fields to unusual values.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ggml_blocks import block_bytes

VOCAB = 48
CONTEXT = 160
IDS = [int(i) for i in np.random.RandomState(3).randint(0, VOCAB, 150)]
PLACES = (7, 40, 149)  # whose logits are golden
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_RMS = {"rms_norm_eps": 3e-3}
_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 40}
_HEAD_DIM = {"head_dim": 12}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [1.0, 2.5, 5.0],
    "original_max_position_embeddings": 256,
    "factor": 2.0,
    "attention_factor": 1.19,
    "partial_rotary_factor": 0.75,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}


@dataclass(frozen=True)
class Case:
    """A model, and how it is written.

    Attributes:
        model_type: Transformers' name.
        architecture: llama.cpp's name.
        fields: of the configuration.
        keys: of the architecture, beside those that ``_keys`` derives.
        tensors: added to the file.
        has_oracle: llama.cpp computes the same model.
    """

    model_type: str
    architecture: str
    fields: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    has_oracle: bool = True


def _rope_keys(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope.scaling.type": rope["rope_type"],
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings", CONTEXT),
        "rope.scaling.finetuned": True,
    }


def _gemma3(num_layers: int, full: dict[str, Any], **fields: Any) -> dict[str, Any]:
    ropes = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}}
    sizes = {"num_hidden_layers": num_layers, "sliding_window": 9, "rope_parameters": ropes}
    return _HEAD_DIM | _RMS | sizes | {"query_pre_attn_scalar": 12} | fields


def _gemma4(layer_types: list[str], **fields: Any) -> dict[str, Any]:
    ropes = {
        "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 77.0},
    }
    sizes = {"num_hidden_layers": len(layer_types), "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16}
    sizes |= {"layer_types": layer_types, "sliding_window": 9, "rope_parameters": ropes}
    return _HEAD_DIM | _RMS | sizes | fields


_GEMMA4_KEYS = {
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.key_length_swa": 12,
    "attention.value_length_swa": 12,
    "attention.shared_kv_layers": 0,
    "attention.sliding_window": 9,
    "embedding_length_per_layer_input": 0,
    "rope.dimension_count": 16,
    "rope.dimension_count_swa": 12,
    "rope.freq_base_swa": 77.0,
}
_GEMMA4_ROPE = {"rope_freqs.weight": np.array([1.0] * 2 + [1e30] * 6, np.float32)}
_MOE_KEYS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24}
_QWEN35 = {
    "rms_norm_eps": 1e-6,  # which llama.cpp has for norms of keys, too, and Transformers there in any case
    "head_dim": 16,
    "num_hidden_layers": 4,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5},
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}


def _qwen35_keys(num_value_heads: int) -> dict[str, Any]:
    return {
        "attention.recurrent_layers": [True, False, True, False],
        "full_attention_interval": 2,
        "rope.dimension_sections": [2, 1, 1, 0],
        "ssm.conv_kernel": 3,
        "ssm.state_size": 12,
        "ssm.group_count": 2,
        "ssm.time_step_rank": num_value_heads,
        "ssm.inner_size": 12 * num_value_heads,
    }


# The layer of a head for later tokens: one with attention, and what joins it to the model.
_NORMS = ("attn_norm", "post_attention_norm", "nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")
_MTP_SHAPES = dict.fromkeys(_NORMS, (32,)) | {
    "attn_q_norm": (16,),
    "attn_k_norm": (16,),
    "attn_q": (128, 32),
    "attn_k": (32, 32),
    "attn_v": (32, 32),
    "attn_output": (32, 64),
    "ffn_gate": (56, 32),
    "ffn_up": (56, 32),
    "ffn_down": (32, 56),
    "nextn.eh_proj": (32, 64),
}
_MTP = {f"blk.4.{name}.weight": np.full(shape, 0.1, np.float32) for name, shape in _MTP_SHAPES.items()}
_GEMMA3_KEYS = {"attention.sliding_window": 9, "rope.freq_base_swa": 77.0}
_LLAMA = _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "tie_word_embeddings": False}
CASES = {
    "llama": Case("llama", "llama", _LLAMA),
    "llama with biases, tied": Case(
        "llama", "llama", _LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama 3": Case("llama", "llama", _LLAMA | {"rope_parameters": _LLAMA3}),
    "llama, linear": Case("llama", "llama", _LLAMA | {"rope_parameters": _LINEAR}, _rope_keys(_LINEAR)),
    "llama, linear, old keys": Case(
        "llama", "llama", _LLAMA | {"rope_parameters": _LINEAR}, {"rope.scale_linear": 4.0}
    ),
    "llama, yarn": Case("llama", "llama", _LLAMA | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "mistral": Case("mistral", "llama", _LLAMA | {"sliding_window": None}),
    "qwen2, yarn": Case("qwen2", "qwen2", _RMS | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "qwen2, yarn of its own": Case(
        "qwen2",
        "qwen2",
        _RMS | {"rope_parameters": _YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.1386294}},
        _rope_keys(_YARN)
        | {
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.yarn_attn_factor": 1.1386294,
        },
        has_oracle=False,  # llama.cpp writes these keys, and reads none of them
    ),
    "qwen3": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "qwen3, yarn": Case("qwen3", "qwen3", _HEAD_DIM | _RMS | {"rope_parameters": _YARN}, _rope_keys(_YARN)),
    "qwen3moe": Case(
        "qwen3_moe",
        "qwen3moe",
        _HEAD_DIM | _RMS | _MOE | {"rope_parameters": _ROPE, "norm_topk_prob": True},
        {"expert_feed_forward_length": 24},
    ),
    "gemma": Case("gemma", "gemma", _HEAD_DIM | _RMS | {"rope_parameters": {**_ROPE, "rope_theta": 10000.0}}),
    "gemma2": Case(
        "gemma2",
        "gemma2",
        _HEAD_DIM
        | _RMS
        | {
            "rope_parameters": _ROPE,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 12,
        },
        {"attention.sliding_window": 9, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma2, 46 layers": Case(
        "gemma2",
        "gemma2",
        _HEAD_DIM | _RMS | {"rope_parameters": _ROPE, "num_hidden_layers": 46, "query_pre_attn_scalar": 8},
        {"attention.sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case("gemma3_text", "gemma3", _gemma3(7, _ROPE), _GEMMA3_KEYS),
    "gemma3, linear": Case(
        "gemma3_text",
        "gemma3",
        _gemma3(7, _LINEAR, final_logit_softcapping=2.0),
        _GEMMA3_KEYS | _rope_keys(_LINEAR) | {"final_logit_softcapping": 2.0},
    ),
    "gemma3, other layers": Case(
        "gemma3_text",
        "gemma3",
        _gemma3(4, _ROPE, layer_types=["full_attention", *["sliding_attention"] * 2, "full_attention"]),
        _GEMMA3_KEYS | {"attention.sliding_window_pattern": [False, True, True, False]},
    ),
    "gemma3, 62 layers": Case("gemma3_text", "gemma3", _gemma3(62, _ROPE, query_pre_attn_scalar=8), _GEMMA3_KEYS),
    "phi3": Case(
        "phi3", "phi3", _RMS | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": None}
    ),
    "phi3 with a window": Case(
        "phi3",
        "phi3",
        _RMS | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.75}, "sliding_window": 11},
        {"attention.sliding_window": 11},
        has_oracle=False,  # llama.cpp warns that it leaves the window out
    ),
    "phi3, longrope": Case(
        "phi3",
        "phi3",
        _RMS
        | {
            "rope_parameters": _LONGROPE,
            "sliding_window": None,
            "max_position_embeddings": 512,
            "original_max_position_embeddings": 256,
        },
        {"rope.scaling.attn_factor": 1.19, "rope.scaling.original_context_length": 256},
        {
            f"rope_factors_{kind}.weight": np.array(_LONGROPE[f"{kind}_factor"], np.float32)
            for kind in ("short", "long")
        },
    ),
    "starcoder2": Case(
        "starcoder2", "starcoder2", {"rope_parameters": _ROPE, "norm_epsilon": 3e-3, "tie_word_embeddings": True}
    ),
    "gpt2": Case("gpt2", "gpt2", {"n_inner": 56, "layer_norm_epsilon": 3e-3}),
    "gpt2, its own head": Case(
        "gpt2", "gpt2", {"n_inner": 56, "layer_norm_epsilon": 3e-3, "tie_word_embeddings": False}
    ),
    "gemma4": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["sliding_attention", "full_attention"] * 3,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=8,
            final_logit_softcapping=2.0,
        ),
        _GEMMA4_KEYS
        | {
            "attention.shared_kv_layers": 2,
            "attention.sliding_window_pattern": [True, False] * 3,
            "embedding_length_per_layer_input": 8,
            "feed_forward_length": [56] * 4 + [112] * 2,
            "final_logit_softcapping": 2.0,
        },
        _GEMMA4_ROPE,
    ),
    "gemma4, keys are values": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["full_attention", "sliding_attention", "full_attention"],
            attention_k_eq_v=True,
            num_global_key_value_heads=1,
            hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0,  # of llama.cpp where a file states none
        ),
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [False, True, False], "attention.head_count_kv": [1, 2, 1]},
        _GEMMA4_ROPE,
    ),
    "gemma4, experts": Case(
        "gemma4_text",
        "gemma4",
        _gemma4(
            layer_types=["sliding_attention", "full_attention"],
            hidden_size_per_layer_input=0,
            final_logit_softcapping=30.0,
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=24,
        ),
        _GEMMA4_KEYS | {"attention.sliding_window_pattern": [True, False]} | _MOE_KEYS,
        _GEMMA4_ROPE,
    ),
    "qwen35": Case("qwen3_5_text", "qwen35", _QWEN35 | {"linear_num_value_heads": 6}, _qwen35_keys(6)),
    "qwen35, with a head": Case(
        "qwen3_5_text",
        "qwen35",
        _QWEN35 | {"linear_num_value_heads": 2, "tie_word_embeddings": True},
        {key: value for key, value in _qwen35_keys(2).items() if key != "attention.recurrent_layers"}
        | {"block_count": 5, "nextn_predict_layers": 1},
        _MTP,
    ),
    "qwen35moe": Case(
        "qwen3_5_moe_text",
        "qwen35moe",
        _QWEN35 | _MOE | {"linear_num_value_heads": 4, "shared_expert_intermediate_size": 40},
        _qwen35_keys(4) | _MOE_KEYS | {"expert_shared_feed_forward_length": 40},
    ),
    "lfm2": Case(
        "lfm2",
        "lfm2",
        {
            "rope_parameters": _ROPE,
            "norm_eps": 3e-3,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 4},
    ),
}
for _name in ("attention.key_length", "attention.value_length"):  # converters write both where configurations do
    for _case in CASES.values():
        if "head_dim" in _case.fields:
            _case.keys.setdefault(_name, _case.fields["head_dim"])


def random_case(case: Case) -> PreTrainedModel:
    """The model, float32, of numbers that are the same everywhere: the file's logits are compared with golden ones."""
    fields = copy.deepcopy(_SIZES | case.fields)  # configurations change the dictionaries that they are given
    if case.model_type == "phi3" and "original_max_position_embeddings" not in fields:
        fields["original_max_position_embeddings"] = CONTEXT
    config = AutoConfig.for_model(case.model_type, **fields)
    # Eager: some releases of Transformers leave Gemma 2's cap out of "sdpa".
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
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
    return model


def write_case(
    file: Path, case: Case, model: PreTrainedModel | None = None, *, keys: dict[str, Any] | None = None, **more: Any
) -> Path:
    """Write the GGUF file of a case.

    Args:
        keys: whole keys of the file.
        more: keys of the architecture that replace or follow those of the case, dots as ``__``.
    """
    model = random_case(case) if model is None else model
    config, architecture = model.config, case.architecture
    writer = gguf.GGUFWriter(file, architecture)
    own = _keys(config) | case.keys | {key.replace("__", "."): value for key, value in more.items()}
    for key, value in ({f"{architecture}.{key}": value for key, value in own.items()} | (keys or {})).items():
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
        writer.add_tensor(name, np.ascontiguousarray(tensor.float().numpy()))
    factors = _factors(config)
    for name, numbers in (case.tensors | ({} if factors is None else {"rope_freqs.weight": factors})).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Widths are whole blocks of all forms.
_WIDE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "eos_token_id": 96,
}


_MANY = {
    "token_embd": "IQ4_XS",
    "attn_q": "IQ4_NL",
    "attn_k": "BF16",
    "attn_v": "IQ4_XS",
    "attn_output": "MXFP4",
    "ffn_gate": "Q2_K",
    "ffn_up": "Q3_K",
    "ffn_down": "IQ4_NL",
    "output": "F16",
}
IN_MANY_FORMS = "llama in many forms"
"""Name of a file beside CASES."""


def many_forms(name: str) -> str:
    """Type of a matrix of a Llama, by its name."""
    return _MANY[name.split(".")[-2]]


def write_in_blocks(file: Path, kind: str, form_of: Callable[[str], str | None]) -> Path:
    """Write the GGUF file of a random model whose matrices are in blocks.

    Args:
        kind: of the model in Transformers, for Gemma 3 that of the file.
        form_of: the type of a tensor by its name; None for float32.
    """
    keys = {"attention.key_length": 128, "attention.value_length": 128}
    add = gguf.GGUFWriter.add_tensor

    def add_in_blocks(writer: gguf.GGUFWriter, name: str, numbers: Any) -> None:
        form = form_of(name) if numbers.ndim > 1 and "gate_inp" not in name else None
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

    fields = _WIDE
    if kind == "qwen3moe":
        fields = fields | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
        keys["expert_feed_forward_length"] = 256
    model_type = {"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}.get(kind, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_in_blocks)
        return write_case(file, Case(model_type, kind, fields, keys))


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def _keys(config: Any) -> dict[str, Any]:
    config = copy.deepcopy(config)
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4, whose layers differ
    keys = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "feed_forward_length": config.intermediate_size,
    }
    if config.model_type == "gpt2":
        keys |= {"attention.head_count_kv": config.n_head, "feed_forward_length": config.n_inner}
    eps = {
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": ("norm_epsilon", "layer_norm_epsilon"),
    }
    for key, names in eps.items():
        for name in names:
            if getattr(config, name, None) is not None:
                keys[key] = float(getattr(config, name))
    rope = getattr(config, "rope_parameters", None)
    if rope is not None:
        rope = rope.get("full_attention", rope)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        keys["rope.freq_base"] = float(rope["rope_theta"])
        keys["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if getattr(config, "num_experts_per_tok", None):
        keys |= {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok}
    return keys


def _factors(config: Any) -> Any | None:
    """Divisors of the frequencies by Llama 3's rule, as converters compute them (``generate_extra_tensors``)."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.head_dim
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2, dtype=np.float32) / dim)
    original, low, high = (
        rope[key] for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors = []
    for length in 2 * np.pi / frequencies:
        if length < original / high:
            factors.append(1.0)
        elif length > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / length - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def model_tensors(model: PreTrainedModel, architecture: str) -> dict[str, Tensor]:
    """All weights under their names in the file, in the file's form."""
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj") and architecture != "gemma4":  # which is not split
            block = name.split(".")[2]
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"blk.{block}.ffn_gate_exps.weight": gate, f"blk.{block}.ffn_up_exps.weight": up}
            continue
        for end, other in _RENAMED.items():
            if name.endswith(end):
                name = name.removesuffix(end) + other
        new = names.get_name(name, try_suffixes=(".weight", ".bias", ".scale"))
        assert new is not None, name
        found[new] = _as_stored(new, tensor, config)
    return found


# Ends of names that converters change before they look names up.
_RENAMED = {
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "layer_scalar": "layer_scalar.weight",
    "linear_attn.dt_bias": "linear_attn.dt_proj.bias",
}


def _as_stored(name: str, tensor: Tensor, config: Any) -> Tensor:
    leaf, kind = name.split(".")[-2:], config.model_type
    if kind in ("llama", "mistral") and leaf[0] in ("attn_q", "attn_k"):
        num_heads = config.num_attention_heads if leaf[0] == "attn_q" else config.num_key_value_heads
        halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
        return halves.swapaxes(1, 2).reshape(tensor.shape)
    if (
        kind in ("gemma", "gemma2", "gemma3_text", "qwen3_5_text", "qwen3_5_moe_text")
        and name.endswith("norm.weight")
        and leaf[0] != "ssm_norm"
    ):
        return tensor + 1
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        return _delta_net_as_stored(leaf, tensor, config)
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
