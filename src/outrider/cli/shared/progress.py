"""Progress of a command on standard error, in one line for each piece of work: what is done, and what is left.

On a terminal the line changes, and goes when the work ends. Files and pipes get a line after two seconds, then after
twice the time each, at least one a minute. Shorter work is not reported there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from outrider.cli.shared.output import CLEAR_LINE, clear_line, say, stderr_width

if TYPE_CHECKING:
    from outrider.measure.arms import Arm, ArmSummary, Case

_Item = TypeVar("_Item")
FIRST_S = 2.0  # before the first line in a file or pipe
_MOST_S = 60.0  # between lines there
_REFRESH_S, _SHORT_S = 0.25, 0.3  # of a terminal; work that is shorter would make it flicker


@contextmanager
def progress(what: str, total: int | None = None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Report a piece of work until the block ends; blocks are not nested. Yields a function that takes the number of
    new steps. ``total``: steps; None if they are not counted. ``done``: steps of earlier runs."""
    num_done, start, is_over = done, time.monotonic(), threading.Event()

    def advance(num_steps: int) -> None:
        nonlocal num_done
        num_done += num_steps

    def line() -> str:
        return line_of(what, time.monotonic() - start, total, num_done, num_done - done)

    teller = threading.Thread(target=_tell, args=(line, is_over, sys.stderr.isatty()), daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        is_over.set()
        teller.join()


def count_items(items: Iterable[_Item], advance: Callable[[int], None]) -> Iterator[_Item]:
    """Yield items, and take one step after each."""
    for item in items:
        yield item
        advance(1)


def until_first(items: Iterator[_Item], what: str) -> Iterator[_Item]:
    """Yield items, and report the wait for the first."""
    with progress(what):
        first = list(islice(items, 1))
    yield from first
    yield from items


def warm_up_all(arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any]) -> None:
    from outrider.measure.arms import warm_up

    with progress("warming up", len(arms)) as advance:
        for arm in count_items(arms, advance):
            warm_up([arm], cases, options)


def measure_all(
    arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any], what: str
) -> tuple[list[ArmSummary], bool]:
    """Measure every arm on every case, to the end or Ctrl-C. Returns the summaries, and whether it was interrupted.
    Raises Exit: before all arms had completed a case."""
    from outrider.measure.arms import interleave, summarise

    done, is_interrupted = [], False
    with progress(what, len(arms) * len(cases)) as advance:
        try:
            for measurement in count_items(interleave(arms, cases, options), advance):
                done.append(measurement)
        except KeyboardInterrupt:
            is_interrupted = True
    if summaries := summarise(done, arms):
        return summaries, is_interrupted
    raise typer.Exit(130)


def line_of(what: str, spent_s: float, total: int | None, num_done: int, num_new: int) -> str:
    """Line that tells how far a piece of work is. ``num_new``: steps of this run, by which the time that is left is
    estimated."""

    def time_of(seconds: float) -> str:
        return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"

    if total is None:
        return f"{what}: {time_of(spent_s)}"
    is_known = num_new > 0 and num_done < total
    left = f", about {time_of((total - num_done) * spent_s / num_new)} left" if is_known else ""
    return f"{what}: {num_done:,} of {total:,}, {time_of(spent_s)}{left}"


def _tell(line: Callable[[], str], is_over: threading.Event, is_terminal: bool) -> None:
    """Show the line on a terminal, and remove it at the end; or write lines to a file or pipe, after twice the time
    each."""
    wait, spent_s = _SHORT_S if is_terminal else FIRST_S, 0.0
    while not is_over.wait(wait):
        spent_s += wait
        if is_terminal:  # with room for the ^C of an interruption
            print(CLEAR_LINE + line()[: stderr_width() - 3], end="", file=sys.stderr, flush=True)
        else:
            say(line())
        wait = _REFRESH_S if is_terminal else min(spent_s, _MOST_S)
    if is_terminal and spent_s:
        clear_line()
