"""A family of models: how its files state a model, and which plan follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from outrider.models.gguf.tensors import GgufForm
from outrider.native.plan import Plan

Fields = dict[str, Any]
"""Fields of a config.json, or of a plan, by name."""

# Fields that change no logits of a forward, or that all plans use.
_COMMON = frozenset(
    "architectures attention_dropout bos_token_id dtype embd_pdrop embedding_dropout eos_token_id head_dim hidden_act "
    "hidden_size id2label initializer_range intermediate_size label2id layer_types max_position_embeddings "
    "max_window_layers model_type name_or_path num_attention_heads num_hidden_layers num_key_value_heads pad_token_id "
    "pretraining_tp problem_type resid_pdrop residual_dropout return_dict rms_norm_eps rope_parameters sliding_window "
    "tie_word_embeddings transformers_version use_cache use_sliding_window vocab_size original_max_position_embeddings "
    "chunk_size_feed_forward output_attentions output_hidden_states is_encoder_decoder _name_or_path "
    "quantization_config auto_map transformers.js_config is_llama_config unsloth_fixed unsloth_version "
    "rope_theta rope_scaling rope_local_base_freq torch_dtype "
    "_num_labels output_router_logits router_aux_loss_coef router_jitter_noise".split()
)

# Flags of other models and of generation, which configurations state as false.
OFF = frozenset(
    "add_cross_attention do_sample early_stopping is_decoder output_scores remove_invalid_values "
    "return_dict_in_generate rope_interleaved scale_attn_by_inverse_layer_idx tf_legacy_loss tie_encoder_decoder "
    "torchscript use_bfloat16 use_bidirectional_attention use_mrope".split()
)


@dataclass(frozen=True)
class Family:
    """A row of the table of families. A config.json with a field that is neither common nor named here has no plan."""

    plan: Callable[[Any], Plan] | None = None  # of a ``ModelConfig``; None: Transformers' code runs the family
    own: str = ""  # names of fields, beside those that all families have and those that are named below
    usual: Mapping[str, Any] = field(default_factory=dict)  # defaults of fields that a file may leave out
    aliases: Mapping[str, str] = field(default_factory=dict)  # name of a field -> that in the family's files
    epsilon: str = "rms_norm_eps"  # name of the field with the epsilon of norms
    activation: str = "hidden_act"  # name of the field with the activation of MLPs
    completed: Callable[[Fields], Fields] = lambda fields: {}  # fields that follow from those that are stated
    layer_types: Callable[[Fields], list[str] | None] = lambda fields: None  # where a file need not state them
    has_two_ropes: bool = False  # for layers without and with a window
    has_scaled_rope: bool = False  # by default: a file that states no rope has no plan
    gguf: Mapping[str, GgufForm] = field(default_factory=dict)  # by architecture

    @cached_property
    def known(self) -> frozenset[str]:
        """Names of the fields of config.json that the plan knows."""
        return _COMMON | {*self.own.split(), *self.usual, *self.aliases.values(), self.epsilon, self.activation}


def periodic(kind: str, default: int, field: str = "") -> Callable[[Fields], list[str]]:
    """Layers of a kind, but for each n-th one, which has full attention: n is the value of a field, or the default."""

    def layer_types(fields: Fields) -> list[str]:
        period = fields.get(field) or default
        return [kind if (i + 1) % period else "full_attention" for i in range(fields["num_hidden_layers"])]

    return layer_types
