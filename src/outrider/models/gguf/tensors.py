"""How models are written in GGUF files: the record, and names that many families share.

Source: llama.cpp's gguf-py (names of tensors), and its converters in conversion/*.py, which tell what a file stores
otherwise than Transformers does; the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models.gguf.keys import Stated

_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_EXPERTS = ("experts", "mlp.experts", "feed_forward.experts", "block_sparse_moe.experts", "mixer.experts")
_GATES_AND_UPS = " ".join(f"{experts}.gate_up_proj" for experts in _EXPERTS)
_SHARED = ("mlp.shared_expert", "mlp.shared_experts", "mixer.shared_experts")
_GATES, _UPS, _DOWNS = (" ".join(f"{expert}.{name}_proj" for expert in _SHARED) for name in ("gate", "up", "down"))
# Names of tensors, with their kind or without it: modules or parameters, in a layer or outside of layers, of which the
# first that a model has is meant. No model has two of them, unless another tensor is the other one.
NAMES = {
    "token_embd": "model.embed_tokens model.embeddings transformer.wte",
    "token_embd_norm": "model.embedding_norm",
    "position_embd": "transformer.wpe",
    "output_norm": "model.norm model.norm_f model.final_layernorm transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "input_layernorm operator_norm norm ln_1",
    "attn_q": "self_attn.q_proj mixer.q_proj",
    "attn_k": "self_attn.k_proj mixer.k_proj",
    "attn_v": "self_attn.v_proj mixer.v_proj",
    "attn_qkv": "self_attn.qkv_proj linear_attn.in_proj_qkv attn.c_attn",
    "attn_q_norm": "self_attn.q_norm self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_norm self_attn.k_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_output": "self_attn.o_proj self_attn.out_proj mixer.o_proj attn.c_proj",
    "post_attention_norm": "post_self_attn_layernorm post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm pre_ff_layernorm post_attention_layernorm ffn_norm ln_2",
    "ffn_gate": "mlp.gate_proj feed_forward.gate_proj feed_forward.w1 shared_mlp.input_linear",
    "ffn_up": "mlp.up_proj mlp.gate_up_proj mlp.c_fc feed_forward.up_proj feed_forward.w3 shared_mlp.input_linear "
    "mixer.up_proj",
    "ffn_down": "mlp.down_proj mlp.c_proj feed_forward.down_proj feed_forward.w2 shared_mlp.output_linear "
    "mixer.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm post_mlp_layernorm",
    # Experts
    "ffn_gate_inp": "router.proj mlp.router mlp.gate feed_forward.gate block_sparse_moe.router mixer.gate",
    "ffn_gate_inp.scale": "router.scale",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias feed_forward.expert_bias mixer.gate.e_score_correction_bias",
    "ffn_gate_exps": _GATES_AND_UPS,
    "ffn_up_exps": f"{_GATES_AND_UPS} mixer.experts.up_proj",
    "ffn_gate_up_exps": _GATES_AND_UPS,
    "ffn_down_exps": " ".join(f"{experts}.down_proj" for experts in _EXPERTS),
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": f"{_GATES} shared_mlp.input_linear",
    "ffn_up_shexp": f"{_UPS} shared_mlp.input_linear",
    "ffn_down_shexp": f"{_DOWNS} shared_mlp.output_linear",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    # Recurrences and convolutions
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_in": "mamba.in_proj mixer.in_proj",
    "ssm_conv1d": "linear_attn.conv1d mamba.conv1d mixer.conv1d",
    "ssm_dt.bias": "linear_attn.dt_bias mamba.dt_bias mixer.dt_bias",
    "ssm_a": "linear_attn.A_log mamba.A_log mixer.A_log",
    "ssm_d": "mamba.D mixer.D",
    "ssm_norm": "linear_attn.norm mamba.norm mixer.norm",
    "ssm_out": "linear_attn.out_proj mamba.out_proj mixer.out_proj",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    # Gemma
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "nextn.pre_projection": "pre_projection",
    "nextn.post_projection": "post_projection",
}
LAYER_NORM = "attention.layer_norm_epsilon"


_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
FROM_ONE: dict[str, Callable[[Tensor], Tensor]] = {f"{name}.weight": lambda numbers: numbers - 1 for name in _NORMS}


class Order(NamedTuple):
    """Order of rows, or columns: after the first ones, blocks of [a, b, size] are transposed to [b, a, size]."""

    num_blocks: int
    a: int
    b: int
    size: int = 1
    num_before: int = 0

    @property
    def length(self) -> int:
        return self.num_before + self.num_blocks * self.a * self.b * self.size

    def places(self) -> Tensor:
        """Place in the file of each row of the parameter."""
        after = torch.arange(self.num_before, self.length).view(self.num_blocks, self.a, self.b, self.size)
        return torch.cat((torch.arange(self.num_before), after.transpose(1, 2).flatten()))


def pairs_to_halves(name: str, config: Any) -> Order | None:
    """Llama's order: llama.cpp rotates neighbouring dimensions of a head, Transformers i with i + head_dim / 2."""
    num_heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name)
    if num_heads is None:
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Order(num_heads, head_dim // 2, 2)


def place_of(tensor: str) -> tuple[str | None, str]:
    """Layer of a tensor, None outside of layers, and its name there."""
    found = _OF_LAYER.fullmatch(tensor)
    return (None, tensor) if found is None else (found[1], found[2])


def weight_of(tensor: str, weights: Set[str]) -> str | None:
    """Name of the weight of a model that a tensor belongs to; None if none does."""
    layer, leaf = place_of(tensor)
    module, _, kind = leaf.rpartition(".") if "." in leaf else (leaf, "", "weight")
    places = ("",) if layer is None else (f"model.layers.{layer}.", f"transformer.h.{layer}.")
    # Some parameters are no part of a module of their own: a layer's experts.
    ends = [(leaf, ""), (module, f".{kind}"), *([(module, "")] if kind == "weight" else ())]
    found = (f"{place}{name}{end}" for key, end in ends for name in NAMES.get(key, "").split() for place in places)
    return next((name for name in found if name in weights), None)


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files of an architecture state a family."""

    fields: Callable[[Stated], dict[str, Any]]  # fields of the configuration that are more than sizes
    epsilon: str = "attention.layer_norm_rms_epsilon"  # key of that of norms
    # Takes the name of a tensor and the configuration; returns the order of rows, or None for that of the parameter:
    order: Callable[[str, Any], Order | None] = lambda name, config: None
    columns: Callable[[str, Any], Order | None] = lambda name, config: None  # returns that of columns, likewise
    # Name of a tensor -> function from the file's form of the numbers to the model's:
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # Name of a tensor outside of layers whose parts are parameters -> their names, with "{}" for the number:
    stacks: Mapping[str, str] = field(default_factory=dict)
