"""Families with attention and experts: what differs from Llama's, in config.json, GGUF files and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from outrider.models.families import decoders, parts
from outrider.models.families.family import Family, Fields, periodic
from outrider.models.gguf import keys
from outrider.models.gguf.keys import Stated
from outrider.models.gguf.tensors import GgufForm
from outrider.native.plan import MatrixPlan, NotPlanned


def _only_experts(config: Any, at: str, i: int) -> Fields:
    return {"mlp": None, "experts": parts.experts_of(config, f"{at}.mlp")}


# Qwen


def _qwen3_layer(config: Any, at: str, i: int) -> Fields:
    is_dense = i in config.mlp_only_layers or not config.num_experts or (i + 1) % config.decoder_sparse_step
    return {} if is_dense else _only_experts(config, at, i)


def _qwen2_layer(config: Any, at: str, i: int) -> Fields:
    found, gate = _qwen3_layer(config, at, i), parts.linear(f"{at}.mlp.shared_expert_gate")
    return found and found | {"mlp": parts.mlp_of(config, f"{at}.mlp.shared_expert", output_gate=gate)}


def _qwen3_gguf(stated: Stated) -> Fields:
    return decoders.llama_gguf(stated) | keys.expert_fields(stated) | {"norm_topk_prob": True}


# GLM 4.5 and ERNIE 4.5


def _glm4_layer(config: Any, at: str, i: int) -> Fields:
    if i < config.first_k_dense_replace:
        return {}
    shared, experts = parts.mlp_of(config, f"{at}.mlp.shared_experts"), parts.routed_experts_of(config, f"{at}.mlp")
    return {"mlp": shared, "experts": experts}


def _glm4_gguf(stated: Stated) -> Fields:
    return {
        **decoders.glm4_gguf(stated),
        **keys.routed_fields(stated, False),
        "first_k_dense_replace": stated.take("leading_dense_block_count", 0),
        "use_qk_norm": stated.has("blk.0.attn_q_norm.weight"),
    }


def _ernie4_5_layer(config: Any, at: str, i: int) -> Fields:
    if config.moe_norm_min > 1e-9:  # the least sum of the weights of a token's experts
        raise NotPlanned(f"its plan does not know moe_norm_min={config.moe_norm_min}")
    last = config.moe_layer_end_index % config.num_hidden_layers
    if (i + 1) % config.moe_layer_interval or not config.moe_layer_start_index <= i <= last:
        return {}
    correction_bias = f"{at}.mlp.gate.moe_statics.e_score_correction_bias"
    shared = parts.mlp_of(config, f"{at}.mlp.shared_experts") if config.moe_num_shared_experts else None
    return {"mlp": shared, "experts": parts.experts_of(config, f"{at}.mlp", correction_bias=correction_bias)}


def _ernie4_5_whole(config: Any) -> Fields:
    head = parts.linear("lm_head", config.use_bias)
    if config.tie_word_embeddings:
        head = replace(head, weight="model.embed_tokens.weight")
    return {"lm_head": head, **decoders.interleaved_rope(config)}


# gpt-oss


def _gpt_oss_attention(config: Any, at: str, i: int) -> Fields:
    return {"window": parts.window_of(config, i), "sinks": f"{at}.self_attn.sinks"}


def _gpt_oss_layer(config: Any, at: str, i: int) -> Fields:
    if config.num_local_experts == 1:
        raise NotPlanned("its plan does not know a single expert")

    def matrices(name: str, part: int = 0, num_parts: int = 1) -> MatrixPlan:
        name = f"{at}.mlp.experts.{name}_proj"
        return MatrixPlan(name, f"{name}_bias", part, num_parts, is_transposed=True)

    experts = parts.experts_of(
        config,
        f"{at}.mlp",
        router=parts.linear(f"{at}.mlp.router", True),
        ups=tuple(matrices("gate_up", part, 2) for part in range(2)),
        down=matrices("down"),
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )
    return {"mlp": None, "experts": experts}


def _gpt_oss_gguf(stated: Stated) -> Fields:
    fields, number = keys.decoder_fields(stated), "num_local_experts"
    moe = keys.expert_fields(stated, number=number, is_normalized=False, gate=keys.SOFTMAX_OF_CHOSEN)
    rope = fields["rope_parameters"]
    stated.check("rope.freq_base_swa", rope["rope_theta"])
    if rope["rope_type"] == "yarn":
        # No key says that its bounds are not rounded, as the authors' model has them; llama.cpp rounds them.
        rope["truncate"] = False
    return {
        **fields,
        "intermediate_size": moe.pop("moe_intermediate_size"),
        **moe,
        "sliding_window": stated.take("attention.sliding_window"),
        "layer_types": keys.layer_types(stated, 2),
    }


_NUMBERS = "num_experts_per_tok num_local_experts num_experts"
_QWEN = f"{_NUMBERS} moe_intermediate_size"

MIXTURES = {
    "qwen2_moe": Family(
        parts.like_llama(lambda c, at, i: decoders.qwen2_attention(c, at, i, c.qkv_bias), _qwen2_layer),
        f"{_QWEN} shared_expert_intermediate_size decoder_sparse_step mlp_only_layers",
        {"norm_topk_prob": False, "qkv_bias": True},
        completed=decoders.switched_window,
    ),
    "qwen3_moe": Family(
        parts.like_llama(lambda c, at, i: {**decoders.whole_window(c, at, i), **parts.head_norms(c, at)}, _qwen3_layer),
        f"{_QWEN} {decoders.BIASES}",
        {"norm_topk_prob": False, "mlp_only_layers": (), "decoder_sparse_step": 1},
        completed=decoders.switched_window,
        gguf={"qwen3moe": GgufForm(_qwen3_gguf)},
    ),
    "mixtral": Family(
        parts.like_llama(decoders.whole_window, _only_experts),
        _NUMBERS,
        {**decoders.NO_WINDOW, "rope_theta": 1_000_000.0},
    ),
    "olmoe": Family(
        parts.like_llama(decoders.olmo_attention, _only_experts),
        f"{_NUMBERS} attention_bias",
        {**decoders.NO_GROUPS, "norm_topk_prob": False},
    ),
    "ernie4_5_moe": Family(
        parts.like_llama(layer=_ernie4_5_layer, whole=_ernie4_5_whole),
        f"{_NUMBERS} use_bias moe_intermediate_size moe_num_shared_experts moe_layer_start_index moe_layer_end_index "
        "moe_layer_interval moe_norm_min moe_capacity",
        {"tie_word_embeddings": True, "rope_theta": 500_000.0},
        {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    ),
    "glm4_moe": Family(
        parts.like_llama(decoders.glm4_attention, _glm4_layer),
        f"{_NUMBERS} {decoders.BIASES} moe_intermediate_size norm_topk_prob n_shared_experts routed_scaling_factor "
        "n_group topk_group first_k_dense_replace use_qk_norm num_mtp_layers num_nextn_predict_layers",
        {"partial_rotary_factor": 0.5},
        {"num_local_experts": "n_routed_experts"},
        gguf={"glm4moe": GgufForm(_glm4_gguf)},
    ),
    "gpt_oss": Family(
        parts.like_llama(_gpt_oss_attention, _gpt_oss_layer),
        _NUMBERS,
        {"attention_bias": True, "head_dim": 64, "rope_theta": 150_000.0, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        layer_types=periodic("sliding_attention", 2),
        has_scaled_rope=True,
        gguf={
            "gpt-oss": GgufForm(
                _gpt_oss_gguf,
                changes={  # gates and others in turn: [E, 2I, H] -> [E, H, 2I], and biases [2E, I] -> [E, 2I]
                    "ffn_gate_exps.weight": lambda one: one.unflatten(1, (2, -1)).permute(0, 3, 2, 1).flatten(2),
                    "ffn_gate_exps.bias": lambda one: one.unflatten(0, (2, -1)).permute(1, 2, 0).flatten(1),
                    "ffn_down_exps.weight": lambda numbers: numbers.transpose(1, 2),
                },
            )
        },
    ),
}
