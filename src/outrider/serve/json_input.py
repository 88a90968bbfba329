"""JSON that clients send: no deeper than what recursive programs, chat templates among them, can read."""

from __future__ import annotations

import json
from typing import Any

from outrider.serve.http_errors import Refusal

_MOST_DEPTH = 100  # nested objects and lists; Python stops at a thousand calls, and a template makes several for each


def read_json(text: str | bytes, param: str | None = None) -> Any:
    """Read a value.

    Args:
        param: the field that has it; None: it is the body.

    Raises:
        Refusal: it is nested too deeply.
        ValueError: it is not JSON.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise _too_deep(param) from None
    if isinstance(value, dict):
        for name, part in value.items():
            if _is_deep(part, _MOST_DEPTH - 1):
                raise _too_deep(param or name)
    elif _is_deep(value, _MOST_DEPTH):
        raise _too_deep(param)
    return value


def _is_deep(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most + 1):
        parts = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [part for inner in parts for part in inner]
        if not level:
            return False
    return True


def _too_deep(param: str | None) -> Refusal:
    return Refusal(f"{param or 'the body'} is nested deeper than {_MOST_DEPTH} objects and lists", param=param)
