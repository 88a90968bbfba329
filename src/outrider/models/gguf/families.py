"""Model families in GGUF files: their keys as Transformers' configurations, their tensors as parameters.

One table serves every reader of a file.

Source: llama.cpp's src/models/*.cpp, and its converters in conversion/*.py, which tell what a file stores otherwise
than Transformers does; the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.errors import ModelCorrupt, OutriderError, UnsupportedModel
from outrider.models.gguf.file import GgufFile
from outrider.models.gguf.keys import (
    Stated,
    decoder_fields,
    expert_fields,
    head_fields,
    head_size,
    layer_types,
    query_scale,
    rope_parameters,
    whole_fields,
    window_of_all,
)

_DECODER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class Family:
    """How a family of models is written in GGUF files.

    Attributes:
        model_type: Transformers' name of it.
        fields: fields of the configuration that are more than sizes.
        eps: the field and the key of the epsilon of norms.
        layers: prefix of a layer's parameters.
        tensors: the file's name of a layer's tensor -> the module.
        ends: names of tensors outside of layers -> the module.
        order: takes the name of a tensor and the configuration; returns the place in the file of each row of the
            parameter, or None where rows are in the same order.
        changes: name of a tensor -> function from the file's form of the numbers to the model's.
    """

    model_type: str
    fields: Callable[[Stated], dict[str, Any]]
    eps: tuple[str, str] = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
    layers: str = "model.layers"
    tensors: Mapping[str, str] = field(default_factory=lambda: _DECODER)
    ends: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    order: Callable[[str, Any], Tensor | None] = lambda name, config: None
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StatedModel:
    """The model that a file states.

    Attributes:
        config: Transformers' configuration.
        tensors: names of tensors that are a part of it.
    """

    config: Any
    family: Family
    tensors: frozenset[str]


def stated_model(file: GgufFile, name: str, config: Any | None = None) -> StatedModel:
    """The model that a file states.

    Args:
        name: for errors.
        config: that of this file, if it was made before.

    Raises:
        UnsupportedModel: the architecture is not known here, or the file states more than is known.
        ModelCorrupt: the file lacks a key, or has an impossible value.
    """
    stated = Stated(file, name)
    if file.metadata.get("general.type", "model") != "model":
        raise UnsupportedModel(f"{name} is no model, but of GGUF's type {file.metadata['general.type']!r:.40}")
    family = FAMILIES.get(stated.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(
            f"{name}: GGUF files of the architecture {stated.architecture!r:.40} are not read: {known} are"
        )
    if not stated.has("token_embd.weight"):
        raise ModelCorrupt(f"{name}: the file has no tensor token_embd.weight")
    try:
        values = _values(stated, family)
        if config is None:
            from transformers import AutoConfig

            config = AutoConfig.for_model(family.model_type, **values)
    except OutriderError:
        raise
    except Exception as error:  # values of another kind, and whatever Transformers' validation raises
        reason = " ".join(str(error).split())[:200]
        raise ModelCorrupt(f"{name}: the file's metadata is no {family.model_type} model ({reason})") from None
    return StatedModel(config, family, frozenset(stated.read_tensors))


def _values(stated: Stated, family: Family) -> dict[str, Any]:
    """Fields of the configuration."""
    vocab_size, num_tensors = stated.file.tensors["token_embd.weight"].shape[0], len(stated.file.tensors)
    if (num_tokens := len(stated.file.metadata.get("tokenizer.ggml.tokens", ()))) > vocab_size:
        raise ModelCorrupt(f"{stated.name}: the file has {num_tokens} tokens, but embeddings of {vocab_size} alone")
    if (num_layers := stated.take("block_count")) > num_tensors:  # each layer has some
        raise ModelCorrupt(f"{stated.name}: the file states {num_layers} layers, and has {num_tensors} tensors")
    roles = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {role: stated.file.metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    values = {
        "vocab_size": vocab_size,
        "hidden_size": stated.take("embedding_length"),
        "num_hidden_layers": num_layers,
        "max_position_embeddings": stated.take("context_length"),
        "tie_word_embeddings": not stated.has("output.weight"),
        family.eps[0]: stated.take(family.eps[1]),
        **{f"{role}_token_id": None if i is None or i >= vocab_size else i for role, i in ids.items()},
        **family.fields(stated),
    }
    stated.check_all_read()
    return values


def _llama(stated: Stated) -> dict[str, Any]:
    biases = {"attention_bias": stated.has("blk.0.attn_q.bias"), "mlp_bias": stated.has("blk.0.ffn_up.bias")}
    return decoder_fields(stated) | biases


def _qwen3(stated: Stated) -> dict[str, Any]:
    return decoder_fields(stated) | {"attention_bias": stated.has("blk.0.attn_q.bias")}


def _qwen3moe(stated: Stated) -> dict[str, Any]:
    return _qwen3(stated) | expert_fields(stated, is_normalized=True)


def _gemma2(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated)
    base = fields["rope_parameters"]["rope_theta"]
    if (local := stated.take("rope.freq_base_swa", base)) != base:
        raise stated.refusal("rope.freq_base_swa", local)
    return {
        **fields,
        **query_scale(stated, fields, 46),
        "attn_logit_softcapping": stated.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0),
        "sliding_window": stated.take("attention.sliding_window", 4096),
        "layer_types": layer_types(stated, 2),
    }


def _gemma3(stated: Stated) -> dict[str, Any]:
    fields = decoder_fields(stated)
    window, types = stated.take("attention.sliding_window", 0), layer_types(stated, 6)
    local = {"rope_type": "default", "rope_theta": stated.take("rope.freq_base_swa", 10_000.0)}
    return {
        **fields,
        **query_scale(stated, fields, 62),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": stated.take("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types if window else ["full_attention"] * len(types),
    }


def _phi3(stated: Stated) -> dict[str, Any]:
    # llama.cpp ignores the window, and says that results suffer; Transformers' model, which is the authors', has it.
    rope = whole_fields(stated, is_partial=True)
    original = rope["rope_parameters"].get("original_max_position_embeddings", stated.take("context_length"))
    return rope | {"sliding_window": window_of_all(stated), "original_max_position_embeddings": original}


def _gpt2(stated: Stated) -> dict[str, Any]:
    heads = head_fields(stated)
    if heads["num_key_value_heads"] != heads["num_attention_heads"]:
        raise stated.refusal("attention.head_count_kv", heads["num_key_value_heads"])
    return {"num_attention_heads": heads["num_attention_heads"], "n_inner": stated.single("feed_forward_length")}


def _lfm2(stated: Stated) -> dict[str, Any]:
    num_heads = stated.take("attention.head_count")
    per_layer = stated.take("attention.head_count_kv")  # none in a layer of convolutions
    counts = {count for count in per_layer if count} if isinstance(per_layer, list) else set()
    if len(counts) != 1 or len(per_layer) != stated.take("block_count"):
        raise stated.refusal("attention.head_count_kv", per_layer)
    if (head_dim := head_size(stated, num_heads)) * num_heads != stated.take("embedding_length"):
        raise stated.refusal("attention.key_length", head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": counts.pop(),
        "intermediate_size": stated.single("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["full_attention" if count else "conv" for count in per_layer],
        "conv_L_cache": stated.take("shortconv.l_cache"),
        "rope_parameters": rope_parameters(stated, head_dim),
    }


def _pairs_to_halves(name: str, config: Any) -> Tensor | None:
    """Llama's order: llama.cpp rotates neighbouring dimensions of a head, Transformers i with i + head_dim / 2."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if num_heads is None:
        return None
    return torch.arange(num_heads * config.head_dim).view(num_heads, -1, 2).transpose(1, 2).flatten()


