"""``outrider alpha``: agreement of target and draft, from their logits alone."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import BatchSizeOption, HtmlOption, JsonOption, flat
from outrider.cli.shared.output import (
    console_for,
    print_table,
    progress_bar,
    write_json,
)
from outrider.cli.shared.pair_options import PairOptions, options_json
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import OptionError

if TYPE_CHECKING:
    from outrider.scoring.alpha import Alpha


@flat
def alpha(
    pair: PairOptions,
    template: TemplateOptions,
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
    plot: Annotated[Path | None, typer.Option(help="Plot alpha against temperature: FILE.png or FILE.svg.")] = None,
    html: HtmlOption = None,
    json_target: JsonOption = None,
) -> None:
    """Measure the agreement of target and draft on texts. It is alpha, the mean acceptance probability; nothing is
    generated."""
    grid = _numbers("--temperature", temperatures), _numbers("--top-p", top_ps)

    from outrider.bench.plots import plot_alpha
    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table
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
    for name in pair.draft_names:
        drafter = pair.load_draft(decoder, name)
        if drafter.is_one_hot:
            raise OptionError(
                "--draft", name, "alpha compares two models (for ngram, suffix and greedy drafts use outrider replay)"
            )
        with progress_bar(name, len(texts)) as advance:
            results[name] = measure_alpha(
                decoder.target, drafter, texts, samplings, batch_size=batch_size, on_done=advance
            )
    console = console_for(json_target)
    num_tokens = results[pair.draft_names[0]][0].num_tokens
    has_offsets = any(one.by_offset is not None for alphas in results.values() for one in alphas)
    columns = "draft", "temperature", "top-p", "alpha, 95%", "TV", *["of each token of a round"] * has_offsets
    table = new_table(f"{decoder.target.name}, {num_tokens} tokens", *columns)
    for name, alphas in results.items():
        for one in alphas:
            value, sampling = one.alpha.value, one.sampling
            top_p = f"{sampling.top_p:g}" if sampling.temperature > 0 else "-"  # no effect at temperature 0
            row = [f"{sampling.temperature:g}", top_p, interval_text(one.alpha), f"{1 - value:.3f}"]
            if has_offsets:
                row.append("-" if one.by_offset is None else " ".join(f"{part.value:.3f}" for part in one.by_offset))
            table.add_row(NameCell(name), *row)
    print_table(console, table)
    console.print("alpha = E\\[sum min(p, q)] = 1 - TV; the interval is over the texts", style="dim")
    if plot is not None:
        plot_alpha(results, plot, f"{decoder.target.name}: agreement with its draft")
        console.print(f"Plot: {plot}")
    body: dict[str, Any] = {"alphas": [one.to_json() | {"draft": name} for name, row in results.items() for one in row]}
    options = {"temperatures": grid[0], "top_ps": grid[1], "prompts": prompts, "batch_size": batch_size}
    options |= template.to_json()
    write_json(json_target, "alpha", options_json(pair, {}, **options), body, decoder, html)
    if html is not None:
        console.print(f"Page: {html}", markup=False)


def _numbers(name: str, text: str) -> list[float]:
    """Parse comma-separated numbers, unique and sorted; the options check their ranges.

    Raises:
        OptionError
    """
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise OptionError(name, text, "comma-separated numbers, like 0,0.5,1") from None
