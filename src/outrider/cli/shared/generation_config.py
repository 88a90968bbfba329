"""``--generation-config``: sampling options that were not given, from the target's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.shared.options import SAMPLING_PANEL, SamplingOptions
from outrider.cli.shared.wrapping import say

GenerationConfigOption = Annotated[
    str,
    typer.Option(
        metavar="auto|none",
        help="auto takes sampling options that are not given from the target's generation_config.json; none does not.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]


def over_checkpoint(
    sampling: SamplingOptions, context: typer.Context, choice: str, target: str, models: Path | None
) -> SamplingOptions:
    """The options of a command line, over those that the target's checkpoint states. Says which it takes.

    Args:
        context: knows which options were given.

    Raises:
        OptionError, ModelNotFound, FileError
    """
    from outrider.models.reading import defaults_text, sampling_defaults
    from outrider.models.registry import resolve

    spec = resolve(target, models)
    given = {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") != "DEFAULT"}
    taken = {name: value for name, value in sampling_defaults(spec, choice).items() if name not in given}
    if taken:
        say(defaults_text(spec.name, taken))
    return replace(sampling, **taken)
