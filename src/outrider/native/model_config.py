"""Configuration of a model: the fields of its config.json, in one form whatever release wrote the file.

A GGUF file states the same fields under other names (models/gguf). Whoever reads a field that neither the file nor the
model's family states gets an AttributeError: then Transformers' own configuration, which knows all defaults, completes
the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# As many heads of keys and values as of queries where the file states none:
_WITHOUT_GROUPS = frozenset("llama olmo2 olmo3 olmoe cohere2 granite granitemoe granitemoehybrid phi3 gpt2".split())
_WITHOUT_WINDOW = frozenset({"smollm3", "mixtral", "phi3", "starcoder2", "ministral3"})  # unless the file states one
_SWITCHED_WINDOWS = frozenset({"qwen2", "qwen3", "qwen2_moe", "qwen3_moe"})  # use_sliding_window counts
_ROPE_STATED = frozenset({"gemma4_text", "gpt_oss", "ministral3"})  # whose usual rope is scaled
_TWO_ROPES = frozenset({"gemma3_text", "gemma4_text", "olmo3"})
# By family: the kind of most layers, the field of the period at which a layer has full attention, and its default.
_PERIODS = {
    "gemma2": ("sliding_attention", "", 2),
    "gemma3_text": ("sliding_attention", "sliding_window_pattern", 6),
    "gpt_oss": ("sliding_attention", "", 2),
    "cohere2": ("sliding_attention", "sliding_window_pattern", 4),
    "olmo3": ("sliding_attention", "", 4),
    "qwen3_5_text": ("linear_attention", "full_attention_interval", 4),
    "qwen3_5_moe_text": ("linear_attention", "full_attention_interval", 4),
}
# Other names of fields in the files of a family.
_ALIASES = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "n_positions": "max_position_embeddings",
    },
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe": {"num_local_experts": "n_routed_experts"},
    "nemotron_h": {"num_local_experts": "n_routed_experts", "layers_block_type": "layer_types"},
    "granitemoehybrid": {"layer_types": "layers_block_type"},
}
_OF_NEMOTRON = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}  # letters of its pattern
_NAMES_OF_EXPERTS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}
# Values of fields that a file need not state, where they are not what follows from their absence.
_USUAL: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256}
_LFM2 = {"tie_word_embeddings": True, "rope_theta": 1_000_000.0, "conv_bias": False}
_MAMBA = {"time_step_limit": None, "mamba_proj_bias": False, "mamba_conv_bias": True}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"tie_word_embeddings": True},
    "ernie4_5": {"tie_word_embeddings": True, "head_dim": 128, "rope_theta": 500_000.0},
    "ernie4_5_moe": {"tie_word_embeddings": True, "rope_theta": 500_000.0},
    "falcon_h1": {
        **_MAMBA,
        **dict.fromkeys(
            (
                *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "embedding_multiplier"),
                *("lm_head_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
            ),
            1.0,
        ),
        "mlp_multipliers": (1.0, 1.0),
        "ssm_multipliers": (1.0,) * 5,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "projectors_bias": False,
    },
    "gemma": _GEMMA | {"hidden_act": "gelu_pytorch_tanh"},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA | {"rope_theta": 1_000_000.0},
    "gemma4_text": _GEMMA
    | {"attention_bias": False, "global_head_dim": 512, "use_bidirectional_attention": None, "enable_moe_block": False},
    "glm4": {"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "gpt2": {
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {
        "attention_bias": True,
        "head_dim": 64,
        "rope_theta": 150_000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "granitemoehybrid": _MAMBA,
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | {"use_expert_bias": True, "routed_scaling_factor": 1.0},
    "ministral3": {"head_dim": 128},
    "mixtral": {"rope_theta": 1_000_000.0},
    "nemotron_h": {
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "head_dim": 128,
        "moe_latent_size": None,
        "time_step_min": 0.001,
        "use_bias": False,
    },
    "olmo3": {"rope_theta": 500_000.0},
    "olmoe": {"norm_topk_prob": False},
    "qwen2_moe": {"norm_topk_prob": False, "qkv_bias": True},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"norm_topk_prob": False, "mlp_only_layers": (), "decoder_sparse_step": 1},
    "qwen3_5_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_5_moe_text": {"head_dim": 256, "partial_rotary_factor": 0.25},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2_000_000.0},
    "starcoder2": {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh", "use_bias": True},
}


class ModelConfig:
    """Configuration of a decoder of text, with its fields as attributes.

    Attributes:
        stated: the fields of the file, as written.
    """

    model_type: str
    architectures: list[str] | None = None
    is_encoder_decoder = False

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self.stated = dict(stated)
        kind = str(stated.get("model_type"))
        fields = _USUAL | _DEFAULTS.get(kind, {}) | self.stated
        for name, other in (_NAMES_OF_EXPERTS | _ALIASES.get(kind, {})).items():
            if name not in stated and other in fields:
                fields[name] = fields[other]
        if kind == "nemotron_h":
            if (pattern := fields.get("hybrid_override_pattern")) is not None:
                fields["layers_block_type"] = [_OF_NEMOTRON[letter] for letter in pattern]
            if "layers_block_type" in fields:
                fields["num_hidden_layers"] = len(fields["layers_block_type"])
            else:  # what Transformers takes instead is not known here
                fields.pop("num_hidden_layers", None)
        if kind == "smollm3" and fields.get("no_rope_layers") is None:
            period = fields.get("no_rope_layer_interval") or 4
            fields["no_rope_layers"] = [(i + 1) % period != 0 for i in range(fields.get("num_hidden_layers") or 0)]
        if kind in _SWITCHED_WINDOWS and not fields.get("use_sliding_window"):
            fields["sliding_window"] = None
        if kind in _WITHOUT_GROUPS:
            fields.setdefault("num_key_value_heads", None)
        if kind in _WITHOUT_WINDOW:
            fields.setdefault("sliding_window", None)
        if fields.get("layer_types") is None:
            fields.pop("layer_types", None)
            fields |= _layer_types(kind, fields)
        if kind not in _ROPE_STATED or fields.get("rope_scaling") or fields.get("rope_parameters"):
            fields["rope_parameters"] = _rope_parameters(kind, fields)
        vars(self).update(fields)

    def get_text_config(self, *, decoder: bool = False) -> ModelConfig:
        """Return this configuration, which is of text alone, as Transformers' own do."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.stated


