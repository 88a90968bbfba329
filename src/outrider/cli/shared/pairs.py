"""Runs the pairs of a plan, to check its predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.output import print_table, progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.bench.report import ArmSummary
    from outrider.bench.run import Measurement
    from outrider.decoder import Decoder
    from outrider.drafters.base import Drafter
    from outrider.replay.log import Record
    from outrider.replay.plan import Costs, PairChoice

_MEASURED_K = (1, 2, 4, 8)


def run_pairs(
    decoder: Decoder,
    drafters: Mapping[str, Drafter],
    found: Sequence[PairChoice],
    records: Sequence[Record],
    options: dict[str, Any],
    seed: int,
    time_rounds: Callable[[Sequence[int], Callable[[], None], int], Costs],
) -> tuple[list[ArmSummary], Costs | None]:
    """Run pairs at some K and the best one, arms in turn, on the same prompts with seeds other than the prediction's.
    Round costs are measured again between the prompts, since a machine's speed drifts within minutes, and differently
    for different kinds of work.

    Args:
        time_rounds: measures costs; takes the K, a function to call before each pass, and the number of passes.

    Returns:
        Measurements, and the costs from the same minutes; None if interrupted.
    """
    from outrider.bench.report import summarise
    from outrider.bench.run import Arm, Case, arms_by_k, interleave, warm_up

    arms = [Arm("plain", decoder)]
    for name, drafter in drafters.items():
        ks = sorted(one.k for one in found if one.draft == name and (one.k in _MEASURED_K or one is found[0]))
        arms += arms_by_k(replace(decoder, drafter=drafter), name, ks)
    cases = [Case(index, one.prompt_ids, seed + len(records) + index) for index, one in enumerate(records)]
    warm_up(arms, cases, options)
    measurements = interleave(arms, cases, options)
    done: list[Measurement] = []
    costs = None
    with progress_bar("measurements", len(arms) * len(cases)) as advance:

        def next_case() -> None:
            for measurement in islice(measurements, len(arms)):
                done.append(measurement)
                advance(1)

        try:
            all_ks = sorted({arm.num_draft_tokens for arm in arms if isinstance(arm.num_draft_tokens, int)})
            costs = time_rounds(all_ks, next_case, max(1, len(cases) - 1))
        except KeyboardInterrupt:
            pass
    return summarise(done, arms), costs


def compare(console: Console, found: Sequence[PairChoice], measured: Sequence[ArmSummary]) -> None:
    """Print predicted beside measured speed-ups."""
    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table

    table = new_table("Predicted and measured speed-up", "draft", "K", "predicted", "measured, 95%", "difference")
    predicted = {(one.draft, one.k): one.speed_up.value for one in found}
    for summary in measured[1:]:
        arm, speed_up = summary.arm, summary.speed_up
        assert isinstance(arm.num_draft_tokens, int) and arm.draft is not None and speed_up is not None
        expected = predicted[arm.draft, arm.num_draft_tokens]
        difference = f"{expected / speed_up.value - 1:+.1%}"
        row = str(arm.num_draft_tokens), f"{expected:.2f}", interval_text(speed_up), difference
        table.add_row(NameCell(arm.draft), *row)
    print_table(console, table)
