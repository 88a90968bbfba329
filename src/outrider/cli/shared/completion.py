"""Values that the shell completes. Nothing heavy is imported: names come from models.toml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from outrider.errors import OutriderError
from outrider.options import LOOKUPS

if TYPE_CHECKING:
    from outrider.models.registry import ModelSpec

ENGINES = ("vllm", "sglang", "llama.cpp", "transformers")  # of --to
RULES = ("block", "rejection", "gumbel")  # of --acceptance
DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


def one_of(values: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Completion of an option that takes one of these values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def complete_target(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Known models that are no heads."""
    return _matching([spec for spec in _known(ctx).values() if spec.head_of is None], incomplete)


def complete_draft(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Known drafts of the target that the line names so far, then drafts without a checkpoint."""
    from outrider.models.pairs import drafts_of
    from outrider.models.registry import resolve

    target = ctx.params.get("target_name") or ctx.params.get("target") or "fable"
    drafts: list[ModelSpec] = []
    try:
        drafts = drafts_of(resolve(target, _models_file(ctx)), _known(ctx))
    except OutriderError:
        pass  # a command line that is not finished
    words = [*LOOKUPS, "mtp", "none"]
    return _matching(drafts, incomplete) + [(word, "") for word in words if word.startswith(incomplete)]


def _known(ctx: typer.Context) -> dict[str, ModelSpec]:
    from outrider.models.registry import known_models

    try:
        return known_models(_models_file(ctx))
    except OutriderError:
        return {}  # the command itself will tell


def _models_file(ctx: typer.Context) -> Path | None:
    file = ctx.params.get("models")
    return Path(file) if file else None


def _matching(specs: list[ModelSpec], incomplete: str) -> list[tuple[str, str]]:
    return [(spec.name, spec.about or spec.location) for spec in specs if spec.name.startswith(incomplete)]
