"""Measuring in turn, and what a measurement holds."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.api import load
from outrider.measure.arms import Arm, Case, interleave, measure, peak_memory_bytes, race, warm_up
from outrider.records import Chunk, RowRound, Timing
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.text.example_prompts import PROMPTS
from pairs import embedded

OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True}
PROMPT = "Once upon a time"


def arms() -> list[Arm]:
    decoder = embedded()
    return [
        Arm("plain", decoder.plain()),
        Arm("K = 2", decoder, "fable-draft", 2),
        Arm("K = 4", decoder, "fable-draft", 4),
    ]


def test_a_measurement_is_what_the_arm_generates() -> None:
    """A measurement has the decoder's text, tokens and counts, and the arm's K."""
    arm, case = arms()[1], Case(3, PROMPT, seed=7)
    (completion,) = embedded().generate(PROMPT, seed=7, num_draft_tokens=2, **OPTIONS)
    measurement = measure(arm, case, OPTIONS)
    assert (measurement.arm, measurement.case) == (arm, case)
    assert (measurement.text, measurement.stats) == (completion.text, completion.stats)
    assert measurement.stats.num_generated_tokens == 6
    timing = measurement.timing
    assert measurement.decode_s_per_token == pytest.approx((timing.total_s - timing.prefill_s) / 6)
    assert measurement.total_s_per_token == pytest.approx(timing.total_s / 6)
    assert len(measurement.stats.drafted_histogram) <= 3


def test_what_on_chunk_does_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that it puts forward by an hour at every chunk, and which is told every chunk, in order."""
    ahead_s, clock = [0.0], time.perf_counter
    monkeypatch.setattr("outrider.decoding.engine.time.perf_counter", lambda: clock() + ahead_s[0])
    seen: list[Chunk] = []

    def on_chunk(arm: Arm, case: Case, chunk: Chunk) -> None:
        ahead_s[0] += 3600
        seen.append(chunk)

    (measurement,) = race(arms()[:1], Case(0, PROMPT, 0), OPTIONS, on_chunk)
    assert ahead_s[0] >= 5 * 3600
    assert measurement.timing.total_s < 3600
    assert "".join(chunk.text for chunk in seen) == measurement.text
    assert sum((chunk.timing for chunk in seen), Timing()) == measurement.timing


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
        assert (measurement.arm, measurement.case) == (arm, case)
        assert (measurement.text, measurement.stats) == (alone.text, alone.stats)
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


def steady_arms(turns: list[str]) -> list[Arm]:
    decoders: list[Any] = [Steady("slow", 3.0, 2, turns), Steady("quick", 1.0, 5, turns)]
    return [Arm(decoder.name, decoder) for decoder in decoders]


def test_the_arm_whose_clock_is_behind_has_the_next_round() -> None:
    turns: list[str] = []
    slow, quick = race(steady_arms(turns), Case(0, PROMPT, 0), OPTIONS)
    assert turns == ["slow", "quick", "quick", "quick", "slow", "quick", "quick"]
    assert (slow.timing.total_s, quick.timing.total_s) == (6.0, 5.0)


def test_a_race_that_is_broken_off_leaves_nothing_open() -> None:
    both: list[Any] = steady_arms([])

    def stop(arm: Arm, *_: Any) -> None:
        if arm.name == "quick":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(both, Case(0, PROMPT, 0), OPTIONS, stop)
    assert [arm.decoder.is_open for arm in both] == [False, False]
    with pytest.raises(KeyboardInterrupt):
        race([*arms(), *both], Case(0, PROMPT, 0), OPTIONS, stop)
    assert not torch.is_inference_mode_enabled()
    assert measure(arms()[1], Case(0, PROMPT, 0), OPTIONS).stats.num_generated_tokens == 6


def test_the_arm_that_goes_first_changes_with_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each arm has every place equally often: none always comes after the one that warms the caches."""
    monkeypatch.setattr("outrider.measure.arms.measure", lambda arm, case, options: (arm.name, case.index))
    names = [arm.name for arm in arms()]
    turns: list[Any] = list(interleave(arms(), [Case(10 + i, PROMPT, i) for i in range(6)], OPTIONS))
    rounds = [turns[i : i + 3] for i in range(0, 18, 3)]
    for index, round_ in enumerate(rounds, start=10):
        assert sorted(round_) == sorted((name, index) for name in names)
    for place, name in itertools.product(range(3), names):
        assert sum(round_[place][0] == name for round_ in rounds) == 2


def test_all_arms_of_a_case_have_its_prompt_and_seed() -> None:
    """Under gumbel the same seed means the same text, which shows that it is the same."""
    decoder = embedded("float64", "gumbel")
    pair = [Arm("plain", decoder.plain()), Arm("speculative", decoder, "fable-draft", 3)]
    cases = [Case(0, PROMPT, 5), Case(1, "8 * 12 = ", 6)]
    texts = [m.text for m in interleave(pair, cases, OPTIONS)]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]


def test_the_warm_up_runs_every_arm_for_a_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, str]] = []

    def record(arm: Arm, case: Case, options: dict[str, Any]) -> None:
        ran.append((arm.name, options["max_new_tokens"], str(case.prompt)))

    monkeypatch.setattr("outrider.measure.arms.measure", record)
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


def test_peak_memory_is_that_of_the_process() -> None:
    """At least as much as was just allocated and filled."""
    block = torch.ones(50, 2**20)
    peak = peak_memory_bytes(torch.device("cpu"))
    assert peak is not None and peak > block.numel() * 4
