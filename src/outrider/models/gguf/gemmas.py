"""Gemma's models, as GGUF files state them.

Source: llama.cpp's src/models/gemma*.cpp and conversion/gemma.py, in the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import statistics
from typing import Any

from outrider.errors import ModelCorrupt
from outrider.models.gguf import keys
from outrider.models.gguf.family import DECODER, ENDS, FROM_ONE, NORMS_OF_HEADS, Family


def _gemma2(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.decoder_fields(stated)
    stated.check("rope.freq_base_swa", fields["rope_parameters"]["rope_theta"])
    return {
        **fields,
        **keys.query_scale(stated, fields, 46),
        "attn_logit_softcapping": stated.take("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0),
        "sliding_window": stated.take("attention.sliding_window", 4096),
        "layer_types": keys.layer_types(stated, 2),
    }


def _gemma3(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.decoder_fields(stated)
    window, types = stated.take("attention.sliding_window", 0), keys.layer_types(stated, 6)
    return {
        **fields,
        **keys.query_scale(stated, fields, 62),
        **keys.two_ropes(stated, fields["rope_parameters"]),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 0.0) or None,
        "sliding_window": window,
        "layer_types": types if window else ["full_attention"] * len(types),
    }


def _num_shared(stated: keys.Stated, default: int | None = None) -> int:
    """Number of the last layers, which read keys and values of layers before. Some checkpoints have matrices for their
    own, which are not used. Raises ModelCorrupt: no layer is before them."""
    number: int = stated.take("attention.shared_kv_layers", default)
    if not 0 <= number < stated.num_layers:
        raise ModelCorrupt(
            f"{stated.name}: the file states {stated.num_layers} layers, and that the last {number} of them read keys "
            "and values of others (attention.shared_kv_layers)"
        )
    for i in range(stated.num_layers - number, stated.num_layers):
        stated.read_tensors |= {f"blk.{i}.{name}.weight" for name in ("attn_k", "attn_v", "attn_k_norm")}
    return number


def _gemma4(stated: keys.Stated) -> dict[str, Any]:
    return _gemma4_fields(stated) | {"num_kv_shared_layers": _num_shared(stated, 0)}


def _gemma4_assistant(stated: keys.Stated) -> dict[str, Any]:
    """An assistant, whose layers read keys and values of its target. Groups of tokens have no effect: the file does not
    state how many are chosen."""
    stated.check("attention.shared_kv_layers", stated.num_layers)
    stated.read_tensors |= {name for name in stated.file.tensors if name.startswith("masked_embd_")}
    fields = _gemma4_fields(stated) | {"num_kv_shared_layers": stated.num_layers, "vocab_size_per_layer_input": 0}
    num_heads, width = fields["num_attention_heads"], stated.take("embedding_length")
    for i, kind in enumerate(fields["layer_types"]):  # before anything is made that is as long as the keys state
        size = fields["head_dim" if kind == "sliding_attention" else "global_head_dim"]
        stated.check_shape(f"blk.{i}.attn_q.weight", num_heads * size, width)
    return fields


def _gemma4_fields(stated: keys.Stated) -> dict[str, Any]:
    types = keys.layer_types(stated, 6)
    if types[-1] != "full_attention":
        raise stated.refusal("attention.sliding_window_pattern", types)
    sizes = {name: stated.take(f"attention.{name}") for name in ("key_length", "key_length_swa")}
    for name, size in sizes.items():
        stated.check(f"attention.{name.replace('key', 'value')}", size)
    stated.check("rope.dimension_count_swa", sizes["key_length_swa"])
    # Layers with a window have a number of heads, and those without have another.
    heads = dict(zip(types, stated.each("attention.head_count_kv"), strict=True))
    if [heads[kind] for kind in types] != stated.each("attention.head_count_kv"):
        raise stated.refusal("attention.head_count_kv", stated.each("attention.head_count_kv"))
    widths = stated.each("feed_forward_length")
    is_wider = [width == 2 * widths[0] for width in widths]
    whole = types.index("full_attention")
    per_layer = "per_layer_token_embd.weight"
    fields = {
        "num_attention_heads": stated.single("attention.head_count"),
        "num_key_value_heads": heads.get("sliding_attention", heads["full_attention"]),
        "num_global_key_value_heads": heads["full_attention"],
        "attention_k_eq_v": not stated.has(f"blk.{whole}.attn_v.weight"),
        "head_dim": sizes["key_length_swa"],
        "global_head_dim": sizes["key_length"],
        "layer_types": types,
        "sliding_window": stated.take("attention.sliding_window"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": any(is_wider),
        **keys.two_ropes(stated, keys.proportional_rope(stated, sizes["key_length"])),
        "hidden_size_per_layer_input": stated.take("embedding_length_per_layer_input"),
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0) or None,
    }
    if stated.has(per_layer):
        fields["vocab_size_per_layer_input"] = stated.rows(per_layer)
    if stated.take("expert_count", 0):
        moe = keys.expert_fields(stated)
        fields |= {"enable_moe_block": True, "top_k_experts": moe.pop("num_experts_per_tok"), **moe}
    return fields


def _gemma3n(stated: keys.Stated) -> dict[str, Any]:
    fields = keys.decoder_fields(stated)
    num_shared = _num_shared(stated)
    sparsity = stated.each("activation_sparsity_scale")
    return {
        **fields,
        **keys.two_ropes(stated, fields["rope_parameters"]),
        "layer_types": keys.layer_types(stated, 5),
        "sliding_window": stated.take("attention.sliding_window"),
        "num_kv_shared_layers": num_shared,
        "hidden_size_per_layer_input": stated.take("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": stated.rows("per_layer_token_embd.weight"),
        "altup_active_idx": stated.take("altup.active_idx"),
        "altup_num_inputs": stated.take("altup.num_inputs"),
        "laurel_rank": stated.rows("blk.0.laurel_l.weight"),
        # The file has quantiles of the normal distribution, and the share of zeros is a probability.
        "activation_sparsity_pattern": [statistics.NormalDist().cdf(one) for one in sparsity],
        "final_logit_softcapping": stated.take("final_logit_softcapping", 30.0) or None,
    }


_GEMMA2 = DECODER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA4 = {
    **_GEMMA2,
    **NORMS_OF_HEADS,
    "layer_output_scale.weight": "layer_scalar",
    **_OF_PER_LAYER,
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_gate_exps": "experts.gate_up_proj",
    "ffn_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_PER_LAYER = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N = {
    **_GEMMA2,
    **NORMS_OF_HEADS,
    **_OF_PER_LAYER,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_ALTUP = {
    "altup_proj.weight": "model.altup_projections.{}.weight",
    "altup_unembd_proj.weight": "model.altup_unembed_projections.{}.weight",
}

GEMMAS = {
    "gemma": Family("gemma", keys.decoder_fields, changes=FROM_ONE),
    "gemma2": Family("gemma2", _gemma2, tensors=_GEMMA2, changes=FROM_ONE),
    "gemma3": Family("gemma3_text", _gemma3, tensors=_GEMMA2 | NORMS_OF_HEADS, changes=FROM_ONE),
    "gemma3n": Family("gemma3n_text", _gemma3n, tensors=_GEMMA3N, ends=ENDS | _PER_LAYER, stacks=_ALTUP),
    "gemma4": Family("gemma4_text", _gemma4, tensors=_GEMMA4, ends=ENDS | _PER_LAYER),
}
ASSISTANT = Family(
    "gemma4_assistant",
    _gemma4_assistant,
    tensors=_GEMMA4,
    ends=ENDS | {"nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection"},
)
"""A head, no model: its configuration is that of its layers."""
