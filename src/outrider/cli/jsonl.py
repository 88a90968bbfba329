"""Files of prompts and of completions: JSON lines, or plain lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outrider.errors import FileError


def read_prompts(path: Path) -> list[tuple[int, str]]:
    """Prompts with their line numbers.

    A file whose first line that is not blank begins with ``{`` is JSON lines, each an object with a ``prompt``; in any
    other file each line that is not blank is a prompt.

    Raises:
        FileError: with file and line number.
    """
    text = _read_text(path)
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise FileError(f"{path} has no prompts in it")
    if not lines[0][1].lstrip().startswith("{"):
        return lines
    return [(number, _prompt_of(path, number, line)) for number, line in lines]


def _prompt_of(path: Path, number: int, line: str) -> str:
    row = _parse_row(path, number, line)
    prompt = row.get("prompt")
    if not isinstance(prompt, str):
        raise FileError(f"{path}, line {number}: there is no text under the key 'prompt'")
    return prompt


def _parse_row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise FileError(f"{path}, line {number}: not a JSON object")
    return row


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise FileError(
            f"{path}, line {line}: not UTF-8 (byte {error.start}): convert it, with iconv for example"
        ) from None


def read_finished(path: Path, prompts: list[str], settings: dict[str, Any]) -> int:
    """How many prompts an earlier, interrupted run has written to its output. A half-written last line is cut off.

    Raises:
        FileError: the file is not the beginning of this run's output: another prompt, or other settings.
    """
    if not path.exists() or path.stat().st_size == 0:
        return 0
    text = _read_text(path)
    whole, end, _ = text.rpartition("\n")
    if whole + end != text:
        path.write_text(whole + end, encoding="utf-8")
    lines = whole.splitlines()
    for index, line in enumerate(lines):
        row = _parse_row(path, index + 1, line)
        expected = {"index": index, "prompt": prompts[index] if index < len(prompts) else None, "settings": settings}
        differing = [key for key, value in expected.items() if row.get(key) != value]
        if differing:
            raise FileError(
                f"{path}, line {index + 1} comes from another run (its {', '.join(differing)} differ): "
                "choose another output file, or remove this one"
            )
    return len(lines)
