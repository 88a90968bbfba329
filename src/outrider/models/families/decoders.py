"""Families with attention and an MLP in each layer: what differs from Llama's, in config.json, GGUF files and plans."""

from __future__ import annotations

import math
from typing import Any

import torch

from outrider.models.families import parts
from outrider.models.families.family import Family, Fields, periodic
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import LAYER_NORM, GgufForm, pairs_to_halves
from outrider.native.plan import MatrixPlan, NotPlanned

BIASES = "attention_bias mlp_bias"
NO_GROUPS: Fields = {"num_key_value_heads": None}
"""Usual field: as many heads of keys and values as of queries."""
NO_WINDOW: Fields = {"sliding_window": None}
_ORIGINAL = "original_max_position_embeddings"


def whole_window(config: Any, at: str, i: int) -> Fields:
    return {"window": config.sliding_window}


def interleaved_rope(config: Any) -> Fields:
    return {"ropes": (parts.rope_of(config, is_interleaved=True),)}


def llama_gguf(stated: Stated, *, is_partial: bool = False) -> Fields:
    biases = {"attention_bias": stated.has("blk.0.attn_q.bias"), "mlp_bias": stated.has("blk.0.ffn_up.bias")}
    return keys.decoder_fields(stated, is_partial=is_partial) | biases


# Mistral and Ministral 3


def _mistral(fields: Fields) -> Fields:
    """Raises NotPlanned: Transformers takes the model for a Ministral, whose windows are of some layers."""
    if "layer_types" in fields:
        raise NotPlanned("it states the kinds of layers")
    return {}


def _ministral3_attention(config: Any, at: str, i: int) -> Fields:
    beta, original = (config.rope_parameters[key] for key in ("llama_4_scaling_beta", _ORIGINAL))
    return {"temperature_scale": beta, "temperature_floor_scale": original, **whole_window(config, at, i)}


def _mistral3_gguf(stated: Stated) -> Fields:
    fields = keys.decoder_fields(stated)
    rope, beta = fields["rope_parameters"], stated.take("attention.temperature_scale", 0.0)
    if mscale := stated.take("rope.scaling.yarn_log_multiplier", 0.0):
        if rope["rope_type"] != "yarn":
            raise stated.refusal("rope.scaling.yarn_log_multiplier", mscale)
        rope["attention_factor"] /= 0.1 * mscale * math.log(rope["factor"]) + 1.0
    if not beta:
        return fields | {"model_type": "mistral", "sliding_window": None}
    original = stated.take("rope.scaling.original_context_length", stated.take("context_length"))
    rope |= {"llama_4_scaling_beta": beta, _ORIGINAL: original}
    return fields


# Qwen 2 and 3, SmolLM3, EXAONE 4, Command R7B


def switched_window(fields: Fields) -> Fields:
    return {} if fields.get("use_sliding_window") else NO_WINDOW


def _last_layers_with_windows(fields: Fields) -> list[str]:
    num_layers = fields["num_hidden_layers"]
    first = num_layers if fields["sliding_window"] is None else fields["max_window_layers"]
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def qwen2_attention(config: Any, at: str, i: int, has_bias: bool = True) -> Fields:
    out = parts.linear(f"{at}.self_attn.o_proj")
    return {"inputs": parts.inputs_of(at, has_bias), "out": out, "window": parts.window_of(config, i)}


def _smollm3_ropes(fields: Fields) -> Fields:
    if fields.get("no_rope_layers") is not None:
        return {}
    period = fields.get("no_rope_layer_interval") or 4
    return {"no_rope_layers": [(i + 1) % period != 0 for i in range(fields["num_hidden_layers"])]}


def _exaone4_attention(config: Any, at: str, i: int) -> Fields:
    window = parts.window_of(config, i)
    rope = 0 if window is not None or config.sliding_window is None else None
    return {"rope": rope, "window": window, **parts.head_norms(config, at)}


def _cohere2_attention(config: Any, at: str, i: int) -> Fields:
    """Layers without a window have no rope."""
    window = parts.window_of(config, i)
    return {"rope": None if window is None else 0, "window": window}


def _cohere2_layer(config: Any, at: str, i: int) -> Fields:
    """Both halves of a layer read the same norm."""
    norm = parts.layer_norm(config, f"{at}.input_layernorm", False)
    return {"mixer_norm": norm, "mlp_norm": None, "is_parallel": True}


def _cohere2_whole(config: Any) -> Fields:
    norm = parts.layer_norm(config, "model.norm", False)
    return {"final_norm": norm, "logit_scale": config.logit_scale, **interleaved_rope(config)}


# OLMo 2 and 3


