"""Signatures of commands.

A command takes a group of options as one parameter, ``pair: PairOptions``, or part of a group, ``pair:
Annotated[PairOptions, ("target", "device")]``; ``flat`` expands the groups into the signature that Typer reads.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from typer.models import ArgumentInfo

from outrider.cli.shared.options import OPTION, is_given
from outrider.cli.shared.output import check_files
from outrider.errors import OptionError

_FirstArgument = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="In place of --target.", show_default=False)
]
_CONTEXT = "typer_context"  # of commands that take none
_EMPTY = inspect.Parameter.empty


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each option group in a command's signature by the group's fields, for Typer; let the target stand first,
    in place of its option; and check the files before the command begins."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in get_type_hints(command).items() if is_dataclass(hint)}
    members: dict[str, list[str]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            own = get_type_hints(groups[name], include_extras=True)
            (chosen,) = getattr(hints[name], "__metadata__", [own])
            taken = [field for field in fields(groups[name]) if field.name in chosen]
            members[name] = [field.name for field in taken]
            for field in taken:
                hint = Annotated[own[field.name], field.metadata[OPTION]] if field.metadata else own[field.name]
                parameters.append(_parameter(field.name, hint, field.default))
        else:
            parameters.append(_parameter(name, hints[name], parameter.default))
    # No other argument may stand first.
    has_first = any(one.name == "target" for one in parameters) and not any(
        isinstance(one, ArgumentInfo)
        for parameter in parameters
        if parameter.default is _EMPTY
        for one in getattr(parameter.annotation, "__metadata__", ())
    )
    if has_first:
        parameters.insert(0, _parameter("first", _FirstArgument, None))
    own_context = next((name for name, hint in hints.items() if hint is typer.Context), None)
    if own_context is None:
        parameters.append(_parameter(_CONTEXT, typer.Context))

    @functools.wraps(command)
    def flattened(**values: Any) -> None:
        context = values.pop(_CONTEXT) if own_context is None else values[own_context]
        if has_first:
            _place_first(values, is_target_given=is_given(context, "target"))
        check_files(values)
        arguments = {name: group(**{one: values.pop(one) for one in members[name]}) for name, group in groups.items()}
        command(**arguments, **values)

    flattened.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flattened.__annotations__ = {p.name: p.annotation for p in parameters}
    del flattened.__wrapped__  # else inspect finds the command's own signature
    return flattened


def _parameter(name: str, hint: Any, default: Any = _EMPTY) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _place_first(values: dict[str, Any], *, is_target_given: bool) -> None:
    """Take the first argument as the target, and change the values. If it is alone, it is the prompt beside --target,
    and where a prompt is needed: in ``generate`` without --prompts. Raises OptionError: there are two targets."""
    first = values.pop("first")
    is_alone = first is not None and values.get("prompt", first) is None
    if is_alone and (is_target_given or values.get("prompts", first) is None):
        values["prompt"] = first
    elif first is not None and is_target_given:
        raise OptionError("--target", values["target"], f"give it or the argument {first!r}, not both")
    elif first is not None:
        values["target"] = first
