"""Bounds of the numbers of a plan: each is checked before the C++ code reads it."""

import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest

from native_cases import CASES, random_model
from outrider.native import plan as plans
from outrider.native.bounds import check_plan
from outrider.native.engine import NativeForward
from outrider.native.families import plan_of
from outrider.native.plan import AttentionPlan, ExpertsPlan, MatrixPlan, NotPlanned, Plan, RecurrencePlan, parts

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
    """A plan whose first part of a kind has other numbers."""
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


def test_each_whole_number_has_bounds() -> None:
    """A field that is declared as int has none."""
    kinds = [one for one in vars(plans).values() if is_dataclass(one)]
    assert len(kinds) == 11
    assert not [one.name for kind in kinds for one in fields(kind) if re.search(r"\bint\b", str(one.type))]


@pytest.mark.parametrize("family", _FAMILIES)
def test_numbers_beyond_bounds(family: str) -> None:
    plan = _plan(family)
    check_plan(plan)
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
def test_rows_and_their_factors(factors: tuple[Any, ...]) -> None:
    """The rows of a factor were not looked at."""
    plan = _plan("falcon_h1")
    check_plan(_changed(plan, MatrixPlan, factors=((0, -0.5), (3, 2.0))))
    with pytest.raises(NotPlanned, match="its plan has factors = "):
        check_plan(_changed(plan, MatrixPlan, factors=factors))


_CONTRADICTIONS: list[tuple[str, Callable[[Plan], Plan], str]] = [
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, num_heads=3), "3 heads in 2 groups"),
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, rope=9), "no rope 9 for layer 0"),
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, source=0), "no keys of layer 0 for layer 0"),
    ("gemma4_text", lambda plan: _changed(plan, AttentionPlan, source=2), "no keys of layer 2 for layer 0"),
    ("gemma4_text", lambda plan: replace(plan, sides=None), "a gate of sides in layer 0, and no sides"),
    (
        "gemma4_text",
        lambda plan: _changed(plan, ExpertsPlan, limit=1.0, ups=plan.layers[0].mlp.ups[:1]),
        "have no gate",
    ),
    ("gemma4_text", lambda plan: replace(plan, layers=()), "no layers"),
    ("gpt2", lambda plan: replace(plan, num_places=0), "embeddings of no positions"),
    ("lfm2", lambda plan: _changed(plan, RecurrencePlan, num_heads=1), "heads of the sizes"),
    ("lfm2", lambda plan: _changed(plan, RecurrencePlan, num_taps=9), "9 taps"),
    ("qwen3_5_text", lambda plan: _changed(plan, RecurrencePlan, value_width=0), "heads of the sizes"),
    ("qwen3_5_text", lambda plan: _changed(plan, RecurrencePlan, num_groups=4), "6 heads in 4 groups"),
    ("glm4_moe", lambda plan: _changed(plan, ExpertsPlan, ups=()), "0 matrices before an activation"),
]


@pytest.mark.parametrize(("family", "change", "reason"), _CONTRADICTIONS)
def test_numbers_that_are_impossible_together(family: str, change: Callable[[Plan], Plan], reason: str) -> None:
    with pytest.raises(NotPlanned, match=reason):
        check_plan(change(_plan(family)))


def test_experts_of_a_token() -> None:
    """Before, the process was ended in its first forward. A head has a plan of its own, and no probe."""
    model = random_model("gemma4_text", CASES["gemma4_text"]["of published files"])
    for number in (0, -1):
        plan = _changed(_plan("gemma4_text"), ExpertsPlan, num_chosen=number)
        model.config.top_k_experts = number
        for own in (None, plan):
            with pytest.raises(NotPlanned, match=f"num_chosen = {number}"):
                NativeForward(model, own)


def test_sides_of_another_width() -> None:
    model = random_model("gemma4_text", CASES["gemma4_text"]["of published files"])
    side = model.model.layers[0]
    side.per_layer_input_gate.weight.data = side.per_layer_input_gate.weight.data[:20]
    side.per_layer_projection.weight.data = side.per_layer_projection.weight.data[:, :20].contiguous()
    with pytest.raises(NotPlanned, match="per_layer_projection.weight has the size 20, not 28"):
        NativeForward(model)
