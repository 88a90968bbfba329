"""JSON in files of users."""

from __future__ import annotations

import json
from typing import Any

from outrider.errors import FileError


def parse_row(where: str, line: str | bytes) -> dict[str, Any]:
    """Parse a line as a JSON object.

    Args:
        where: file and line, for messages.

    Raises:
        FileError
    """
    row = parse_json(where, line)
    if not isinstance(row, dict):
        raise FileError(f"{where}: not a JSON object")
    return row


def parse_json(where: str, text: str | bytes) -> Any:
    """Parse JSON. Raises FileError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise FileError(f"{where}: not JSON ({error.msg} at {line}column {error.colno})") from None
    except UnicodeDecodeError:
        raise FileError(f"{where}: not UTF-8") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise FileError(f"{where}: a number has too many digits, or the nesting is too deep") from None