def _layer_types(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Field of the kinds of layers in files that state a period; nothing for other families."""
    num_layers = fields.get("num_hidden_layers") or 0
    if kind == "smollm3" and not fields.get("use_sliding_window"):
        return {"layer_types": ["full_attention"] * num_layers}
    if kind in ("qwen2", "qwen3"):
        first = num_layers if fields["sliding_window"] is None else fields["max_window_layers"]
        return {"layer_types": ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]}
    if kind not in _PERIODS:
        return {}
    most, name, default = _PERIODS[kind]
    period = fields.get(name) or default
    return {"layer_types": [most if (i + 1) % period else "full_attention" for i in range(num_layers)]}


def _rope_parameters(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Rope by the names of newer files; of each kind of layers in families with two ropes."""
    stated = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if kind not in _TWO_ROPES:
        return _one_rope(stated, fields, fields.get("rope_theta"))
    if not stated.keys() & {"full_attention", "sliding_attention"}:  # scaling is that of layers without a window
        stated = {"full_attention": stated}
    local = fields.get("rope_local_base_freq", 10_000.0 if kind != "olmo3" else fields.get("rope_theta"))
    thetas = {"full_attention": fields.get("rope_theta"), "sliding_attention": local}
    return {name: _one_rope(stated.get(name) or {}, fields, theta) for name, theta in thetas.items()}


def _one_rope(stated: Mapping[str, Any], fields: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": stated.get("type", "default"), "rope_theta": theta or 10_000.0}
    if (share := fields.get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = share
    rope |= stated
    if fields.get("model_type") == "phi3" and rope["rope_type"] in ("su", "yarn"):  # names of older files
        rope["rope_type"] = "longrope"
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = fields.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", original or fields.get("max_position_embeddings"))
        if original:
            rope["original_max_position_embeddings"] = original
    return rope
