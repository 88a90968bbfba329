"""The public surface: names, parameters, fields, errors, commands and their options.

python tests/public.py        # writes tests/golden/public.json, at each release
"""

import inspect
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import outrider

LIST = Path(__file__).parent / "golden" / "public.json"
NOT_PUBLIC = {"Decoder.engine", "Decoder.request", "Decoder.read", "Decoder.pair_state"}  # for other layers


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
    homes = {name: name for name in errors.__all__} | errors.DEPRECATED
    return {name: getattr(errors, home).__base__.__name__ for name, home in homes.items()}


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
    """Everything that a new version keeps, or deprecates first (CONTRIBUTING.md)."""
    from typer.main import get_command

    from outrider.cli.app import app

    return {"python": _python(), "errors": _errors(), "commands": _commands(get_command(app))}


def missing(old: Any, new: Any, path: str = "") -> list[str]:
    """What the old list has and the new one lacks. New names and new parameters break nobody."""
    if isinstance(old, dict):
        gone = [f"{path}{name}" for name in old if name not in new]
        return gone + [line for n in old if n in new for line in missing(old[n], new[n], f"{path}{n}.")]
    if isinstance(old, list):
        return [f"{path}{name}" for name in old if name not in new]
    return [] if old == new else [f"{path}{old}"]


if __name__ == "__main__":
    LIST.write_text(json.dumps(public(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
