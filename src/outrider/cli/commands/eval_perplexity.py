"""``outrider eval perplexity``: perplexity of a text under target and draft, and their agreement on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.shared.options import BatchSizeOption, JsonOption, check_batch_size, flat
from outrider.cli.shared.output import (
    check_json_target,
    check_outputs,
    console_for,
    options_json,
    print_table,
    progress_bar,
    write_json,
)
from outrider.cli.shared.pair_options import PairOptions
from outrider.errors import FileError, OptionError


@flat
def perplexity(
    file: Annotated[Path, typer.Argument(help="Text file, in UTF-8.")],
    pair: PairOptions,
    context: Annotated[
        int | None, typer.Option(help="Tokens per window. Default: the shorter context of the two models.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(help="Tokens from window to window. Default: --context; less gives each token more context."),
    ] = None,
    batch_size: BatchSizeOption = 8,
    json_target: JsonOption = None,
) -> None:
    """Measure perplexity of a text under target and draft. And their agreement; nothing is generated."""
    name = pair.single_draft
    check_batch_size(batch_size)
    for option, value in (("--context", context), ("--stride", stride)):
        if value is not None and value < 1:
            raise OptionError(option, value, "a whole number >= 1")
    check_outputs({"--json": json_target}, [file])
    check_json_target(json_target)

    from outrider.bench.report import interval_text
    from outrider.bench.tables import NameCell, new_table
    from outrider.evals.perplexity import judge, windows
    from outrider.system.files import read_text
    from outrider.text.tokenizer import encode

    text = read_text(file)
    if not text.strip():
        raise FileError(f"{file} contains no text")
    plain = pair.load()
    decoder = replace(plain, drafter=pair.load_draft(plain, name))
    target, draft = decoder.target, decoder.drafter.lm
    most = min(lm.context_len for lm in (target, draft) if lm is not None)
    if context is not None and context > most:
        raise OptionError("--context", context, f"{target.name} with {name} accepts {most} tokens")
    context = most if context is None else context
    if stride is not None and stride > context:
        raise OptionError("--stride", stride, f"at most {context}, the tokens of a window, or some would be skipped")
    ids = encode(decoder.tokenizer, text)
    if len(ids) < 2:
        raise FileError(f"{file} has only one token: scoring starts at the second")
    pieces = windows(ids, context, stride or context)
    num_bytes = len(text.encode()) - len(_first_text(decoder.tokenizer, ids).encode())
    with progress_bar("windows", len(pieces)) as advance:
        result = judge(target, draft, pieces, num_bytes, batch_size=batch_size, on_done=advance)

    console = console_for(json_target)
    size = f"{result.num_tokens} tokens, {num_bytes} bytes, {result.num_windows} window"
    size += f"{'' if result.num_windows == 1 else 's'} of {context}"
    table = new_table(f"{file.name}: {size}", "model", "perplexity, 95%", "per byte", "bits per byte, 95%")
    for one in result.perplexities:
        bits = interval_text(one.bits_per_byte, 4)
        table.add_row(NameCell(one.model), interval_text(one.per_token), f"{one.per_byte.value:.4f}", bits)
    print_table(console, table)
    if result.agreement is None or result.alpha is None:
        console.print(f"The draft {name!r} has no probabilities of its own: these are the target's.")
    else:
        console.print(
            f"Agreement, the fraction of positions with the same top token: {interval_text(result.agreement, 3)}"
        )
        console.print(f"alpha = 1 - TV at temperature 1: {interval_text(result.alpha, 3)}")
    console.print("The intervals are over the windows", style="dim")
    body: dict[str, Any] = result.to_json() | {"num_bytes": num_bytes}
    options = {"file": file, "context": context, "stride": stride or context, "batch_size": batch_size}
    write_json(json_target, "eval-perplexity", options_json(pair, {}, **options), body, target)


def _first_text(tokenizer: Any, ids: list[int]) -> str:
    """Text of the first token, which is not scored; empty if it is a special token."""
    text: str = tokenizer.decode(ids[:1], skip_special_tokens=True)
    return text
