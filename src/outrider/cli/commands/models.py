"""``outrider models``: the names, their sizes, and the memory they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.shared.options import JsonOption
from outrider.cli.shared.output import check_json_target, console_for, write_json
from outrider.errors import OptionError


def models(
    models: Annotated[Path | None, typer.Option("--models", help="TOML file with more model names.")] = None,
    context: Annotated[int, typer.Option(help="Tokens in the cache, at most the model's context.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Sequences in the cache.")] = 1,
    dtype: Annotated[str, typer.Option(help="float64, float32, bfloat16 or float16.")] = "bfloat16",
    json_target: JsonOption = None,
) -> None:
    """List the known models, with the memory for weights and cache. Add your own names in a TOML file."""
    from outrider.models.memory import sizes_of
    from outrider.models.registry import BYTES_PER_NUMBER, known_models, user_file

    if context < 1:
        raise OptionError("--context", context, "a whole number >= 1")
    if batch_size < 1:
        raise OptionError("--batch-size", batch_size, "a whole number >= 1")
    if dtype not in BYTES_PER_NUMBER:
        raise OptionError("--dtype", dtype, f"choose one of {', '.join(BYTES_PER_NUMBER)}")
    check_json_target(json_target)
    rows: list[dict[str, Any]] = []
    for spec in known_models(models).values():
        sizes = sizes_of(spec)
        row: dict[str, Any] = {"name": spec.name, "location": spec.location, "source": spec.source, "about": spec.about}
        row_dtype = dtype if spec.dtype in (None, "auto") else spec.dtype
        row |= {"dtype": row_dtype, "device": spec.device}
        if sizes is not None:
            length = min(context, sizes.context_len)
            row |= {
                "num_params": sizes.num_params,
                "context_len": sizes.context_len,
                "weights_bytes": sizes.weights_bytes(row_dtype),
                "cache_bytes": sizes.cache_bytes(row_dtype, length, batch_size),
                "cache_bytes_compiled": sizes.cache_bytes(row_dtype, length, batch_size, is_prepared=True),
                "cache_tokens": length * batch_size,
            }
        rows.append(row)

    from rich import box
    from rich.table import Table

    console = console_for(json_target)
    title = f"cache for {batch_size} x {context} tokens, at most the model's context"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in ("name", "parameters", "context", "weights", "cache", "compiled", "dtype", "from"):
        is_text = column in ("name", "dtype", "from")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "from", overflow="fold")
    for row in rows:
        table.add_row(
            row["name"],
            _count(row.get("num_params")),
            f"{row['context_len']}" if "context_len" in row else "-",
            _size(row.get("weights_bytes")),
            _size(row.get("cache_bytes")),
            _size(row.get("cache_bytes_compiled")),
            row["dtype"],
            row["about"] or row["location"],
        )
    console.print(table)
    console.print("The cache is allocated in one piece; compiled, its length is a power of two.", style="dim")
    console.print(f"Your own names: {user_file()}, or --models FILE (see the README).", style="dim")
    options = {"models": models, "context": context, "batch_size": batch_size, "dtype": dtype}
    write_json(json_target, "models", options, {"models": rows})


def _count(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _size(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
