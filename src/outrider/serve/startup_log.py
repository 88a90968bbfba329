"""Startup log: memory per slot, and K at each load with the reason."""

from __future__ import annotations

from outrider.decoder import Decoder
from outrider.decoding.schedule import AdaptiveSchedule, Schedule
from outrider.models.generation_config import defaults_text
from outrider.system.available import size_text


def about(decoder: Decoder, schedule: Schedule, num_slots: int, capacity: int) -> list[str]:
    """Lines for the log.

    Args:
        schedule: of the engine.
        capacity: maximum tokens of a sequence, prompt included.
    """
    lms = [decoder.target, *decoder.drafter.models]
    bytes_ = 0
    for lm in lms:
        length = lm.execution.round_length(capacity)
        bytes_ += sum(shape.bytes_per_token * (length + 1) + shape.bytes_per_row for shape in lm.layer_shapes)
    dtype = str(decoder.target.dtype).removeprefix("torch.")
    lines = [
        f"{num_slots} slots of {capacity} tokens: {size_text(bytes_)} each, {size_text(num_slots * bytes_)} in all, "
        f"for {' and '.join(lm.name for lm in lms)}",
        f"drafts by {decoder.drafter.name}, K = {decoder.num_draft_tokens} (at most {schedule.max_k}), acceptance "
        f"{decoder.acceptance}, {dtype}",
    ]
    if decoder.sampling_defaults:
        lines.append(defaults_text(decoder.target.name, decoder.sampling_defaults))
    if isinstance(schedule, AdaptiveSchedule):
        lines += _table(schedule)
    return lines


def _table(schedule: AdaptiveSchedule) -> list[str]:
    choices = schedule.choices()
    ks = sorted(choices[0].seconds)
    lines = [
        f"K by load, from measured times of a round in ms (kept for a month), assuming {choices[0].acceptance:.0%} "
        "acceptance until requests are measured; pays: the acceptance from which on drafts pay",
        " ".join(["rows", *(f"{f'K={k}':>6}" for k in ks), "best K", "  pays"]),
    ]
    for one in choices:
        times = (_three_digits(1e3 * one.seconds[k]) for k in ks)
        pays = "never" if one.least_acceptance is None else f"{one.least_acceptance:.2f}"
        lines.append(
            " ".join([f"{one.num_rows:4}", *(f"{time:>6}" for time in times), f"{one.best_k:6}", f"{pays:>6}"])
        )
    return lines


def _three_digits(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:#.3g}"
