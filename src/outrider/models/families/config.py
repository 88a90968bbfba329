"""Configuration of a model: the fields of its config.json, in one form whatever release wrote the file.

A GGUF file states the same fields under other names (models/gguf). A field that neither the file nor the model's family
states raises AttributeError: then Transformers, whose configurations know all defaults, loads the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.models.families.family import Family
from outrider.native.plan import NotPlanned

_USUAL: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False}
_KINDS = {"tie_word_embeddings": bool} | dict.fromkeys(("hidden_size", "num_attention_heads", "vocab_size"), int)
_NAMES_OF_EXPERTS = {"num_experts": "num_local_experts", "num_local_experts": "num_experts"}


class ModelConfig:
    """Configuration of a decoder of text, with its fields as attributes.

    Attributes:
        stated: the fields of the file, as written.
    """

    model_type: str
    architectures: list[str] | None = None
    is_encoder_decoder = False

    def __init__(self, stated: Mapping[str, Any], family: Family) -> None:
        fields = _USUAL | {**family.usual, **stated}
        for name, other in (_NAMES_OF_EXPERTS | {**family.aliases}).items():
            if name not in stated and other in fields:
                fields[name] = fields[other]
        for name, kind in _KINDS.items():
            if not isinstance(fields.get(name), kind):
                raise NotPlanned(f"it states {name} = {fields.get(name)!r:.40}")
        fields |= family.completed(fields)
        if fields.get("layer_types") is None:
            fields.pop("layer_types", None)
            if (layer_types := family.layer_types(fields)) is not None:
                fields["layer_types"] = layer_types
        if not family.has_scaled_rope or fields.get("rope_scaling") or fields.get("rope_parameters"):
            fields["rope_parameters"] = _rope_parameters(fields, family.has_two_ropes)
        vars(self).update(fields)
        self.stated, self.family = dict(stated), family

    @property
    def epsilon(self) -> float:
        return float(getattr(self, self.family.epsilon))

    def get_text_config(self, *, decoder: bool = False) -> ModelConfig:
        """Return this configuration, which is of text alone, as Transformers' own do."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return self.stated


def _rope_parameters(fields: Mapping[str, Any], has_two: bool) -> dict[str, Any]:
    """Rope by the names of newer files; of each kind of layers in families with two ropes."""
    scaling, stated = fields.get("rope_scaling"), fields.get("rope_parameters") or {}
    if not has_two:
        if any(isinstance(value, Mapping) for value in (scaling or stated).values()):
            raise NotPlanned("it states several ropes")
        return _one_rope(scaling or stated, fields, "rope_theta")
    thetas = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    is_known = not stated.keys() - thetas.keys() and "original_max_position_embeddings" not in fields
    if scaling:  # of layers without a window
        is_known &= not stated and "rope_type" in scaling
        stated = {"full_attention": scaling}
    if not is_known:
        raise NotPlanned("its plan does not know this form of two ropes")
    return {kind: _one_rope(stated.get(kind) or {}, fields, theta) for kind, theta in thetas.items()}


def _one_rope(stated: Mapping[str, Any], fields: Mapping[str, Any], theta: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": stated.get("type", "default"), "rope_theta": fields.get(theta, 10_000.0)}
    if (share := fields.get("partial_rotary_factor")) is not None:
        rope["partial_rotary_factor"] = share
    rope |= stated
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = fields.get("original_max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", original or fields.get("max_position_embeddings"))
        if original:
            rope["original_max_position_embeddings"] = original
    return rope
