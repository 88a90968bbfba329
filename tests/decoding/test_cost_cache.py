"""Costs of rounds, as they are kept on disk."""

import json
import math
import os
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from outrider.decoding import cost_cache
from outrider.decoding.cost_cache import kept_costs, round_costs
from outrider.decoding.measured_costs import MeasuredCosts, measure_round_costs
from outrider.decoding.pair_state import PairState
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NoDrafter
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.records import Round, Timing
from outrider.sampling.rules import RULES
from toys import MadeUpTimes, as_lm, measured, request, run, table_pair, tiny_llama

COSTS = {0: 5.2, 1: 6.8, 2: 8.0, 3: 9.4, 4: 10.8, 6: 14.0, 8: 17.0}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "costs"


def _measuring(monkeypatch: pytest.MonkeyPatch, *found: MeasuredCosts) -> None:
    """Measuring finds these, one after the other."""
    left = iter(found)
    monkeypatch.setattr(cost_cache, "measure_round_costs", lambda *_: next(left))


def _costs() -> dict[int, float]:
    target, drafter = table_pair(5)
    return round_costs(target, drafter, RULES["rejection"], 1, 60)


def test_costs_are_measured_once_and_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {k: 2 * seconds for k, seconds in COSTS.items()}
    _measuring(monkeypatch, measured(COSTS), *[measured(other)] * 20)
    assert _costs() == _costs() == COSTS
    (file,) = folder.iterdir()
    whole = json.loads(file.read_text())
    ((one,), unreadable) = kept_costs()
    assert one.measured == measured(COSTS) and one.is_used and not unreadable
    assert (one.of["target"], one.of["draft"], one.of["num_rows"]) == ("target", "draft", 1)
    for damaged in _damaged(whole):
        file.write_text(damaged)
        assert kept_costs() == ([], [file]), damaged[:80]
        assert _costs() == other == _costs()


def _damaged(whole: dict[str, Any]) -> list[str]:
    """Forms in which a file cannot be used."""
    lacking = [{key: value for key, value in whole.items() if key != name} for name in ("spread", "of", "load")]
    without_device = {name: value for name, value in whole["of"].items() if name != "device"}
    changes: list[dict[str, Any]] = [
        {"seconds": dict.fromkeys(COSTS, 0.0)},
        {"num_rounds": dict.fromkeys(COSTS, 10**400)},
        {"num_rounds": dict.fromkeys(COSTS, math.inf)},
        {"spread": dict.fromkeys(COSTS, math.nan)},
        {"load": math.nan},
        {"of": without_device},
        {"of": whole["of"] | {"target": None}},
        {name: {**whole[name], -1: 1} for name in ("seconds", "verify_s", "spread", "num_rounds")},
    ]
    others = [*lacking, *(whole | change for change in changes), {}, []]
    return ["damaged", "[" * 100_000, *map(json.dumps, others)]


