"""The table of families, and the plans that follow from what files state."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.models.families.config import ModelConfig
from outrider.models.families.decoders import DECODERS
from outrider.models.families.family import OFF, Family
from outrider.models.families.gemma import GEMMAS
from outrider.models.families.granite import GRANITES
from outrider.models.families.mamba import MAMBAS
from outrider.models.families.mixtures import MIXTURES
from outrider.models.families.recurrent import RECURRENT
from outrider.native.plan import NotPlanned, Plan

FAMILIES: dict[str, Family] = {**DECODERS, **MIXTURES, **GEMMAS, **GRANITES, **MAMBAS, **RECURRENT}
"""By Transformers' model_type."""


def config_of(stated: Mapping[str, Any]) -> ModelConfig:
    """Configuration of the fields of a config.json. Raises NotPlanned."""
    with _planning():
        return ModelConfig(stated, _family_of(stated.get("model_type")))


def plan_of(config: Any) -> Plan:
    """Plan of a configuration, ours or Transformers'. Raises NotPlanned."""
    family, stated = _family_of(config.model_type), config.to_dict()
    for name, value in stated.items():
        if name not in family.known and not _is_off(name, value) and _may_be_read(config, name):
            raise NotPlanned(f"its plan does not know {name}={value!r}")
    with _planning():
        assert family.plan is not None
        return family.plan(config if isinstance(config, ModelConfig) else ModelConfig(stated, family))


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False and name in OFF


def has_plan(config: Any) -> bool:
    try:
        plan_of(config)
    except NotPlanned:
        return False
    return True


def _family_of(model_type: Any) -> Family:
    family = FAMILIES.get(model_type)
    if family is None or family.plan is None:
        raise NotPlanned(f"{model_type} has no plan")
    return family


@contextmanager
def _planning() -> Iterator[None]:
    """Raises NotPlanned: a field is not stated, or is of another kind."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise NotPlanned(f"its configuration makes no plan ({error})") from error


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
