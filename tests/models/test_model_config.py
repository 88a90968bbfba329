"""Plans of what a config.json states are those of Transformers' configuration of the same fields, whatever release
wrote the file and whatever field it leaves out; or there is none. A field that no plan knows means none."""

import copy

import pytest
from transformers import AutoConfig, PretrainedConfig

from families import Fields, configuration
from native_cases import CASES, SIZES
from outrider.models.families.table import FAMILIES, config_of, plan_of
from outrider.native.plan import NotPlanned, Plan

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 160}
_LINEAR = {"rope_type": "linear", "factor": 8.0}
_OF_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor")
_ROPES: list[Fields] = [
    {},
    {"rope_theta": 7e5},
    {"rope_theta": None},
    {"rope_theta": 1e5, "partial_rotary_factor": 0.5},
    {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_theta": 1e5, "rope_scaling": {"type": "default", **_LINEAR}},
    {"rope_theta": 1e5, "rope_scaling": _LLAMA3},
    {"rope_theta": 1e5, "rope_scaling": _LLAMA3, "original_max_position_embeddings": 64},
    {"rope_theta": 1e5, "rope_scaling": {"type": "yarn", **_YARN}},
    {"rope_theta": 1e5, "rope_scaling": {"rope_type": "yarn", "truncate": False, "attention_factor": 1.0, **_YARN}},
    {"rope_theta": 1e5, "rope_scaling": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.5, **_YARN}},
    {"rope_theta": 1e5, "rope_scaling": {"rope_type": "yarn", **_YARN}, "original_max_position_embeddings": 100},
    {"rope_parameters": {"rope_theta": 3e5}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}, "rope_theta": 1e4},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}, "rope_scaling": _LINEAR},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5, "partial_rotary_factor": 0.5}},
    {"rope_parameters": {"full_attention": _LINEAR | {"rope_theta": 1e6}, "sliding_attention": None}},
    {"rope_parameters": {"full_attention": _LINEAR, "sliding_attention": {"rope_theta": 2e4}}, "rope_theta": 7e5},
    {"rope_scaling": {"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default"}}, "rope_theta": 7e5},
    {"rope_theta": 7e5, "rope_local_base_freq": 3e4, "rope_scaling": _LINEAR},
]
# Fields of rows that Transformers' configuration keeps, and nothing reads.
_UNREAD = {"moe_intermediate_size": "olmoe", "decoder_sparse_step": "qwen3_5_moe_text"}


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
    assert plan == plan_of(config), stated
    return True


@pytest.mark.parametrize("family", CASES)
def test_plans_are_those_of_transformers_configurations(family: str) -> None:
    for name, fields in CASES[family].items():
        stated: Fields = configuration(family, SIZES | fields).to_dict()
        stated = {field: value for field, value in stated.items() if _UNREAD.get(field) != family}
        assert _check(stated), name
        for value in (4, False):
            assert not _check(stated | {"unknown_to_plans": value}), name
        for left_out in stated:
            _check({field: value for field, value in stated.items() if field != left_out})
        rest = {field: value for field, value in stated.items() if field not in _OF_ROPE}
        has_plans = [_check(rest | rope) for rope in _ROPES]
        assert has_plans[1] or FAMILIES[family].has_scaled_rope  # of the form of most files


@pytest.mark.parametrize(
    ("family", "fields", "is_planned"),
    [
        ("gemma", {"hidden_act": "gelu"}, True),  # Transformers reads another activation
        ("lfm2", {"tie_embedding": False}, True),
        ("nemotron_h", {"hybrid_override_pattern": "---"}, True),  # without effect
        ("mistral", {"layer_types": None}, False),  # a Ministral
        ("gemma2", {"sliding_window": None}, False),
        ("llama", {"tie_word_embeddings": "false"}, False),
        ("llama", {"num_attention_heads": None}, False),
    ],
)
def test_fields_that_change_others(family: str, fields: Fields, is_planned: bool) -> None:
    assert _check(configuration(family, SIZES | CASES[family]["plain"]).to_dict() | fields) == is_planned
