"""Job of ``generate`` and ``record``: outputs for a file of prompts, one JSON line each. It can be resumed."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from outrider.cli.shared.context_limit import report_num_limited
from outrider.cli.shared.options import check_constraint
from outrider.cli.shared.output import json_text, progress_bar
from outrider.cli.shared.ray_workers import RayOptions, open_ray_workers
from outrider.cli.shared.workers import LocalWorker, Setup, Workers
from outrider.errors import OptionError, OutriderError
from outrider.offline.invalid_rows import InvalidRows
from outrider.offline.output_file import FinishedPrompts, open_output
from outrider.offline.output_rows import Totals
from outrider.offline.prompt_file import PromptFile
from outrider.offline.prompt_order import Shard, by_length
from outrider.offline.prompt_row import PromptLine
from outrider.options import Sampling
from outrider.records import Timing
from outrider.system.ranks import current_ranks


def run_job(
    setup: Setup,
    lines: PromptFile,
    files: ExitStack,
    totals: Totals,
    *,
    batch_size: int,
    output: Path | None,
    write: Callable[[str], None] | None = None,
    part: Shard,
    skips_invalid: bool = False,
    cluster: RayOptions,
) -> Workers:
    """Write a JSON line for each prompt that has none yet, as outputs end.

    Args:
        files: closes what is opened.
        totals: changed.
        batch_size: prompts that run concurrently.
        output: the file of the lines; an interrupted job resumes. None: ``write`` takes the lines.
        part: of the prompts.
        skips_invalid: leave out invalid prompts, instead of refusing the file.

    Returns:
        The workers, which know the models.

    Raises:
        FileError: a prompt is invalid, or the output file is another job's.
    """
    invalid = InvalidRows(lines, skips_invalid)
    invalid.check(part.indices(len(lines)), partial(_check_own, setup))
    finished = FinishedPrompts(part.indices(len(lines)), bytearray(len(lines)))
    if output is not None:
        file = files.enter_context(open_output(output))
        finished = current_ranks().of_first(partial(file.read_finished, lines, finished.indices, setup.settings))
        write = file.write
    assert write is not None
    finished.leave_out(invalid.reasons)
    totals.num_failed = finished.num_failed
    workers: Workers
    if cluster.ray is None:
        workers = LocalWorker(setup, batch_size)
    else:
        workers = files.enter_context(open_ray_workers(cluster, setup, batch_size, finished.num_missing))
    _continue_all(setup, workers, invalid, finished, batch_size, write, totals)
    return workers


def _check_own(setup: Setup, line: PromptLine) -> None:
    """Detect options that no target supports, before the work. Raises OptionError."""
    target = setup.pair.target
    if line.model not in (None, target):
        raise OptionError("model", line.model, f"the target is {target!r}: choose it with --target, or leave it out")
    sampling = Sampling(**setup.options | line.options)
    check_constraint(sampling)
    if setup.num_probs is not None and (sampling.is_constrained or sampling.bad_words):
        raise OptionError("--probs", setup.num_probs, "p under a constraint is not kept: leave out one of the two")


def _lengths(workers: Workers, target: str, finished: FinishedPrompts, invalid: InvalidRows) -> Sequence[int]:
    """Check the unfinished prompts against the target before the work, and compute their maximum lengths.

    Raises:
        FileError: with the line, unless it is skipped.
    """
    lines, num_cut = invalid.lines, 0
    lengths = array("Q", bytes(8 * len(lines)))
    for index, length in workers.lengths((index, lines[index]) for index in finished.missing()):
        if isinstance(length, OutriderError):
            invalid.add(index, length)
        else:
            lengths[index] = length.num_tokens
            num_cut += length.is_cut
    finished.leave_out(invalid.reasons)
    report_num_limited(target, num_cut)
    return lengths


def _continue_all(
    setup: Setup,
    workers: Workers,
    invalid: InvalidRows,
    finished: FinishedPrompts,
    num_slots: int,
    write: Callable[[str], None],
    totals: Totals,
) -> None:
    """Write a JSON line for each unfinished prompt as workers yield them. Keeps totals only."""
    lines, lengths = invalid.lines, _lengths(workers, setup.pair.target, finished, invalid)
    invalid.report()
    totals.skipped = invalid.to_json()
    order = by_length(finished.missing(), lengths, num_slots)
    num_prompts = finished.num_rows + finished.num_missing
    start = time.perf_counter()
    try:
        with progress_bar("prompts", num_prompts, finished.num_rows) as advance:
            for index, (row, stats) in workers.rows((index, lines[index]) for index in order):
                about = {"settings": setup.settings(lines[index]), "model": row.pop("model")}
                write(json_text(row | about))
                totals.add(row, stats)
                advance(1)
    except KeyboardInterrupt:
        totals.is_interrupted = True
    # Rows join and leave within rounds, so the time per phase is not reported.
    totals.time_s = dict.fromkeys(Timing().to_json()) | {"total": time.perf_counter() - start}
