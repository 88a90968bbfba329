"""``outrider compare``: a race between plain and speculative decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from outrider.cli.shared import options as shared
from outrider.cli.shared.findings import difference_lines
from outrider.cli.shared.flat import flat
from outrider.cli.shared.output import report_context_limit, say
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import measure_all, progress, warm_up_all
from outrider.cli.shared.template_options import TemplateOptions, hint_at_chat, read_prompt
from outrider.errors import OptionError, OutriderError
from outrider.system.files import short_names, write_text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from outrider.certify.divergence import GreedyReport
    from outrider.measure.arms import Arm, ArmSummary, Case, Measurement, OnChunk
    from outrider.records import Chunk

_PANEL_HEIGHT = 5  # lines; a smaller panel shows no text
_PROMPT = "Once upon a time there was a little girl who lived with her grandmother at the edge of a great forest."
_TASK = (
    "Write a Python class Point with x and y, and the methods add, subtract, multiply and divide, which return a new "
    "Point."
)


@flat
def compare(
    command: typer.Context,
    pair: PairOptions,
    sampling: shared.SamplingOptions,
    end: shared.EndOptions,
    template: TemplateOptions,
    *,
    prompt: str | None = typer.Argument(
        None,
        help="Text to continue, or with --chat to answer; - is standard input. Default: one that is built in; of a "
        "model for chats, a task.",
    ),
    num_draft_tokens: shared.NumDraftTokensListOption = "4",
    num_runs: int = typer.Option(5, help="Measured runs of each arm, in turn, after the race."),
    seed: shared.SeedOption = 0,
    html: Path | None = typer.Option(None, metavar="FILE", help="Write an HTML page: the race, then tables."),
    generation_config: shared.GenerationConfigOption = "auto",
    report: shared.ReportOptions,
) -> None:
    """Race plain against speculative decoding. The speed-up is measured, with its 95% interval.

    Exit code 1: texts differ that should be the same bytes."""
    sampling = shared.over_checkpoint(sampling, command, generation_config, pair.target, pair.models)
    ks = shared.parse_k(num_draft_tokens)
    if num_runs < 1:
        raise OptionError("--num-runs", num_runs, "a whole number >= 1")
    options = sampling.to_options(seed=seed, num_seeds=num_runs, **end.to_options())
    pair.check_compared()
    if prompt is not None:
        prompt = read_prompt(prompt)

    decoder = pair.load()

    from outrider.measure.arms import Arm, Case, arms_by_k, names_of_drafts
    from outrider.race.events import RaceEvents

    if prompt is None:
        is_for_chats = bool(decoder.tokenizer is not None and decoder.tokenizer.chat_template)
        template = replace(template, chat=template.chat or is_for_chats)
        prompt = _TASK if template.is_chat else _PROMPT
    asked = template.prompt(prompt)
    hint_at_chat(decoder, [asked])
    prompt_ids = decoder.encode(asked)
    report_context_limit(decoder.target.name, decoder.target.context_len, [prompt_ids], options["max_new_tokens"])
    arms = [Arm("plain", decoder)]
    for name, drafter in pair.load_drafts(decoder).items():
        arms += arms_by_k(replace(decoder, drafter=drafter), name, ks)
    cases = [Case(run, asked, seed + run) for run in range(num_runs)]
    warm_up_all(arms, cases, options)
    console = report.console()
    console.print(prompt, style="dim", markup=False, soft_wrap=not console.is_terminal)
    # The race is not measured: drawing between rounds would slow the arm with the most rounds.
    events, rounds = RaceEvents(arms, cases[0], options), []

    def record(arm: Arm, case: Case, chunk: Chunk) -> None:
        if html is not None:
            rounds.append(events.round(arms.index(arm), chunk))

    shown = _show_race(console, arms, cases[0], options | {"reports_drafts": html is not None}, record)
    summaries, is_interrupted = measure_all(arms, cases, options, "measuring, runs")
    with progress("comparing the texts"):
        same, is_stopped = _same_bytes(summaries, cases, options)
    is_interrupted |= is_stopped
    body: dict[str, Any] = {
        "arms": [summary.to_json() for summary in summaries],
        "baseline": arms[0].name,
        "same_bytes": [{"arm": name, **asdict(report)} for name, report in same.items()],
        "texts": {m.arm.name: m.text for m in shown},
        "is_interrupted": is_interrupted,
    }
    more = {"draft": names_of_drafts(arms), "prompt": prompt, "num_draft_tokens": ks, "num_runs": num_runs}
    settings = options_json(pair, options, **more, **template.to_json())
    document = report.finish("compare", settings, body, decoder)
    if html is not None:
        from outrider.race.page import recorded_page

        write_text(html, recorded_page([events.start(), *rounds, events.end(body["arms"])], document))
        console.print(f"Page: {html}", markup=False)
    for one in same.values():
        for line in difference_lines(one, "text", decoder.tokenizer):
            console.print(line, markup=False)
    if is_interrupted:
        raise typer.Exit(130)
    if not all(one.is_ok for one in same.values()):
        raise typer.Exit(1)


def _same_bytes(
    summaries: Sequence[ArmSummary], cases: Sequence[Case], options: dict[str, Any]
) -> tuple[dict[str, GreedyReport], bool]:
    """Comparison of the texts of each arm with those of the first, and whether it was interrupted. Empty if the texts
    are sampled and may differ. If a difference cannot be explained, the measurements are not lost."""
    from outrider.certify.divergence import compare_texts

    plain, *others = summaries
    found, is_interrupted = {}, False
    for one in others:
        if not one.arm.decoder.depends_on_draft(options["temperature"]):
            # At temperature 0 all runs write one text.
            texts = {(a, b): case for a, b, case in zip(plain.texts, one.texts, cases, strict=False)}
            given = [(case.prompt, {**options, "seed": case.seed}) for case in texts.values()]
            pairs = [*zip(*texts, strict=True)]
            try:
                found[one.arm.name] = compare_texts(one.arm.decoder, given, *pairs)
            except (OutriderError, RuntimeError, MemoryError, KeyboardInterrupt) as error:
                is_interrupted |= isinstance(error, KeyboardInterrupt)
                say(f"{one.arm.name}: the texts are not explained ({type(error).__name__}: {error})")
                found[one.arm.name] = compare_texts(one.arm.decoder, given, *pairs, explains=False)
    return found, is_interrupted


def _show_race(
    console: Console, arms: Sequence[Arm], case: Case, options: dict[str, Any], on_chunk: OnChunk
) -> list[Measurement]:
    """Show the race: side by side in live panels on a terminal, one output after the other elsewhere."""
    from rich.console import Group
    from rich.live import Live

    from outrider.measure.arms import race

    names = short_names(arm.name for arm in arms)
    if not (console.is_terminal and console.height >= _PANEL_HEIGHT * len(arms)):
        measurements = race(arms, case, options, on_chunk)
        for measurement, name in zip(measurements, names, strict=True):
            # Not through the console, which would wrap lines and expand tabs.
            print(f"--- {name}\n{measurement.text}", file=console.file)
        return measurements
    height = max(3, (console.height - 2) // len(arms) - 2)
    panels = {arm.name: _Panel(name, height) for arm, name in zip(arms, names, strict=True)}
    # No refresh thread: it would slow the arm that runs.
    with Live(Group(*panels.values()), console=console, auto_refresh=False) as live:

        def show(arm: Arm, case: Case, chunk: Chunk) -> None:
            panels[arm.name].chunks.append(chunk)
            live.refresh()
            on_chunk(arm, case, chunk)

        return race(arms, case, options, show)


@dataclass(slots=True)
class _Panel:
    """Panel of one arm; bright while it runs."""

    name: str
    num_lines: int
    chunks: list[Chunk] = field(default_factory=list)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.panel import Panel
        from rich.text import Text

        # Show the last lines; a longer text loses its beginning.
        text = Text("".join(chunk.text for chunk in self.chunks))
        lines = text.wrap(console, options.max_width - 4)[-self.num_lines :]
        num_tokens = sum(len(chunk.token_ids) for chunk in self.chunks)
        seconds = sum(chunk.timing.total_s for chunk in self.chunks)
        figures = f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds if seconds else 0:.1f} tokens/s"
        room = max(8, options.max_width - len(figures) - 8)  # a long name loses its beginning
        name = self.name if len(self.name) <= room else f"…{self.name[1 - room :]}"
        is_running = not self.chunks or self.chunks[-1].finish_reason is None
        style = "cyan" if is_running else "dim"
        yield Panel(Text("\n").join(lines), title=f"{name}: {figures}", title_align="left", border_style=style)
