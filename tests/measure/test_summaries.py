"""What is said of measurements: by hand, from made-up times."""

import math
from functools import cache

import pytest
from scipy import stats

from outrider.measure.arms import Arm, ArmSummary, Case, Measurement, summarise
from outrider.measure.tables import interval_text
from outrider.records import Interval, Stats, Timing
from pairs import embedded


def measurement(arm: Arm, index: int, prefill_s: float, decode_s: float, num_tokens: int = 10) -> Measurement:
    """Half of the decoding is the draft's, a quarter the verification's."""
    timing = Timing(prefill_s, decode_s / 2, decode_s / 4, prefill_s + decode_s)
    accepted = (0, 0, 5) if arm.draft else (10,)
    drafted = (0, 0, 0, 5) if arm.draft else (10,)
    counts = Stats(num_generated_tokens=num_tokens, acceptance_histogram=accepted, drafted_histogram=drafted)
    return Measurement(arm, Case(index, "prompt", index), counts, timing, "text", (7,) * num_tokens)


@cache
def plain_arm() -> Arm:
    return Arm("plain", embedded())


@cache
def fast_arm() -> Arm:
    return Arm("fast, K = 3", embedded(), "draft", 3)


def two_summaries() -> list[ArmSummary]:
    """Plain takes 1 s and 2 s for ten tokens, fast 0.8 s and 0.4 s; prefills of 0.1 s and 0.2 s."""
    measurements = [
        measurement(plain_arm(), 0, 0.1, 1.0),
        measurement(fast_arm(), 1, 0.2, 0.4),
        measurement(fast_arm(), 0, 0.2, 0.8),
        measurement(plain_arm(), 1, 0.1, 2.0),
    ]
    return summarise(measurements, [plain_arm(), fast_arm()])


def test_a_summary_by_hand() -> None:
    plain, fast = two_summaries()
    assert (plain.arm, fast.arm, plain.num_cases, fast.num_cases) == (plain_arm(), fast_arm(), 2, 2)
    assert plain.ms_per_token == pytest.approx((150.0, 50 * math.sqrt(2)))
    assert fast.ms_per_token == pytest.approx((60.0, 20 * math.sqrt(2)))
    assert plain.total_ms_per_token == pytest.approx((160.0, 50 * math.sqrt(2)))
    assert plain.prefill_ms == pytest.approx((100.0, 0.0))
    assert fast.prefill_ms == pytest.approx((200.0, 0.0))
    assert plain.tokens_per_s == pytest.approx(20 / 3)
    assert fast.tokens_per_s == pytest.approx(20 / 1.2)
    assert fast.stats.mean_acceptance_length == 3.0 and fast.stats.draft_acceptance_rate == pytest.approx(2 / 3)
    assert fast.timing.rest_s == pytest.approx(0.3)
    document = fast.to_json()
    assert document["name"] == "fast, K = 3" and document["draft"] == "draft" and document["k"] == 3
    assert document["ms_per_token"] == {"mean": pytest.approx(60.0), "std": pytest.approx(20 * math.sqrt(2))}
    assert document["speed_up"]["value"] == pytest.approx(2.5) and document["speed_up"]["level"] == 0.95
    times = document["time_s"]
    assert times["total"] == pytest.approx(sum(times[part] for part in ("prefill", "draft", "verify", "rest")))
    assert plain.to_json()["speed_up"] is None


def test_speed_ups_are_paired_by_case() -> None:
    """1.25 and 5: the geometric mean is 2.5, and the logarithms are ln 2 off it. (Paired in another order they would be
    2.5 and 2.5.)"""
    plain, fast = two_summaries()
    assert plain.speed_up is None and plain.total_speed_up is None
    assert fast.speed_up is not None and fast.total_speed_up is not None
    assert fast.speed_up.value == pytest.approx(2.5)
    half = stats.t.ppf(0.975, 1) * math.log(2)
    assert fast.speed_up.low == pytest.approx(2.5 * math.exp(-half))
    assert fast.speed_up.high == pytest.approx(2.5 * math.exp(half))
    assert fast.total_speed_up.value == pytest.approx(math.sqrt(1.1 / 1.0 * 2.1 / 0.6))


def test_cases_that_an_arm_has_not_done_are_left_out() -> None:
    """For all arms, in any order of measurement."""
    measurements = [
        measurement(plain_arm(), 1, 0.1, 2.0),
        measurement(fast_arm(), 1, 0.1, 1.0),
        measurement(fast_arm(), 0, 0.1, 9.0),
    ]
    plain, fast = summarise(measurements, [plain_arm(), fast_arm()])
    assert plain.num_cases == fast.num_cases == 1
    assert fast.ms_per_token == (pytest.approx(100.0), None)
    assert fast.speed_up is not None
    assert (fast.speed_up.value, fast.speed_up.low) == (pytest.approx(2.0), None)


def test_texts_for_people() -> None:
    assert interval_text(None) == "-"
    assert interval_text(Interval(1.308, 1.254, 1.377)) == "1.31 \\[1.25, 1.38]"
    assert interval_text(Interval(1.3, None, None)) == "1.30"
