"""Plans of what a config.json states are those of Transformers' configuration of the same fields, whatever release
wrote the file and whatever field it leaves out; or there is none. A field that no plan knows means none."""

import copy

import pytest
from transformers import AutoConfig, PretrainedConfig

from families import Fields, configuration
from native_cases import CASES, SIZES
from outrider.models.families.table import FAMILIES, config_of, plan_of
from outrider.native.plan import NotPlanned, Plan

# Fields of rows that Transformers' configuration keeps, and nothing reads.
_UNREAD = {"moe_intermediate_size": "olmoe", "decoder_sparse_step": "qwen3_5_moe_text"}


def _of_older_release(stated: Fields) -> Fields:
    """The same fields, with rope as older releases write them."""
    older = copy.deepcopy(stated)
    rope = older.pop("rope_parameters", None) or {}
    if "full_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    older |= {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope.get("rope_type", "default") != "default":
        older["rope_scaling"] = rope | {"type": rope["rope_type"]}
    return older


def _check(stated: Fields) -> bool:
    """Whether there is a plan, which must be that of Transformers' configuration, unless this refuses the fields."""
    try:
        plan: Plan = plan_of(config_of(stated))
    except NotPlanned:
        return False
    try:
        config: PretrainedConfig = AutoConfig.for_model(**copy.deepcopy(stated))
    except Exception:
        return True
    assert plan == plan_of(config)
    return True


@pytest.mark.parametrize("family", CASES)
def test_plans_are_those_of_transformers_configurations(family: str) -> None:
    for name, fields in CASES[family].items():
        stated: Fields = configuration(family, SIZES | fields).to_dict()
        stated = {field: value for field, value in stated.items() if _UNREAD.get(field) != family}
        assert _check(stated), name
        assert not _check(stated | {"unknown_to_plans": 4}), name
        older = _of_older_release(stated)
        # Transformers reads one of the two ropes alone in older files of OLMo 3.
        for form in (stated,) if family == "olmo3" else (stated, older):
            for left_out in form:
                _check({field: value for field, value in form.items() if field != left_out})
            assert _check(form) or FAMILIES[family].has_scaled_rope, name
