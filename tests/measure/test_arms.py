"""Arms are measured in turn, and summarised case by case."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats

from outrider.api import load
from outrider.measure.arms import (
    Arm,
    Case,
    Measurement,
    interleave,
    measure,
    peak_memory_bytes,
    race,
    summarise,
    warm_up,
)
from outrider.records import Chunk, RowRound, Stats, Timing
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.text.example_prompts import PROMPTS
from pairs import embedded

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
PROMPT = "Once upon a time"


def arms() -> list[Arm]:
    decoder = embedded()
    return [Arm("plain", decoder.plain()), *(Arm(f"K = {k}", decoder, "fable-draft", k) for k in (2, 4))]


def test_a_measurement_is_what_the_arm_generates_and_on_chunk_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that ``on_chunk`` puts forward by an hour at every chunk, and which is told every chunk, in order."""
    arm, case = arms()[1], Case(3, PROMPT, seed=7)
    (completion,) = embedded().generate(PROMPT, seed=7, num_draft_tokens=2, **OPTIONS)
    ahead_s, clock = [0.0], time.perf_counter
    monkeypatch.setattr("outrider.decoding.engine.time.perf_counter", lambda: clock() + ahead_s[0])
    seen: list[Chunk] = []

    def on_chunk(arm: Arm, case: Case, chunk: Chunk) -> None:
        ahead_s[0] += 3600
        seen.append(chunk)

    (one,) = race([arm], case, OPTIONS, on_chunk)
    assert (one.arm, one.case, one.text, one.stats) == (arm, case, completion.text, completion.stats)
    assert one.decode_s_per_token == pytest.approx((one.timing.total_s - one.timing.prefill_s) / 6)
    assert one.total_s_per_token == pytest.approx(one.timing.total_s / 6)
    assert ahead_s[0] >= 2 * 3600 > 3600 > one.timing.total_s
    assert "".join(chunk.text for chunk in seen) == one.text
    assert sum((chunk.timing for chunk in seen), Timing()) == one.timing


def test_racers_write_what_they_would_write_alone() -> None:
    """All of it, each with its own clock; every chunk is told, of an arm that no other was behind."""
    all_arms, case, ended = arms(), Case(3, PROMPT, seed=7), set()
    told = dict.fromkeys((arm.name for arm in all_arms), Timing())

    def on_chunk(arm: Arm, case: Case, chunk: Chunk) -> None:
        assert told[arm.name].total_s == min(timing.total_s for name, timing in told.items() if name not in ended)
        told[arm.name] += chunk.timing
        if chunk.finish_reason is not None:
            ended.add(arm.name)

    for arm, measurement in zip(all_arms, race(all_arms, case, OPTIONS, on_chunk), strict=True):
        alone = measure(arm, case, OPTIONS)
        assert (measurement.arm, measurement.text, measurement.stats) == (arm, alone.text, alone.stats)
        assert measurement.timing == told[arm.name]


class Steady:
    """Stands in for a decoder: rounds of one token that all take the same time. It notes its name at each."""

    def __init__(self, name: str, round_s: float, num_rounds: int, turns: list[str]) -> None:
        self.name, self.round_s, self.num_rounds, self.turns = name, round_s, num_rounds, turns
        self.target = embedded().target
        self.is_open = False

    def stream(self, *_: Any, **__: Any) -> Iterator[Chunk]:
        self.is_open = True
        row = RowRound(0, (5,), ("bonus",), 0, 0, False, None, None)
        try:
            for _round in range(self.num_rounds):
                self.turns.append(self.name)
                yield Chunk.of(row, (), Timing(total_s=self.round_s), seed=0, row=0)
        finally:
            self.is_open = False


def test_the_arm_whose_clock_is_behind_has_the_next_round_and_a_broken_race_leaves_nothing_open() -> None:
    turns: list[str] = []
    decoders: list[Any] = [Steady("slow", 3.0, 2, turns), Steady("quick", 1.0, 5, turns)]
    both = [Arm(decoder.name, decoder) for decoder in decoders]
    slow, quick = race(both, Case(0, PROMPT, 0), OPTIONS)
    assert turns == ["slow", "quick", "quick", "quick", "slow", "quick", "quick"]
    assert (slow.timing.total_s, quick.timing.total_s) == (6.0, 5.0)

    def stop(arm: Arm, *_: Any) -> None:
        if arm.name == "quick":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race([*arms(), *both], Case(0, PROMPT, 0), OPTIONS, stop)
    assert [decoder.is_open for decoder in decoders] == [False, False]
    assert not torch.is_inference_mode_enabled()
    assert measure(arms()[1], Case(0, PROMPT, 0), OPTIONS).stats.num_generated_tokens == 6


