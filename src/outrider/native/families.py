"""Plans of model families, made from configurations, tested against the modelling code of Transformers.

A configuration with a field that its family's plan does not know is refused, unless the field is empty.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.native import decoder_families, gemma_families, recurrent_families
from outrider.native.model_config import ModelConfig
from outrider.native.plan import Families, NotPlanned, Plan

FAMILIES: Families = {
    **decoder_families.FAMILIES,
    **gemma_families.FAMILIES,
    **recurrent_families.FAMILIES,
}
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


def has_plan(config: Any) -> bool:
    try:
        plan_of(config)
    except NotPlanned:
        return False
    return True


def _may_be_read(config: Any, name: str) -> bool:
    """Whether Transformers' code may read a field. Published configurations also have fields of other programs, which
    their classes do not declare."""
    kind = type(config)
    if not kind.__module__.startswith("transformers.models."):
        return True
    declared = {one.name for one in fields(kind)} if is_dataclass(kind) else set()
    if name in declared | inspect.signature(kind).parameters.keys():
        return True
    return re.search(rf"config\.{name}\b|[\"']{name}[\"']", _sources(kind.__module__)) is not None


@cache
def _sources(configuration: str) -> str:
    import transformers

    shared = ("modeling_utils", "modeling_rope_utils", "masking_utils", "cache_utils")
    names = [f"transformers.{name}" for name in shared] + [configuration.replace(".configuration_", ".modeling_")]
    root = Path(transformers.__file__).parents[1]
    return "".join((root / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8") for name in names)


def plan_of(config: Any) -> Plan:
    """Plan of a configuration, ours or Transformers'. Raises NotPlanned."""
    if config.model_type not in FAMILIES:
        raise NotPlanned(f"{config.model_type} has no plan")
    make, own = FAMILIES[config.model_type]
    known = _COMMON | {*own.split()}
    for name, value in config.to_dict().items():
        if name not in known and value not in (None, False) and _may_be_read(config, name):
            raise NotPlanned(f"its plan does not know {name}={value!r}")
    try:
        return make(config if isinstance(config, ModelConfig) else ModelConfig(config.to_dict()))
    except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:  # unstated, or of another kind
        raise NotPlanned(f"its configuration makes no plan ({error})") from error