@pytest.mark.parametrize(("days", "is_used"), [(2, True), (31, False), (10**7, False)])
def test_a_file_of_the_future(days: int, is_used: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock was wrong, so that nobody knows how old it is. (The last one has no year that Python can write.)"""
    other = {k: 2 * seconds for k, seconds in COSTS.items()}
    _measuring(monkeypatch, measured(COSTS), measured(other))
    assert _costs() == COSTS
    (file,) = folder.iterdir()
    os.utime(file, (time.time() + days * 24 * 3600,) * 2)
    found, unreadable = kept_costs()
    assert len(found) + len(unreadable) == 1 and all(one.is_used == is_used for one in found)
    assert _costs() == (COSTS if is_used else other)


def test_costs_that_cannot_be_are_kept_for_an_hour(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K = 1 at 3.3 plain rounds, and times that scatter too much."""
    busy, scattered = measured({**COSTS, 1: 3.3 * COSTS[0]}), measured(COSTS, spread=0.6)
    assert busy.doubt == "17.2 s for K = 1 contradicts the other K"
    assert scattered.doubt == "the times of 20 rounds of K = 0 scatter by 60%"
    _measuring(monkeypatch, busy, scattered, measured(COSTS))
    for wanted in (busy, scattered):
        assert _costs() == _costs() == wanted.seconds
        (file,) = folder.iterdir()
        os.utime(file, (time.time() - 3700,) * 2)
        assert not kept_costs()[0][0].is_used
    assert _costs() == COSTS
    os.utime(file, (time.time() - 3700,) * 2)
    assert _costs() == COSTS


@pytest.mark.parametrize(("scale", "drafts_pay"), [(2.4, True), (0.35, False)])
def test_a_wrong_file_heals(scale: float, drafts_pay: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file by which drafts never pay, or always, though it is the other way round. In the loop, on a clock that is
    made up, K follows the true costs after 400 tokens."""
    true = COSTS if drafts_pay else {k: 1.0 + 2.2 * k for k in COSTS}
    wrong = {k: scale * seconds if k else seconds for k, seconds in true.items()}
    _measuring(monkeypatch, measured(wrong))
    assert _costs() == wrong
    target, drafter = table_pair(5)
    learned = PairState(target, drafter).estimates(RULES["rejection"], 1, 60)
    assert kept_costs()[0][0].is_used and learned.costs.measured == {1: wrong}
    schedule = MadeUpTimes({1: true}, learned)
    chosen: list[int] = []
    for seed in range(20):
        asked = [request([1], seed=seed, max_new_tokens=60)]
        for output in run(target, drafter, asked, RULES["rejection"], schedule):
            chosen += [row.num_drafted for row in output.rounds for _ in row.token_ids]
    later = [k > 0 for k in chosen[400:]]
    assert sum(later) > 0.8 * len(later) if drafts_pay else sum(later) < 0.1 * len(later)


class _Clocked:
    """The loop, on a machine whose rounds take so long, in turn."""

    def __init__(self, *factors: float) -> None:
        self.factors, self.num_runs = factors, 0
        self.sizes = set[tuple[int, int]]()

    def __call__(self, *_: object, num_draft_tokens: ConstantSchedule, **__: object) -> Iterator[Round]:
        self.sizes.add((num_draft_tokens.k, num_draft_tokens.max_k))
        number, self.num_runs = self.num_runs, self.num_runs + 1
        for index in count():
            factor = self.factors[(number + index) % len(self.factors)]
            yield Round((), Timing(0.0, 0.1, 0.1, factor * COSTS[num_draft_tokens.k]))


def test_times_that_scatter_are_measured_for_longer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a clock that is made up. What goes on is told."""
    target, drafter = table_pair(5)
    now = count(0.0, 0.5)
    monkeypatch.setattr("outrider.decoding.measured_costs.time", SimpleNamespace(perf_counter=lambda: next(now)))
    caplog.set_level("INFO")
    num_rounds = []
    for factors in ((1.0, 1.01), (1.0, 1.6)):
        clocked = _Clocked(*factors)
        monkeypatch.setattr("outrider.decoding.measured_costs.decode", clocked)
        found = measure_round_costs(target, drafter, RULES["rejection"], 1, 60)
        num_rounds.append(found.num_rounds[0])
    assert num_rounds[0] == 4 < num_rounds[1] and found.doubt is not None
    assert clocked.sizes == {(k, 8) for k in (0, 1, 2, 3, 4, 6, 8)}  # as in the run, whose inputs have room for 8
    assert caplog.messages[0] == "measuring rounds of target with draft (1 row, K = 0, 1, 2, 3, 4, 6, 8)"
    assert caplog.messages[1].startswith("measuring rounds: K = ")


def test_costs_of_another_processor_or_of_long_ago_are_measured_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = table_pair(5)
    times = []

    def made_up(*_: object) -> MeasuredCosts:
        times.append(1.0 + len(times))
        return measured(dict.fromkeys(target.execution.favoured_k, times[-1]))

    def cost() -> float:
        return round_costs(target, drafter, RULES["rejection"], 2, 60)[0]

    monkeypatch.setattr(cost_cache, "measure_round_costs", made_up)
    assert cost() == cost() == 1.0
    (file,) = folder.iterdir()
    day = 24 * 3600
    for age, wanted in ((29 * day, 1.0), (31 * day, 2.0), (0, 2.0)):
        if age:
            os.utime(file, (time.time() - age,) * 2)
        assert cost() == wanted
    monkeypatch.setattr(cost_cache, "processor_name", lambda: "Another Processor 9000")
    assert cost() == cost() == 3.0


def test_weights_that_are_kept_as_they_are_stored_have_costs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read in another time."""
    times = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(cost_cache, "measure_round_costs", lambda *_: measured({0: next(times)}))
    target = as_lm(tiny_llama().float())
    layer = target.model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach()
    for wanted, stored in ((1.0, weight), (2.0, NarrowWeight(weight, torch.float32)), (1.0, weight)):
        layer.weight = nn.Parameter(stored, requires_grad=False)
        assert round_costs(target, NoDrafter(), RULES["block"], 1, 60)[0] == wanted
    layer.weight = nn.Parameter(NarrowWeight(weight.bfloat16(), torch.float32), requires_grad=False)
    assert round_costs(target, NoDrafter(), RULES["block"], 1, 60)[0] == 3.0
