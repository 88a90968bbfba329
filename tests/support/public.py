"""The public surface: names, parameters, fields, errors, commands and their options."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import outrider

_FOR_OTHER_LAYERS = "engine loop request read pair_state constant_k depends_on_draft"
NOT_PUBLIC = {f"Decoder.{name}" for name in _FOR_OTHER_LAYERS.split()}


def _parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def _members(kind: type) -> dict[str, list[str]]:
    """Public methods with their parameters; fields and properties, with none."""
    found = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        if isinstance(value, (staticmethod, classmethod)):
            value = getattr(kind, name)
        found[name] = _parameters(value) if callable(value) and not name.startswith("_") else []
    found |= {name: [] for name in getattr(kind, "__dataclass_fields__", {})}
    return {name: one for name, one in found.items() if name[0] != "_" and f"{kind.__name__}.{name}" not in NOT_PUBLIC}


def _commands(commands: Mapping[str, Any], path: str = "") -> dict[str, list[str]]:
    """Options and arguments of each command."""
    found = {}
    for name, command in commands.items():
        if hasattr(command, "commands"):
            found |= _commands(command.commands, f"{path}{name} ")
        else:
            options = [option for param in command.params for option in (*param.opts, *param.secondary_opts)]
            found[path + name] = sorted(options)
    return found


def public() -> dict[str, Any]:
    """All that is public: names with their members or parameters, errors with their bases, options of commands."""
    from typer.main import get_command

    from outrider.cli.app import app, command_of

    names = {name: getattr(outrider, name) for name in outrider.__all__}
    kinds = {name: one for name, one in names.items() if isinstance(one, type) and not issubclass(one, Exception)}
    functions = {name: _parameters(one) for name, one in names.items() if not isinstance(one, type)}
    python = {name: _members(one) | {"__init__": _parameters(one)} for name, one in kinds.items()} | functions
    commands = {name: command_of(name) for name in get_command(app).commands}
    errors = import_module("outrider.errors")
    bases = {name: getattr(errors, name).__base__.__name__ for name in errors.__all__}
    return {"python": python, "errors": bases, "commands": _commands(commands)}
