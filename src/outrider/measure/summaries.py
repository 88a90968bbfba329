"""Summaries of measurements, one for each arm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.measure.arms import Arm, Measurement
from outrider.measure.intervals import Interval, mean_std, paired_ratio
from outrider.records import Stats, Timing
from outrider.system.provenance import sha256_of


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Summary of an arm over all cases.

    Attributes:
        ms_per_token: of decoding, mean and standard deviation over the cases.
        total_ms_per_token: including the prefill.
        prefill_ms: of one prompt.
        speed_up: of decoding, over the baseline arm on the same cases; None for the baseline itself.
        total_speed_up: including the prefill.
        texts: token ids of the output of each case.
    """

    arm: Arm
    num_cases: int
    ms_per_token: tuple[float, float | None]
    total_ms_per_token: tuple[float, float | None]
    prefill_ms: tuple[float, float | None]
    tokens_per_s: float
    speed_up: Interval | None
    total_speed_up: Interval | None
    stats: Stats
    timing: Timing
    texts: Sequence[tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.arm.name,
            "draft": self.arm.draft,
            "k": self.arm.num_draft_tokens,
            "num_cases": self.num_cases,
            "ms_per_token": {"mean": self.ms_per_token[0], "std": self.ms_per_token[1]},
            "total_ms_per_token": {"mean": self.total_ms_per_token[0], "std": self.total_ms_per_token[1]},
            "prefill_ms": {"mean": self.prefill_ms[0], "std": self.prefill_ms[1]},
            "tokens_per_s": self.tokens_per_s,
            "speed_up": self.speed_up.to_json() if self.speed_up else None,
            "total_speed_up": self.total_speed_up.to_json() if self.total_speed_up else None,
            "stats": self.stats.to_json(),
            "time_s": self.timing.to_json(),
            "texts_sha256": sha256_of(self.texts),
        }


def summarise(measurements: Sequence[Measurement], arms: Sequence[Arm]) -> list[ArmSummary]:
    """Summarise each arm; the first is the baseline of the others.

    Only cases that all arms have completed count (the measurement may have been interrupted); without any the result is
    empty.
    """
    groups = [[m for m in measurements if m.arm == arm] for arm in arms]
    done = set.intersection(*({m.case.index for m in group} for group in groups))
    groups = [sorted((m for m in group if m.case.index in done), key=lambda m: m.case.index) for group in groups]
    if not done:
        return []
    return [_summary(group, groups[0], is_baseline=place == 0) for place, group in enumerate(groups)]


def _summary(group: Sequence[Measurement], base: Sequence[Measurement], *, is_baseline: bool) -> ArmSummary:
    timing = sum((m.timing for m in group), Timing())
    stats = sum((m.stats for m in group), Stats())

    def ratio(times: list[float], base_times: list[float]) -> Interval | None:
        return None if is_baseline else paired_ratio(base_times, times)

    return ArmSummary(
        arm=group[0].arm,
        num_cases=len(group),
        ms_per_token=mean_std([1e3 * m.decode_s_per_token for m in group]),
        total_ms_per_token=mean_std([1e3 * m.total_s_per_token for m in group]),
        prefill_ms=mean_std([1e3 * m.timing.prefill_s for m in group]),
        tokens_per_s=stats.num_generated_tokens / timing.decode_s,
        speed_up=ratio([m.decode_s_per_token for m in group], [m.decode_s_per_token for m in base]),
        total_speed_up=ratio([m.total_s_per_token for m in group], [m.total_s_per_token for m in base]),
        stats=stats,
        timing=timing,
        texts=[m.token_ids for m in group],
    )


def interval_text(interval: Interval | None, digits: int = 2) -> str:
    """Format like 1.31 [1.25, 1.38], with the bracket escaped for rich."""
    if interval is None:
        return "-"
    ends = "" if interval.low is None else f" \\[{interval.low:.{digits}f}, {interval.high:.{digits}f}]"
    return f"{interval.value:.{digits}f}{ends}"
