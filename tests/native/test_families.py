"""Every family that the native engine knows gives what one forward of Transformers' modelling code gives, in every
variation of its configuration. And bounds of the numbers of a plan: each is checked before the C++ code reads it."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from families import FILES, configuration
from native_cases import ALL, CASES, CONTEXT, VOCAB, drawn, native_forward, random_model
from outrider.models.families.table import FAMILIES, plan_of
from outrider.native.bounds import check_plan
from outrider.native.engine import NativeForward
from outrider.native.plan import (
    AttentionPlan,
    ExpertsPlan,
    MatrixPlan,
    NotPlanned,
    Plan,
    RecurrencePlan,
    RopePlan,
    parts,
)
from outrider.runtime.cache import SlotCache

TOLERANCE = 2e-5  # of the spread of the numbers
# Norms of tiny outputs magnify rounding: Transformers' float32 is as far from float64.
TOLERANCES = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), 1e-3) | dict.fromkeys(
    ("falcon_h1", "gemma4_text", "lfm2", "nemotron_h"), 4e-5
)
LENGTH = 300  # more than a part of attention (256 places), and than go through the layers together (128 tokens)
LENGTHS = torch.tensor([LENGTH, LENGTH - 10, 5])  # of the prompts
NUM_MORE = 6  # tokens of the round that follows


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def oracle(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits, and inputs of the layers, the last norm's the last."""
    last: list[Tensor] = []
    norm = model.get_submodule(plan_of(model.config).final_norm.weight.removesuffix(".weight"))
    hook = norm.register_forward_pre_hook(lambda _, given: last.append(given[0]))
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    hook.remove()
    return output.logits, [*output.hidden_states[:-1], *last]


@torch.inference_mode()
def largest_error(model: PreTrainedModel, change: Callable[[Plan], Plan] = lambda plan: plan) -> float:
    """Of logits and hidden states of prompts, and of the logits of a round whose rows are at their own positions."""
    native, ids = NativeForward(model, change(plan_of(model.config))), drawn(3, LENGTH + NUM_MORE)
    places = torch.arange(LENGTH).expand(3, LENGTH)
    places = torch.where(places < LENGTHS[:, None], places, -1)  # ragged rows, with padding at their ends
    num_layers, is_there = len(native.layer_shapes), places >= 0
    layers = (0, num_layers // 2, num_layers)
    want, states = oracle(model, ids)
    cache = SlotCache.empty(native.layer_shapes, 3, CONTEXT)
    got = native(ids[:, :LENGTH], places, cache, LENGTH, features=layers, keeps_finite=True)
    assert got.broken is None and not got.logits[~is_there].any()
    assert not any(found[~is_there].any() for found in got.features)
    errors = [error(got.logits[is_there], want[:, :LENGTH][is_there])]
    for layer, found in zip(layers, got.features, strict=True):
        errors.append(error(found[is_there], states[layer][:, :LENGTH][is_there]))
    places = LENGTHS[:, None] + torch.arange(NUM_MORE)
    wanted = want.gather(1, places[..., None].expand(-1, -1, VOCAB))
    ids = ids.gather(1, places)
    places = torch.where((places >= LENGTH + 2) & (LENGTHS == LENGTH)[:, None], -1, places)  # padding in the first row
    for num_logits in (2, places.shape[1]):  # and again, over what is there
        logits = native(ids, places, cache, CONTEXT, num_logits=num_logits, keeps_finite=True).logits
        is_there = places[:, -num_logits:] >= 0
        assert not logits[~is_there].any()
        errors.append(error(logits[is_there], wanted[:, -num_logits:][is_there]))
    return max(errors)


@pytest.mark.parametrize(("family", "name"), ALL)
def test_native_logits_equal_transformers(family: str, name: str) -> None:
    assert largest_error(random_model(family, CASES[family][name])) <= TOLERANCES.get(family, TOLERANCE)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: _changed(plan, AttentionPlan, window=7),
        lambda plan: _changed(plan, RopePlan, frequencies=tuple(1.001 * one for one in plan.ropes[0].frequencies)),
        lambda plan: replace(plan, final_norm=replace(plan.final_norm, epsilon=1e-3)),
        lambda plan: replace(plan, logit_softcap=plan.logit_softcap * 1.01),
    ],
)
def test_wrong_plan_changes_native_logits(change: Callable[[Plan], Plan]) -> None:
    assert largest_error(random_model("gemma2", CASES["gemma2"]["low caps"]), change) > 10 * TOLERANCE


_FALCON = CASES["falcon_h1"]["no norm"]
_GROUPS = CASES["glm4_moe"]["groups"]
_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("llama", {"attention_chunk_size": 4}, "its plan does not know attention_chunk_size=4"),
        ("llama", {"hidden_act": "tanh"}, "there is no activation tanh"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, "its plan does not know attn_logit_softcapping=2.0"),
        ("gemma4_text", {"use_bidirectional_attention": "all", "global_head_dim": 8}, "is_causal=False"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "does not know layers of chunked_attention"),
        ("llama", _DYNAMIC, "its rope depends on the length of the text"),
        ("phi3", FILES["phi3, longrope"].fields | {"head_dim": 8}, "its rope depends on the length of the text"),
        ("falcon_h1", _FALCON | {"mamba_rms_norm": True}, "does not know mamba_norm_before_gate=True"),
        ("falcon_h1", _FALCON | {"time_step_limit": (0.0, 2.0)}, "does not know time_step_limit"),
        ("falcon_h1", _FALCON | {"key_multiplier": None}, "its configuration makes no plan .*NoneType"),
        ("glm4_moe", _GROUPS | {"n_group": 0}, "its plan has num_groups = 0"),
        ("glm4_moe", _GROUPS | {"n_group": 3}, "8 experts in 3 groups"),
        ("glm4_moe", _GROUPS | {"num_experts_per_tok": 5}, "5 experts of a token, of 4"),
        ("gpt_neox", {}, "gpt_neox has no plan"),
    ],
)
def test_configuration_without_a_plan_is_refused(family: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotPlanned, match=reason):
        plan = plan_of(configuration(family, fields))
        check_plan(plan)


