"""Arms are measured in turn, and summarised case by case."""

import itertools
import math
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from scipy import stats

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

    assert (peak_memory_bytes(torch.device("cpu")) or 0) > 2**24
    (one,) = race([arm], case, OPTIONS, on_chunk)
    assert (one.arm, one.case, one.text, one.stats) == (arm, case, completion.text, completion.stats)
    assert ahead_s[0] >= 2 * 3600 > 3600 > one.timing.total_s
    assert "".join(chunk.text for chunk in seen) == one.text
    assert sum((chunk.timing for chunk in seen), Timing()) == one.timing


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
    """Each arm has every place equally often; all arms of a case have its prompt and seed. The warm-up is short."""
    decoder = embedded("float64", "gumbel")
    pair = [Arm("plain", decoder.plain()), Arm("speculative", decoder, "fable-draft", 3)]
    cases = [Case(0, PROMPT, 5), Case(1, "8 * 12 = ", 6)]
    texts = [m.text for m in interleave(pair, cases, OPTIONS)]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    ran: list[Any] = []
    monkeypatch.setattr(
        "outrider.measure.arms.measure",
        lambda arm, case, options: ran.append((arm.name, options)) or (arm.name, case.index),
    )
    warm_up(pair, cases, OPTIONS | {"max_new_tokens": 64})
    assert ran == [(arm.name, OPTIONS | {"max_new_tokens": 8}) for arm in pair]
    names = [arm.name for arm in arms()]
    turns: list[Any] = list(interleave(arms(), [Case(10 + i, PROMPT, i) for i in range(6)], OPTIONS))
    rounds = [turns[i : i + 3] for i in range(0, 18, 3)]
    for index, round_ in enumerate(rounds, start=10):
        assert sorted(round_) == sorted((name, index) for name in names)
    for place, name in itertools.product(range(3), names):
        assert sum(round_[place][0] == name for round_ in rounds) == 2


def _measurement(arm: Arm, index: int, prefill_s: float, decode_s: float) -> Measurement:
    timing = Timing(prefill_s, decode_s / 2, decode_s / 4, prefill_s + decode_s)
    counts = Stats(10, *(((0, 0, 5), (0, 0, 0, 5)) if arm.draft else ((10,), (10,))))
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
    assert (document["name"], document["k"], document["stats"]["mean_acceptance_length"]) == ("fast, K = 3", 3, 3.0)
    assert summarise(measurements[:2], both) == []