def norms_after(config: Any, at: str, i: int) -> Fields:
    """Norms after the halves of a layer instead of before."""
    names = {"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
    return {"mixer_norm": None, "mlp_norm": None, **parts.rms_fields(config, at, names)}


def olmo_attention(config: Any, at: str, i: int) -> Fields:
    """Norms of queries and keys are of whole rows."""
    return {"norms_whole_rows": True, **parts.head_norms(config, at)}


def _olmo3_attention(config: Any, at: str, i: int) -> Fields:
    return {**olmo_attention(config, at, i), **parts.rope_of_kind(config, i), "window": parts.window_of(config, i)}


def _olmo2_gguf(stated: Stated) -> Fields:
    fields = keys.whole_fields(stated)
    window = stated.take("attention.sliding_window", 0)
    if not window:
        return fields
    full = fields["rope_parameters"]
    fields |= keys.two_ropes(stated, full, full["rope_theta"])
    return fields | {"model_type": "olmo3", "sliding_window": window, "layer_types": keys.layer_types(stated, 4)}


# Phi 3 and GLM 4


def _joined_mlp(config: Any, at: str, i: int) -> Fields:
    return {"mlp": parts.mlp_of(config, f"{at}.mlp", ups=parts.halves_of(f"{at}.mlp.gate_up_proj"))}


def _phi3_attention(config: Any, at: str, i: int) -> Fields:
    return {"inputs": (parts.linear(f"{at}.self_attn.qkv_proj"),), "window": config.sliding_window}


def _phi3_rope(fields: Fields) -> Fields:
    """Names of older files."""
    rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    is_old = rope.get("rope_type", rope.get("type")) in ("su", "yarn")
    return {"rope_scaling": rope | {"rope_type": "longrope"}} if is_old else {}


def _phi3_gguf(stated: Stated) -> Fields:
    # llama.cpp ignores the window, and says that results suffer; Transformers' model, which is the authors', has it.
    rope = keys.whole_fields(stated, is_partial=True)
    window, longest = stated.take("attention.sliding_window", 0), stated.take("context_length")
    original = rope["rope_parameters"].get(_ORIGINAL, longest)
    return rope | {"sliding_window": window if 0 < window < longest else None, _ORIGINAL: original}


def glm4_attention(config: Any, at: str, i: int) -> Fields:
    norms = parts.head_norms(config, at) if getattr(config, "use_qk_norm", False) else {}
    return {"out": parts.linear(f"{at}.self_attn.o_proj"), **norms}


def _glm4_layer(config: Any, at: str, i: int) -> Fields:
    names = {"mixer_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm"}
    return {**parts.rms_fields(config, at, names), **_joined_mlp(config, at, i)}


def glm4_gguf(stated: Stated) -> Fields:
    fields = llama_gguf(stated, is_partial=True)
    fields["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return fields


# StarCoder 2 and GPT-2


def _starcoder2_attention(config: Any, at: str, i: int) -> Fields:
    out = parts.linear(f"{at}.self_attn.o_proj", config.use_bias)
    return {"inputs": parts.inputs_of(at, config.use_bias), "out": out, **whole_window(config, at, i)}


def _starcoder2_layer(config: Any, at: str, i: int) -> Fields:
    up, down = (parts.linear(f"{at}.mlp.{name}", config.use_bias) for name in ("c_fc", "c_proj"))
    norm, mlp_norm = (parts.layer_norm(config, f"{at}.{name}_layernorm") for name in ("input", "post_attention"))
    return {"mlp": parts.mlp_of(config, at, ups=(up,), down=down), "mixer_norm": norm, "mlp_norm": mlp_norm}


def _conv(name: str) -> MatrixPlan:
    return MatrixPlan(f"{name}.weight", f"{name}.bias", is_transposed=True)


def _gpt2_attention(config: Any, at: str, i: int) -> Fields:
    scale = {} if config.scale_attn_weights else {"scale": 1.0}
    return {"inputs": (_conv(f"{at}.attn.c_attn"),), "out": _conv(f"{at}.attn.c_proj"), "rope": None, **scale}


def _gpt2_layer(config: Any, at: str, i: int) -> Fields:
    norm, mlp_norm = (parts.layer_norm(config, f"{at}.ln_{i}") for i in (1, 2))
    mlp = parts.mlp_of(config, at, ups=(_conv(f"{at}.mlp.c_fc"),), down=_conv(f"{at}.mlp.c_proj"))
    return {"mlp": mlp, "mixer_norm": norm, "mlp_norm": mlp_norm}


def _gpt2_whole(config: Any) -> Fields:
    return {
        "at": "transformer.h",
        "final_norm": parts.layer_norm(config, "transformer.ln_f"),
        "ropes": (),
        "embedding": "transformer.wte.weight",
        "position_embedding": "transformer.wpe.weight",
        "num_positions": config.n_positions,
    }


def _gpt2_gguf(stated: Stated) -> Fields:
    heads = keys.head_fields(stated)
    if heads["num_key_value_heads"] != heads["num_attention_heads"]:
        raise stated.refusal("attention.head_count_kv", heads["num_key_value_heads"])
    return {"num_attention_heads": heads["num_attention_heads"], "n_inner": stated.single("feed_forward_length")}


DECODERS = {
    "llama": Family(parts.like_llama(), BIASES, NO_GROUPS, gguf={"llama": GgufForm(llama_gguf, order=pairs_to_halves)}),
    "mistral": Family(parts.like_llama(whole_window), completed=_mistral),
    "ministral3": Family(
        parts.like_llama(_ministral3_attention),
        usual={**NO_WINDOW, "head_dim": 128},
        has_scaled_rope=True,
        gguf={"mistral3": GgufForm(_mistral3_gguf, order=pairs_to_halves)},
    ),
    "qwen2": Family(
        parts.like_llama(qwen2_attention),
        completed=switched_window,
        layer_types=_last_layers_with_windows,
        gguf={"qwen2": GgufForm(keys.decoder_fields)},
    ),
    "qwen3": Family(
        parts.like_llama(lambda c, at, i: {"window": parts.window_of(c, i), **parts.head_norms(c, at)}),
        BIASES,
        {"head_dim": 128},
        completed=switched_window,
        layer_types=_last_layers_with_windows,
        gguf={"qwen3": GgufForm(llama_gguf)},
    ),
    "smollm3": Family(
        parts.like_llama(
            lambda c, at, i: {"rope": 0 if c.no_rope_layers[i] else None, "window": parts.window_of(c, i)}
        ),
        f"{BIASES} no_rope_layers no_rope_layer_interval",
        {**NO_WINDOW, "tie_word_embeddings": True, "rope_theta": 2_000_000.0},
        completed=_smollm3_ropes,
        layer_types=lambda f: None if f.get("use_sliding_window") else ["full_attention"] * f["num_hidden_layers"],
        gguf={"smollm3": GgufForm(llama_gguf, order=pairs_to_halves)},
    ),
    "exaone4": Family(parts.like_llama(_exaone4_attention, norms_after), "sliding_window_pattern"),
    "ernie4_5": Family(
        parts.like_llama(whole=interleaved_rope),
        "use_bias",
        {"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 500_000.0},
    ),
    "cohere2": Family(
        parts.like_llama(_cohere2_attention, _cohere2_layer, _cohere2_whole),
        "attention_bias logit_scale sliding_window_pattern",
        {**NO_GROUPS, "tie_word_embeddings": True},
        epsilon="layer_norm_eps",
        layer_types=periodic("sliding_attention", 4, "sliding_window_pattern"),
    ),
    "olmo2": Family(
        parts.like_llama(olmo_attention, norms_after), BIASES, NO_GROUPS, gguf={"olmo2": GgufForm(_olmo2_gguf)}
    ),
    "olmo3": Family(
        parts.like_llama(_olmo3_attention, norms_after, parts.ropes_of_kinds),
        BIASES,
        {**NO_GROUPS, "rope_theta": 500_000.0},
        completed=lambda fields: {"rope_local_base_freq": 500_000.0},
        layer_types=periodic("sliding_attention", 4),
        has_two_ropes=True,
    ),
    "phi3": Family(
        parts.like_llama(_phi3_attention, _joined_mlp),
        "full_attn_mod interpolate_factor partial_rotary_factor",
        {**NO_GROUPS, **NO_WINDOW},
        completed=_phi3_rope,
        gguf={"phi3": GgufForm(_phi3_gguf)},
    ),
    "glm4": Family(
        parts.like_llama(glm4_attention, _glm4_layer, interleaved_rope),
        BIASES,
        {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        gguf={"glm4": GgufForm(glm4_gguf)},
    ),
    "starcoder2": Family(
        parts.like_llama(
            _starcoder2_attention, _starcoder2_layer, lambda c: {"final_norm": parts.layer_norm(c, "model.norm")}
        ),
        "norm_type mlp_type",
        {**NO_WINDOW, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
        epsilon="norm_epsilon",
        gguf={"starcoder2": GgufForm(keys.whole_fields, epsilon=LAYER_NORM)},
    ),
    "gpt2": Family(
        parts.like_llama(_gpt2_attention, _gpt2_layer, _gpt2_whole),
        "attn_pdrop n_inner n_ctx summary_activation summary_first_dropout summary_proj_to_labels summary_type "
        "summary_use_proj reorder_and_upcast_attn task_specific_params",
        {**NO_GROUPS, "activation_function": "gelu_new", "scale_attn_weights": True, "tie_word_embeddings": True},
        {"hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
        | {"max_position_embeddings": "n_positions", "n_positions": "max_position_embeddings"},
        epsilon="layer_norm_epsilon",
        activation="activation_function",
        gguf={
            "gpt2": GgufForm(
                _gpt2_gguf,
                epsilon=LAYER_NORM,
                changes=dict.fromkeys(
                    ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), torch.t
                ),
            )
        },
    ),
}
