"""How models are written in GGUF files: the record, and names that many families share.

Source: llama.cpp's gguf-py (names of tensors), and its converters in conversion/*.py, which tell what a file stores
otherwise than Transformers does; the build of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.models.gguf.keys import Stated

_OF_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
DECODER = {
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
WITHOUT_FFN_NORM = {name: module for name, module in DECODER.items() if name != "ffn_norm"}
NORMS_OF_HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_up_proj",
    "ffn_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _less_one(numbers: Tensor) -> Tensor:
    return numbers - 1


_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
LAYER_NORM = "attention.layer_norm_epsilon"
FROM_ONE = {f"{name}.weight": _less_one for name in _NORMS}


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


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How GGUF files of an architecture state a family."""

    fields: Callable[[Stated], dict[str, Any]]  # fields of the configuration that are more than sizes
    # The file's name of a layer's tensor -> the module:
    tensors: Mapping[str, str] = field(default_factory=lambda: DECODER)
    ends: Mapping[str, str] = field(default_factory=lambda: ENDS)  # names of tensors outside of layers -> the module
    layers: str = "model.layers"  # prefix of a layer's parameters
    epsilon: str = "attention.layer_norm_rms_epsilon"  # key of that of norms
    # Takes the name of a tensor and the configuration; returns the order of rows, or None for that of the parameter:
    order: Callable[[str, Any], Order | None] = lambda name, config: None
    columns: Callable[[str, Any], Order | None] = lambda name, config: None  # returns that of columns, likewise
    # Name of a tensor -> function from the file's form of the numbers to the model's:
    changes: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    # Name of a tensor outside of layers whose parts are parameters -> their names, with "{}" for the number:
    stacks: Mapping[str, str] = field(default_factory=dict)
