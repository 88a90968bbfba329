"""Job of ``generate``: outputs for a file of prompts, one JSON line each. It can be resumed.

Workers take prompts and yield rows, in this process or in others (ray_workers.py), and know no files.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from outrider.cli.shared.options import check_constraint
from outrider.cli.shared.output import json_text, origin_of, say
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import progress
from outrider.cli.shared.template_options import TemplateOptions, hint_at_chat
from outrider.errors import FileError, NumericsError, OptionError, PromptError
from outrider.offline.output_file import Totals, open_output, row_of, stats_of
from outrider.offline.prompt_file import PromptFile, by_length
from outrider.offline.prompt_row import PromptLine
from outrider.options import NumDraftTokens, Sampling
from outrider.records import Stats, Timing
from outrider.system.files import short_name, short_names
from outrider.text.chat import Chat

if TYPE_CHECKING:
    from outrider.decoder import Decoder

Prompts = Iterable[tuple[int, PromptLine]]
"""Prompts of a file, each with its index there."""
Length = tuple[int, int, bool]
"""A prompt's index, its maximum tokens with the output, and whether the target's context is the limit."""


@dataclass(frozen=True)
class Setup:
    """Models and options of a worker: fields of ``Sampling``, overridden by a prompt's own, and whether p of each token
    is kept."""

    pair: PairOptions
    draft: str
    k: NumDraftTokens
    options: dict[str, Any]
    template: TemplateOptions
    has_probs: bool = False

    def settings(self, line: PromptLine | None = None) -> dict[str, Any]:
        options = self.options if line is None else self.options | line.options
        more = self.template.to_json() | ({"probs": True} if self.has_probs else {})
        return options_json(self.pair, options, draft=self.draft, num_draft_tokens=self.k, **more)

    def seed(self, index: int, line: PromptLine) -> int | None:
        """Seed of a prompt, determined by its place in the file."""
        first = self.options["seed"]
        return line.options.get("seed", None if first is None else first + index)

    def encode(self, decoder: Decoder, prompt: str | Chat) -> list[int]:
        return decoder.encode(self.template.prompt(prompt))

    def check(self, line: PromptLine) -> None:
        """Detect options of a prompt that no target supports, before the work. Raises OptionError."""
        sampling = Sampling(**self.options | line.options)
        check_constraint(sampling)
        if self.has_probs and sampling.masked_by is not None:
            raise OptionError("--probs", True, "p under a constraint is not kept: leave out one of the two")


class Workers(Protocol):
    """One worker, or several."""

    def lengths(self, prompts: Prompts) -> Iterator[Length]:
        """Yield the length of each prompt. Raises PromptError, with the place, for one that the target cannot take."""

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, dict[str, Any], Stats]]:
        """Yield each finished prompt's index, row and round counts, in any order."""

    def pair(self) -> str:
        """Description of the models and their use."""

    def origin(self) -> dict[str, Any]:
        """Provenance of the rows."""