_FAMILIES = {
    "gpt2": "plain",
    "ministral3": "a window",
    "falcon_h1": "plain",
    "gemma4_text": "of published files",
    "glm4_moe": "groups",
    "gpt_oss": "plain",
    "lfm2": "plain",
    "nemotron_h": "wide latent experts in groups",
    "qwen3_5_text": "plain",
}


@cache
def _plan(family: str) -> Plan:
    return plan_of(random_model(family, CASES[family][_FAMILIES[family]]).config)


def _changed(value: Any, kind: type, **changes: Any) -> Any:
    is_done = False

    def change(one: Any) -> Any:
        nonlocal is_done
        if isinstance(one, kind) and not is_done:
            is_done = True
            return replace(one, **changes)
        if isinstance(one, tuple):
            return tuple(map(change, one))
        if is_dataclass(one) and not isinstance(one, type):
            return replace(one, **{field.name: change(getattr(one, field.name)) for field in fields(one)})
        return one

    changed = change(value)
    assert is_done
    return changed


@pytest.mark.parametrize("family", _FAMILIES)
def test_plan_refuses_numbers_beyond_bounds(family: str) -> None:
    plan = _plan(family)
    check_plan(plan)
    assert CASES.keys() == {name for name, family in FAMILIES.items() if family.plan}
    for kind in {type(part) for part in parts(plan)}:
        for one in fields(kind):
            least = {"Count": 1, "Number": 0}.get(str(one.type).split()[0])
            if least is None and "float" not in str(one.type):
                continue
            wrong = (math.nan, math.inf, 1j, -1j) if least is None else (least - 1, 2**31 + 1, 1.5, math.nan, 2j)
            for number in wrong:
                changed = (number,) if str(one.type).startswith("tuple") else number
                with pytest.raises(NotPlanned, match=f"its plan has {one.name} = "):
                    check_plan(_changed(plan, kind, **{one.name: changed}))


@pytest.mark.parametrize("factors", [((-1, 1.0),), ((1.0, 1.0),), ((1, 1.0), (2**40, 1.0)), ((1, math.nan),)])
def test_output_scales_of_matrices_are_checked(factors: tuple[Any, ...]) -> None:
    plan = _plan("falcon_h1")
    check_plan(_changed(plan, MatrixPlan, output_scales=((0, -0.5), (3, 2.0))))
    with pytest.raises(NotPlanned, match="its plan has output_scales = "):
        check_plan(_changed(plan, MatrixPlan, output_scales=factors))


_CONTRADICTIONS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, num_heads=3), "3 heads on 2 KV heads"),
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, rope=9), "no rope 9 for layer 0"),
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, source=0), "no keys of layer 0 for layer 0"),
    ("gemma4_text", lambda plan: replace(plan, per_layer=None), "a per-layer gate in layer 0 alone"),
    (
        "gemma4_text",
        lambda plan: _changed(plan, ExpertsPlan, limit=1.0, ups=plan.layers[0].mlp.ups[:1]),
        "have no gate",
    ),
    ("gemma4_text", lambda plan: replace(plan, layers=()), "no layers"),
    ("gpt2", lambda plan: replace(plan, num_positions=0), "embeddings of no positions"),
    ("lfm2", lambda plan: _changed(plan, RecurrencePlan, kernel_size=9), "a convolution of 9 tokens"),
    ("qwen3_5_text", lambda plan: _changed(plan, RecurrencePlan, value_width=0), "heads of the sizes"),
    ("qwen3_5_text", lambda plan: _changed(plan, RecurrencePlan, num_groups=4), "6 heads in 4 groups"),
    ("glm4_moe", lambda plan: _changed(plan, ExpertsPlan, ups=()), "0 matrices before an activation"),
]


@pytest.mark.parametrize(("family", "change", "reason"), _CONTRADICTIONS)
def test_plan_refuses_contradictory_numbers(family: str, change: Callable[[Plan], Plan], reason: str) -> None:
    with pytest.raises(NotPlanned, match=reason):
        check_plan(change(_plan(family)))


def test_plan_refuses_weights_of_other_sizes() -> None:
    """A head has a plan of its own, and no probe."""
    model = random_model("gemma4_text", CASES["gemma4_text"]["of published files"])
    with pytest.raises(NotPlanned, match="num_active = 0"):
        NativeForward(model, _changed(_plan("gemma4_text"), ExpertsPlan, num_active=0))
    side = model.model.layers[0]
    side.per_layer_input_gate.weight.data = side.per_layer_input_gate.weight.data[:20]
    side.per_layer_projection.weight.data = side.per_layer_projection.weight.data[:, :20].contiguous()
    with pytest.raises(NotPlanned, match="per_layer_projection.weight has the size 20, not 28"):
        native_forward(model)
