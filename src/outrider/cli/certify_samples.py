"""``outrider certify-samples``: do texts of another system follow the target's law?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.findings import greedy_row, statistical_rows, tell_deviation, tell_differences
from outrider.cli.jsonl import SampleLine, read_samples
from outrider.cli.options import (
    DEFAULT_ALPHA_LEVEL,
    AlphaLevelOption,
    BatchSizeOption,
    JsonOption,
    MachineOptions,
    PairOptions,
    SamplingOptions,
    check_alpha_level,
    check_batch_size,
    flat,
)
from outrider.cli.output import check_json_target, check_outputs, console_for, options_json, progress_bar, write_json
from outrider.errors import FileError, OptionError, PromptError

if TYPE_CHECKING:
    from outrider.api import Decoder
    from outrider.lab.samples import Sample

_NAMES = tuple(field.name for field in fields(SamplingOptions))


@flat
def certify_samples(
    target: Annotated[
        str, typer.Argument(help="Known name, folder or hub id of the model that the texts are said to be of.")
    ],
    file: Annotated[Path, typer.Argument(help="JSON lines: prompt_ids or prompt; token_ids or text; perhaps options.")],
    machine: MachineOptions,
    sampling: SamplingOptions,
    draft: Annotated[
        str, typer.Option(help="The draft that the system used: where deviations are looked for first.")
    ] = "none",
    alpha_level: AlphaLevelOption = DEFAULT_ALPHA_LEVEL,
    batch_size: BatchSizeOption = 8,
    seed: Annotated[int, typer.Option(help="Of the tests' own randomness.")] = 0,
    json_target: JsonOption = None,
) -> None:
    """Hold texts of any system against the law of its target. Exit code 0: consistent, 1: not.

    Sampling options are those that the texts are said to be sampled with, where their lines do not say. Each text must
    have been sampled with randomness of its own."""
    check_outputs({"--json": json_target}, [file, machine.models])
    check_json_target(json_target)
    check_batch_size(batch_size)
    check_alpha_level(alpha_level)
    if seed < 0:
        raise OptionError("--seed", seed, "a whole number >= 0")
    options = sampling.to_options(seed=None, num_seeds=1)
    lines = read_samples(file, _NAMES)

    from outrider.bench.report import new_table
    from outrider.drafters.base import NoDrafter
    from outrider.lab.samples import check_samples, judge, judge_greedily, num_repeats

    pair = PairOptions(target=target, draft=[draft], **asdict(machine))
    plain = pair.load()
    drafter = pair.load_draft(plain, draft)
    decoder = replace(plain, drafter=drafter)
    samples = list(_samples(decoder, file, lines, sampling))
    try:
        check_samples(samples, decoder.target.vocab_size, decoder.context_len)
    except PromptError as error:
        raise FileError(f"{file}, {error}") from None
    greedy = [one for one in samples if one.sampling.temperature == 0]
    sampled = [one for one in samples if one.sampling.temperature > 0]
    if len(sampled) == 1 or not samples:
        raise FileError(f"{file}: the tests need two sampled texts or more, since some settle how others are tested")
    with progress_bar("texts", len(samples)) as advance:
        greedy_report = judge_greedily(decoder.target, greedy, batch_size, advance) if greedy else None
        report = (
            judge(
                decoder.target, drafter, sampled, level=alpha_level, seed=seed, batch_size=batch_size, on_texts=advance
            )
            if sampled
            else None
        )
    console = console_for(json_target)
    table = new_table(f"{file} against {decoder.target.name}", "layer", "found", "verdict")
    if report is not None:
        for row in statistical_rows(report):
            table.add_row(*row)
    if greedy_report is not None:
        table.add_row(*greedy_row(greedy_report))
    console.print(table)
    if report is not None:
        tell_deviation(console, report, "a sharper law" if isinstance(drafter, NoDrafter) else "the draft")
    if greedy_report is not None:
        tell_differences(console, greedy_report, "line", decoder.tokenizer)
    is_text = any(isinstance(line.output, str) for line in lines)
    if is_text:
        console.print(
            "Texts were cut into tokens anew, perhaps into other ones than were sampled: a right system can fail. "
            "Token ids are better."
        )
    repeats = num_repeats(sampled)
    if repeats:
        console.print(
            f"{repeats} of the sampled texts are repeats of others. If they share a seed or were kept from an earlier "
            "answer, rather than being sampled anew, the tests do not hold: leave them out."
        )
    is_consistent = (report is None or report.is_ok) and (greedy_report is None or greedy_report.is_ok)
    false_alarm = "" if report is None else f" (a right system fails the tests with probability {alpha_level:g})"
    console.print(("CONSISTENT" if is_consistent else "NOT CONSISTENT") + false_alarm, style="bold")
    body: dict[str, Any] = {
        "is_consistent": is_consistent,
        "is_text": is_text,
        "num_repeats": repeats,
        "statistical": report and report.to_json(),
        "greedy": [] if greedy_report is None else [greedy_report.to_json()],
    }
    more = {"file": file, "alpha_level": alpha_level, "batch_size": batch_size, "seed": seed}
    write_json(json_target, "certify-samples", options_json(pair, options, **more), body, decoder.target)
    if not is_consistent:
        raise typer.Exit(1)


def _samples(decoder: Decoder, file: Path, lines: Sequence[SampleLine], sampling: SamplingOptions) -> Iterator[Sample]:
    """Token ids and options of each line.

    Args:
        sampling: where a line does not say.

    Raises:
        FileError: an option or a prompt of a line is not possible.
    """
    from outrider.flow import Sampling
    from outrider.lab.samples import Sample

    for line in lines:
        where = f"{file}, line {line.number}"
        given = replace(sampling, **line.options)
        try:
            law = Sampling(**given.to_options(seed=None, num_seeds=1))
            decoder.check_bias(law.logit_bias or {})
            prompt_ids = line.prompt if isinstance(line.prompt, tuple) else tuple(decoder.encode(line.prompt))
            whole = prompt_ids
            if isinstance(line.output, str):
                assert isinstance(line.prompt, str)
                whole = tuple(decoder.encode(line.prompt + line.output))
        except (OptionError, PromptError) as error:
            raise FileError(f"{where}: {error}") from None
        if isinstance(line.output, tuple):
            yield Sample(line.number, prompt_ids, line.output, law)
            continue
        # The last token of the prompt may have grown by the first characters of the output: then it is judged, too.
        differing = (i for i, (a, b) in enumerate(zip(prompt_ids, whole, strict=False)) if a != b)
        num_shared = next(differing, len(prompt_ids))
        yield Sample(line.number, whole[:num_shared], whole[num_shared:], law)