class LocalWorker:
    """A worker in this process, which generates ``num_slots`` prompts at a time. Loads the models when first needed."""

    def __init__(self, setup: Setup, num_slots: int) -> None:
        self._setup, self._num_slots = setup, num_slots

    @cached_property
    def decoder(self) -> Decoder:
        setup = self._setup
        decoder = setup.pair.load()
        return replace(decoder, drafter=setup.pair.load_draft(decoder, setup.draft), num_draft_tokens=setup.k)

    def lengths(self, prompts: Prompts) -> Iterator[Length]:
        from outrider.requests.row_options import check_tokens

        def check(options: dict[str, Any]) -> None:
            check_tokens(Sampling(**options), self.decoder.target.vocab_size, self.decoder.eos_ids)

        check(self._setup.options)
        context_len, has_text = self.decoder.target.context_len, False
        for index, line in prompts:
            if isinstance(line.prompt, str) and not has_text:  # they may be many: the first one tells
                has_text = True
                hint_at_chat(self.decoder, [self._setup.template.prompt(line.prompt)])
            options = self._setup.options | line.options
            try:
                most = len(self._setup.encode(self.decoder, line.prompt)) + options["max_new_tokens"]
                if line.options:
                    check(options)
            except (OptionError, PromptError) as error:
                raise PromptError(f"{line.place}: {error}") from None
            yield index, min(most, context_len), most > context_len

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, dict[str, Any], Stats]]:
        waiting: dict[int, tuple[int, PromptLine, list[int], int | None]] = {}

        def jobs() -> Iterator[tuple[list[int], Mapping[str, Any]]]:
            for place, (index, line) in enumerate(prompts):
                ids, seed = self._setup.encode(self.decoder, line.prompt), self._setup.seed(index, line)
                waiting[place] = (index, line, ids, seed)
                yield ids, {**line.options, "seed": seed}

        options = {name: value for name, value in self._setup.options.items() if name != "seed"}
        for place, done in self.decoder.complete(jobs(), num_slots=self._num_slots, **options):
            index, line, ids, seed = waiting.pop(place)
            row = row_of(index, line, ids, seed, done)
            if row["token_ids"] and self._setup.has_probs:
                try:
                    row["probs"] = self._probs(line, ids, row["token_ids"])
                except NumericsError as error:
                    row = row_of(index, line, ids, seed, error)
            row["settings"] = self._setup.settings(line)
            row["model"] = self._model | {"eos_ids": sorted(self.decoder.ends_of(ids))}
            yield index, row, stats_of(done)

    @cached_property
    def _model(self) -> dict[str, Any]:
        from outrider.measure.log import model_json

        return model_json(self.decoder)

    def _probs(self, line: PromptLine, ids: list[int], token_ids: list[int]) -> list[float]:
        from outrider.measure.log import token_probs
        from outrider.measure.teacher_forcing import Text

        options = self._setup.options | line.options | {"seed": None, "logprobs": None}
        sampling = Sampling(**options).with_ends(self.decoder.ends_of(ids))
        (found,) = token_probs(self.decoder.target, [Text((*ids, *token_ids), len(ids))], sampling)
        return found

    def pair(self) -> str:
        decoder = self.decoder
        target, draft = short_names([decoder.target.name, decoder.drafter.name])
        same = decoder.same_bytes(self._setup.options["temperature"])
        how = ", plain" if draft == "none" else f" with {draft}, K = {decoder.num_draft_tokens}, {decoder.acceptance}"
        return f"{target}{how}, same bytes: {same}"

    def origin(self) -> dict[str, Any]:
        return origin_of(self.decoder) | {"draft": self.decoder.drafter.name}  # the draft that "auto" chose


def run_job(
    setup: Setup,
    lines: PromptFile,
    files: ExitStack,
    totals: Totals,
    open_workers: Callable[[int], Workers],
    *,
    num_slots: int,
    output: Path | None,
    write: Callable[[str], None] | None = None,
    part: slice = slice(None),
) -> Workers:
    """Write a JSON line for each prompt that has none yet, as outputs end, and return the workers, which know the
    models. Raises FileError: a prompt is invalid, or the output file is another job's.

    Args:
        files: closes what is opened.
        totals: changed.
        open_workers: takes the number of prompts to do.
        num_slots: prompts that run concurrently.
        output: the file of the lines; an interrupted job resumes. None: ``write`` takes the lines.
        part: of the prompts.
    """
    indices, is_done = range(len(lines))[part], bytearray(len(lines))
    for index in indices:
        try:
            setup.check(line := lines[index])
        except OptionError as error:
            raise FileError(f"{lines.path}, {line.place}: {error}") from None
    if output is not None:
        file = files.enter_context(open_output(output))
        is_done, totals.num_failed = file.read_finished(lines, indices, setup.settings)
        write = file.write
    assert write is not None
    missing = [index for index in indices if not is_done[index]]
    workers = open_workers(len(missing))
    try:
        lengths, num_cut = array("Q", bytes(8 * len(lines))), 0
        for index, length, is_cut in workers.lengths((index, lines[index]) for index in missing):
            lengths[index] = length
            num_cut += is_cut
    except PromptError as error:
        raise FileError(f"{lines.path}, {error}") from None
    if num_cut:
        prompts = "1 prompt" if num_cut == 1 else f"{num_cut} prompts"
        say(f"-n exceeds the context of {short_name(setup.pair.target)} for {prompts}: generation stops there")
    start = time.perf_counter()
    try:
        with progress("prompts", len(indices), len(indices) - len(missing)) as advance:
            order = by_length(missing, lengths, num_slots)
            for _, row, stats in workers.rows((index, lines[index]) for index in order):
                write(json_text(row))
                del row["settings"], row["model"]
                totals.add(row, stats)
                advance(1)
    except KeyboardInterrupt:
        totals.is_interrupted = True
    # Rows join and leave within rounds, so the time per phase is not reported.
    totals.time_s = dict.fromkeys(Timing().to_json()) | {"total": time.perf_counter() - start}
    return workers
