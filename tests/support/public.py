"""The public surface: names, parameters, fields, errors, commands and their options."""

import inspect
from importlib import import_module
from typing import Any

import outrider

NOT_PUBLIC = {
    "Decoder.engine",
    "Decoder.loop",
    "Decoder.request",
    "Decoder.read",
    "Decoder.pair_state",
    "Decoder.constant_k",
    "Decoder.depends_on_draft",
}  # for other layers


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def _members(kind: type) -> dict[str, list[str]]:
    """Public methods with their parameters; fields and properties, with none."""
    found = {}
    for name in dir(kind):
        if name.startswith("_") or f"{kind.__name__}.{name}" in NOT_PUBLIC:
            continue
        value = inspect.getattr_static(kind, name)
        if isinstance(value, (staticmethod, classmethod)):
            value = getattr(kind, name)
        found[name] = _parameters(value) if callable(value) else []
    fields = getattr(kind, "__dataclass_fields__", {})
    return found | {name: [] for name in fields if f"{kind.__name__}.{name}" not in NOT_PUBLIC}


def _python() -> dict[str, Any]:
    return {
        name: _members(value) | {"__init__": _parameters(value)} if isinstance(value, type) else _parameters(value)
        for name in outrider.__all__
        if not _is_error(value := getattr(outrider, name))
    }


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _errors() -> dict[str, str]:
    """Each error with its base."""
    errors = import_module("outrider.errors")
    return {name: getattr(errors, name).__base__.__name__ for name in errors.__all__}


def _commands(group: Any, path: str = "") -> dict[str, list[str]]:
    """Options and arguments of each command."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= _commands(command, f"{path}{name} ")
        else:
            options = [option for param in command.params for option in (*param.opts, *param.secondary_opts)]
            found[path + name] = sorted(options)
    return found


def public() -> dict[str, Any]:
    """All that is public (CONTRIBUTING.md)."""
    from typer.main import get_command

    from outrider.cli.app import app

    return {"python": _python(), "errors": _errors(), "commands": _commands(get_command(app))}