def test_the_arm_that_goes_first_changes_with_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each arm has every place equally often; and all arms of a case have its prompt and seed, which show in
    equal texts under gumbel."""
    decoder = embedded("float64", "gumbel")
    pair = [Arm("plain", decoder.plain()), Arm("speculative", decoder, "fable-draft", 3)]
    cases = [Case(0, PROMPT, 5), Case(1, "8 * 12 = ", 6)]
    texts = [m.text for m in interleave(pair, cases, OPTIONS)]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    monkeypatch.setattr("outrider.measure.arms.measure", lambda arm, case, options: (arm.name, case.index))
    names = [arm.name for arm in arms()]
    turns: list[Any] = list(interleave(arms(), [Case(10 + i, PROMPT, i) for i in range(6)], OPTIONS))
    rounds = [turns[i : i + 3] for i in range(0, 18, 3)]
    for index, round_ in enumerate(rounds, start=10):
        assert sorted(round_) == sorted((name, index) for name in names)
    for place, name in itertools.product(range(3), names):
        assert sum(round_[place][0] == name for round_ in rounds) == 2


def test_the_warm_up_runs_every_arm_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, str]] = []
    monkeypatch.setattr(
        "outrider.measure.arms.measure",
        lambda arm, case, options: ran.append((arm.name, options["max_new_tokens"], str(case.prompt))),
    )
    cases = [Case(index, prompt, 0) for index, prompt in enumerate(PROMPTS)]
    warm_up(arms(), cases, OPTIONS | {"max_new_tokens": 64})
    warm_up(arms()[:1], cases, OPTIONS | {"max_new_tokens": 3})
    first = PROMPTS[0]
    assert ran == [("plain", 8, first), ("K = 2", 8, first), ("K = 4", 8, first), ("plain", 3, first)]


@pytest.mark.slow  # CUDA graphs are only made up here
def test_the_warm_up_prepares_all_that_the_cases_need() -> None:
    """Prompts of 3, 89, 110 and 200 tokens: 128 or 256 places in the cache, 128 of them in view, or all; that of 89
    ends where the greater view would begin. (The plain arm prepares for rounds without drafts, that end texts.)"""
    decoder = load("fable", "fable-draft", device="cpu", dtype="float32")
    assert decoder.drafter.lm is not None
    executions = decoder.target.execution, decoder.drafter.lm.execution = CapturedExecution(), CapturedExecution()
    prompts = [decoder.encode(" ".join(PROMPTS) * 2)[:length] for length in (200, 110, 3, 89)]
    cases = [Case(index, ids, index) for index, ids in enumerate(prompts)]
    options = OPTIONS | {"max_new_tokens": 40, "temperature": 0.0}
    both = [Arm("plain", decoder.plain()), Arm("K = 2", decoder, "fable-draft", 2)]
    warm_up(both, cases, options)
    before = [execution.num_programs for execution in executions]
    list(interleave(both, cases, options))
    assert [execution.num_programs for execution in executions] == before


def test_peak_memory_is_at_least_what_was_just_filled() -> None:
    block = torch.ones(50, 2**20)
    peak = peak_memory_bytes(torch.device("cpu"))
    assert peak is not None and peak > block.numel() * 4


def _measurement(arm: Arm, index: int, prefill_s: float, decode_s: float) -> Measurement:
    """Ten tokens. Half of the decoding is the draft's, a quarter the verification's."""
    timing = Timing(prefill_s, decode_s / 2, decode_s / 4, prefill_s + decode_s)
    accepted, drafted = ((0, 0, 5), (0, 0, 0, 5)) if arm.draft else ((10,), (10,))
    counts = Stats(num_generated_tokens=10, acceptance_histogram=accepted, drafted_histogram=drafted)
    return Measurement(arm, Case(index, "prompt", index), counts, timing, "text", (7,) * 10)


def test_summaries_are_paired_by_case() -> None:
    """Plain takes 1 s and 2 s for ten tokens, fast 0.8 s and 0.4 s; prefills of 0.1 s and 0.2 s. The speed-ups 1.25 and
    5 have the geometric mean 2.5, and their logarithms are ln 2 off it. A case that an arm has not done is left out."""
    both = plain_arm, fast_arm = Arm("plain", embedded()), Arm("fast, K = 3", embedded(), "draft", 3)
    measurements = [
        _measurement(plain_arm, 0, 0.1, 1.0),
        _measurement(fast_arm, 1, 0.2, 0.4),
        _measurement(fast_arm, 2, 0.2, 9.0),
        _measurement(fast_arm, 0, 0.2, 0.8),
        _measurement(plain_arm, 1, 0.1, 2.0),
    ]
    plain, fast = summarise(measurements, both)
    assert (plain.arm, fast.arm, plain.num_cases, fast.num_cases) == (plain_arm, fast_arm, 2, 2)
    assert plain.ms_per_token == pytest.approx((150.0, 50 * math.sqrt(2)))
    assert fast.total_ms_per_token == pytest.approx((80.0, 20 * math.sqrt(2)))
    assert fast.prefill_ms == pytest.approx((200.0, 0.0)) and fast.tokens_per_s == pytest.approx(20 / 1.2)
    assert plain.speed_up is None and fast.speed_up is not None and fast.total_speed_up is not None
    half = stats.t.ppf(0.975, 1) * math.log(2)
    speed_up = fast.speed_up
    wanted = 2.5, 2.5 * math.exp(-half), 2.5 * math.exp(half)
    assert (speed_up.value, speed_up.low, speed_up.high) == pytest.approx(wanted)
    assert fast.total_speed_up.value == pytest.approx(math.sqrt(1.1 / 1.0 * 2.1 / 0.6))
    document = fast.to_json()
    assert (document["name"], document["draft"], document["k"]) == ("fast, K = 3", "draft", 3)
    assert document["ms_per_token"] == {"mean": pytest.approx(60.0), "std": pytest.approx(20 * math.sqrt(2))}
    assert document["speed_up"]["level"] == 0.95 and document["stats"]["mean_acceptance_length"] == 3.0
    assert document["time_s"]["rest"] == pytest.approx(0.3) and plain.to_json()["speed_up"] is None
    alone = summarise(measurements[:1] + measurements[3:4], both)[1]
    assert alone.ms_per_token == (pytest.approx(80.0), None) and alone.speed_up.low is None
    assert summarise(measurements[:2], both) == []