def _less_one(numbers: Tensor) -> Tensor:
    return numbers - 1


_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
_FROM_ONE = {f"{name}.weight": _less_one for name in _NORMS}
_GEMMA2 = _DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYER_NORM = "attention.layer_norm_epsilon"

FAMILIES = {
    "llama": Family("llama", _llama, order=_pairs_to_halves),
    "qwen2": Family("qwen2", decoder_fields),
    "qwen3": Family("qwen3", _qwen3, tensors=_DECODER | _NORMS_OF_HEADS),
    "qwen3moe": Family("qwen3_moe", _qwen3moe, tensors=_DECODER | _NORMS_OF_HEADS | _EXPERTS),
    "gemma": Family("gemma", decoder_fields, changes=_FROM_ONE),
    "gemma2": Family("gemma2", _gemma2, tensors=_GEMMA2, changes=_FROM_ONE),
    "gemma3": Family("gemma3_text", _gemma3, tensors=_GEMMA2 | _NORMS_OF_HEADS, changes=_FROM_ONE),
    "phi3": Family("phi3", _phi3, tensors=_DECODER | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": Family(
        "starcoder2",
        whole_fields,
        ("norm_epsilon", _LAYER_NORM),
        tensors=_DECODER | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
    "gpt2": Family(
        "gpt2",
        _gpt2,
        ("layer_norm_epsilon", _LAYER_NORM),
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        changes=dict.fromkeys(("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), torch.t),
    ),
    "lfm2": Family(
        "lfm2",
        _lfm2,
        ("norm_eps", "attention.layer_norm_rms_epsilon"),
        tensors={
            "attn_norm": "operator_norm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            "ffn_norm": "ffn_norm",
            "ffn_gate": "feed_forward.w1",
            "ffn_up": "feed_forward.w3",
            "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj",
            "shortconv.out_proj": "conv.out_proj",
            "shortconv.conv": "conv.conv",
        },
        ends=_ENDS | {"token_embd_norm": "model.embedding_norm"},
        changes={"shortconv.conv.weight": lambda numbers: numbers.unsqueeze(1)},
    ),
}
