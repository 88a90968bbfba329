"""``outrider alpha``: agreement of target and draft, from their logits alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import BatchSizeOption, ReportOptions
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.progress import progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.scoring.alpha import Alpha


@flat
def alpha(
    pair: PairOptions,
    template: TemplateOptions,
    report: ReportOptions,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="File of texts to score. JSON lines with a 'prompt' or 'messages', or plain lines. Default: 15 "
            "sentences."
        ),
    ] = None,
    temperatures: Annotated[str, typer.Option("-t", "--temperature", help="One or several: 0,0.5,1.")] = "0,0.5,1,1.5",
    top_ps: Annotated[str, typer.Option("--top-p", help="One or several: 0.9,1.")] = "1",
    batch_size: BatchSizeOption = 8,
) -> None:
    """Measure the agreement of target and draft on texts. It is alpha, the mean acceptance probability; nothing is
    generated."""
    grid = _numbers("--temperature", temperatures), _numbers("--top-p", top_ps)

    with progress("loading libraries"):
        from outrider.scoring.alpha import measure_alpha, sampling_grid
        from outrider.scoring.teacher_forcing import Text
        from outrider.text.tokenizer import encode

    samplings = list(sampling_grid(*grid))
    lines = template.read(prompts)
    decoder = pair.load()
    texts = [
        Text(ids[: decoder.target.context_len])
        for ids in encode_lines(decoder, lines, prompts, partial(encode, decoder.tokenizer))
    ]
    results: dict[str, list[Alpha]] = {}
    for given in pair.draft_names:
        name, drafter = pair.load_named(decoder, given)
        if name in results:  # auto chose a draft that is given, too
            continue
        if drafter.is_one_hot:
            raise OptionError(
                "--draft", name, "alpha compares two models (for ngram, suffix and greedy drafts use outrider replay)"
            )
        with progress(f"scoring by {name}", len(texts)) as advance:
            results[name] = measure_alpha(
                decoder.target, drafter, texts, samplings, batch_size=batch_size, on_done=advance
            )
    body: dict[str, Any] = {"alphas": [one.to_json() | {"draft": name} for name, row in results.items() for one in row]}
    options = {"temperatures": grid[0], "top_ps": grid[1], "prompts": prompts, "batch_size": batch_size}
    report.finish("alpha", options_json(pair, {}, draft=[*results], **options, **template.to_json()), body, decoder)


def _numbers(name: str, text: str) -> list[float]:
    """Parse comma-separated numbers, unique and sorted; the options check their ranges. Raises OptionError."""
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise OptionError(name, text, "comma-separated numbers, like 0,0.5,1") from None
