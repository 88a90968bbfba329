"""``outrider certify-samples``: tests whether samples of another system follow the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.findings import report_findings, show_findings
from outrider.cli.shared.options import (
    DEFAULT_SIGNIFICANCE,
    BatchSizeOption,
    HtmlOption,
    JsonOption,
    SamplingOptions,
    SignificanceOption,
    flat,
)
from outrider.cli.shared.output import (
    make_document,
    progress_bar,
)
from outrider.cli.shared.pair_options import MachineOptions, PairOptions, options_json
from outrider.errors import FileError, OptionError, PromptError
from outrider.offline.jsonl import SampleLine, read_samples

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.certify.certificate import Certificate
    from outrider.certify.samples import SampledText
    from outrider.decoder import Decoder

_NAMES = tuple(field.name for field in fields(SamplingOptions))


@flat
def certify_samples(
    target: Annotated[
        str,
        typer.Argument(help="Model that generated the samples. Known name, folder or hub id."),
    ],
    file: Annotated[
        Path, typer.Argument(help="JSON lines with prompt_ids or prompt, token_ids or text, and optionally options.")
    ],
    machine: MachineOptions,
    sampling: SamplingOptions,
    draft: Annotated[
        str,
        typer.Option(help="Draft that the system used; deviations are tested towards it first."),
    ] = "none",
    significance: SignificanceOption = DEFAULT_SIGNIFICANCE,
    detect_tv: Annotated[
        float | None,
        typer.Option(min=1e-9, max=1, help="Total variation to detect with 99% probability."),
    ] = None,
    batch_size: BatchSizeOption = 8,
    seed: Annotated[int, typer.Option(help="Seed of the tests.")] = 0,
    html: HtmlOption = None,
    json_target: JsonOption = None,
) -> None:
    """Test whether samples follow their model's distribution. They may come from any system.

    Exit code 0: consistent; 1: not consistent; 3: inconclusive (too little data).

    Sampling options are those of the samples, for lines without options of their own. Each sample must have its own
    seed."""
    if seed < 0:
        raise OptionError("--seed", seed, "a whole number >= 0")
    options = sampling.to_options(seed=None, num_seeds=1)
    lines = read_samples(file, _NAMES)
    is_text = any(isinstance(line.output, str) for line in lines)

    from outrider.certify.samples import check_samples

    pair = PairOptions(target=target, draft=[draft], **asdict(machine))
    plain = pair.load()
    decoder = replace(plain, drafter=pair.load_draft(plain, draft))
    samples = list(_samples(decoder, file, lines, sampling))
    try:
        check_samples(samples, decoder.target.vocab_size, decoder.target.context_len)
    except PromptError as error:
        raise FileError(f"{file}, {error}") from None
    certificate = _test(decoder, file, samples, significance, detect_tv, seed, batch_size)
    settings = options_json(
        pair, options, file=file, significance=significance, detect_tv=detect_tv, batch_size=batch_size, seed=seed
    )
    body = {**certificate.to_json(), "is_text": is_text, "shared_options": _shared_options(lines, sampling)}
    document = make_document("certify-samples", settings, body, decoder)
    remarks = []
    if is_text:
        remarks.append(
            "Text was tokenized again, perhaps into other tokens than those sampled: a correct system can fail. Give "
            "token ids instead."
        )
    if certificate.num_repeats:
        remarks.append(
            f"Repeated samples: {certificate.num_repeats}. If they share a seed or come from a cache, rather than "
            "being sampled again, the tests are invalid: leave them out."
        )

    def show(console: Console) -> None:
        show_findings(
            console,
            certificate,
            f"{file} against {decoder.target.name}",
            word="CONSISTENT",
            level=significance,
            towards="a sharper distribution" if decoder.drafter.most_drafted == 0 else "the draft",
            unit="line",
            tokenizer=decoder.tokenizer,
            remarks=remarks,
        )

    report_findings(certificate, document, json_target, html, show)


def _samples(
    decoder: Decoder, file: Path, lines: Sequence[SampleLine], sampling: SamplingOptions
) -> Iterator[SampledText]:
    """Token ids and options of each line.

    Args:
        sampling: for lines without options of their own.

    Raises:
        FileError: an option or a prompt is invalid.
    """
    from outrider.certify.samples import SampledText
    from outrider.options import Sampling
    from outrider.requests.row_options import check_tokens

    for line in lines:
        where = f"{file}, line {line.number}"
        given = replace(sampling, **line.options)
        try:
            own = Sampling(**given.to_options(seed=None, num_seeds=1))
            prompt_ids = line.prompt if isinstance(line.prompt, tuple) else tuple(decoder.encode(line.prompt))
            ends = decoder.ends_of(prompt_ids)
            check_tokens(own, decoder.target.vocab_size, ends)
            own = own.with_ends(ends)
            whole = prompt_ids
            if isinstance(line.output, str):
                assert isinstance(line.prompt, str)
                whole = tuple(decoder.encode(line.prompt + line.output))
        except (OptionError, PromptError) as error:
            raise FileError(f"{where}: {error}") from None
        if isinstance(line.output, tuple):
            yield SampledText(line.number, prompt_ids, line.output, own)
            continue
        # The last token of the prompt may include the output's first characters: then it is tested too.
        differing = (i for i, (a, b) in enumerate(zip(prompt_ids, whole, strict=False)) if a != b)
        num_shared = next(differing, len(prompt_ids))
        yield SampledText(line.number, whole[:num_shared], whole[num_shared:], own)


def _shared_options(lines: Sequence[SampleLine], sampling: SamplingOptions) -> dict[str, Any]:
    """Options common to all samples."""
    first, *others = (asdict(replace(sampling, **line.options)) for line in lines)
    return {name: value for name, value in first.items() if all(one[name] == value for one in others)}


def _test(
    decoder: Decoder,
    file: Path,
    samples: Sequence[SampledText],
    level: float,
    wanted: float | None,
    seed: int,
    batch_size: int,
) -> Certificate:
    """Test the samples. Raises FileError if there are too few."""
    from outrider.certify.certificate import Certificate
    from outrider.certify.samples import judge, judge_greedily, num_repeats

    target = decoder.target
    greedy = [one for one in samples if one.sampling.temperature == 0]
    sampled = [one for one in samples if one.sampling.temperature > 0]
    if len(sampled) == 1 or not samples:
        raise FileError(f"{file}: the tests need at least two samples, since some determine how others are tested")
    statistical, greedy_reports = None, []
    with progress_bar("texts", len(samples)) as advance:
        if greedy:
            greedy_reports.append(judge_greedily(target, greedy, batch_size, advance))
        if sampled:
            statistical = judge(
                target,
                decoder.drafter,
                sampled,
                level=level,
                seed=seed,
                batch_size=batch_size,
                wanted=wanted,
                on_texts=advance,
            )
    return Certificate(None, statistical, (), greedy_reports, num_repeats(sampled))
