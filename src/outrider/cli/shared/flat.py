"""Signatures of commands.

A command takes a group of options as one parameter, ``pair: PairOptions``; ``flat`` expands the groups into the
signature that Typer reads.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo

from outrider.cli.shared.options import is_given
from outrider.cli.shared.output import check_files, is_there
from outrider.errors import OptionError

_FirstArgument = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="In place of --target.", show_default=False)
]
_CONTEXT = "typer_context"  # of commands that take none


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each option group in a command's signature by the group's fields, for Typer; let the target stand first,
    in place of its option; and check the files before the command begins."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=get_type_hints(group, include_extras=True)[field.name],
            )
            for field in fields(group)
        ]
    defaults = {one.name: one.default for one in parameters}
    has_first = "target" in defaults and not any(
        one.default is inspect.Parameter.empty and _is_argument(one) for one in parameters
    )
    if has_first:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.insert(0, inspect.Parameter("first", kind, default=None, annotation=_FirstArgument))
    own_context = next((name for name, hint in hints.items() if hint is typer.Context), None)
    if own_context is None:
        parameters.append(inspect.Parameter(_CONTEXT, inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        context = values.pop(_CONTEXT) if own_context is None else values[own_context]
        if has_first:
            _place_first(values, defaults, is_target_given=is_given(context, "target"))
        check_files(values)
        arguments = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**arguments, **values)

    flattened.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flattened.__annotations__ = {p.name: p.annotation for p in parameters}
    del flattened.__wrapped__  # else inspect finds the command's own signature
    return flattened


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(one, ArgumentInfo) for one in getattr(parameter.annotation, "__metadata__", ()))


def _place_first(values: dict[str, Any], defaults: Mapping[str, Any], *, is_target_given: bool) -> None:
    """Take the first argument as the target; or as the prompt, if it is alone, and no model's name or beside --target.
    Raises OptionError: there are two targets.

    Args:
        values: of the command line, changed.
        defaults: of the parameters.
    """
    first = values.pop("first")
    if first is None:
        return
    is_alone = "prompt" in defaults and values["prompt"] == defaults["prompt"]
    if is_alone and (is_target_given or not _is_model(first, values["models"])):
        values["prompt"] = first
    elif is_target_given:
        raise OptionError("--target", values["target"], f"give it or the argument {first!r}, not both")
    else:
        values["target"] = first


def _is_model(word: str, models: Path | None) -> bool:
    """Whether a word names a model rather than being a prompt: a known name, a folder, a GGUF file, a hub id; or what
    is written as a path, for a mistyped one must not become a prompt."""
    from outrider.models.registry import is_gguf, known_models

    path = Path(word).expanduser()
    if re.search(r"\s", word) and not is_there(path):
        return False
    if re.match(r"\.{0,2}/|~", word) or re.search(r"\.gguf(:[\w.-]+)?$", word, re.IGNORECASE):
        return True
    is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", word) is not None
    is_file = is_there(path) and (path.is_dir() or is_gguf(path))
    return is_file or is_hub_id or word.split(":")[0] in known_models(models)
