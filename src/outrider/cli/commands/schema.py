"""``outrider schema``: JSON Schemas of the documents and files that commands write."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from outrider.errors import OptionError


def _complete(incomplete: str) -> list[str]:
    from outrider.schemas.catalogue import SCHEMAS

    return [name for name in SCHEMAS if name.startswith(incomplete)]


def schema(
    name: Annotated[
        str | None,
        typer.Argument(help="A document, or the lines of a file. Default: list their names.", autocompletion=_complete),
    ] = None,
) -> None:
    """Print the JSON Schema of a document that --json writes, or of a file's lines."""
    from outrider.schemas.catalogue import SCHEMAS, schema_of

    if name is None:
        for known in SCHEMAS:
            typer.echo(known)
    elif name in SCHEMAS:
        typer.echo(json.dumps(schema_of(name), indent=2, ensure_ascii=False))
    else:
        raise OptionError("NAME", name, f"choose one of {', '.join(SCHEMAS)}")
