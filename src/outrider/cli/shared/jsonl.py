"""Files of prompts and of completions: JSON lines, or plain lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.errors import FileError
from outrider.system.files import read_bytes, read_text

_ROW_BEGINS = b'{"index": '  # so does every line that ``generate --output`` writes


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a file.

    Attributes:
        number: of its line, from 1.
        category: what kind of prompt it is, where the file says so.
    """

    number: int
    text: str
    category: str | None = None


def read_prompts(path: Path) -> list[PromptLine]:
    """The prompts of a file.

    A file whose first line that is not blank begins with ``{`` is JSON lines, each an object with a ``prompt``, or with
    ``turns`` of which the first is taken (as in Spec-Bench), and perhaps a ``category``; in any other file each line
    that is not blank is a prompt.

    Raises:
        FileError: with file and line number.
    """
    numbered = _numbered_lines(path)
    if not numbered:
        raise FileError(f"{path} has no prompts in it")
    if not numbered[0][1].lstrip().startswith("{"):
        return [PromptLine(number, line) for number, line in numbered]
    return [_prompt_of(path, number, line) for number, line in numbered]


def _numbered_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that are not blank, with their numbers."""
    # Not splitlines(), which also splits at characters that may stand within a line of JSON.
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt_of(path: Path, number: int, line: str) -> PromptLine:
    row = _parse_row(path, number, line)
    key, prompt = "prompt", row.get("prompt")
    if "prompt" not in row and "turns" in row:
        turns = row["turns"]
        key, prompt = "turns", turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(prompt, str):
        raise FileError(f"{path}, line {number}: there is no text under the key {key!r}")
    category = row.get("category")
    if category is not None and not isinstance(category, str):
        raise FileError(f"{path}, line {number}: the category {category!r} is not a text")
    for name, text in ((key, prompt), ("category", category or "")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise FileError(
                f"{path}, line {number}: the {name} has half a character at {error.start} (a lone surrogate)"
            ) from None
    return PromptLine(number, prompt, category)


@dataclass(frozen=True, slots=True)
class SampleLine:
    """A text that some system has written, of a file.

    Attributes:
        prompt, output: text, or token ids.
        options: how it was sampled, in the names of ``Sampling``; what is not there is not said.
    """

    number: int
    prompt: str | tuple[int, ...]
    output: str | tuple[int, ...]
    options: dict[str, Any]


def read_samples(path: Path, known: Sequence[str]) -> list[SampleLine]:
    """The texts of a file of JSON lines: each with ``prompt_ids`` or ``prompt``, and ``token_ids`` or ``text``; perhaps
    with ``options``, or with the ``settings`` that ``outrider generate --output`` writes.

    Args:
        known: names of options.

    Raises:
        FileError: with file and line number.
    """
    return [_sample_of(path, number, line, known) for number, line in _numbered_lines(path)]


def _sample_of(path: Path, number: int, line: str, known: Sequence[str]) -> SampleLine:
    row = _parse_row(path, number, line)

    def tokens_or_text(ids_key: str, text_key: str) -> str | tuple[int, ...]:
        ids, text = row.get(ids_key), row.get(text_key)
        if isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return tuple(ids)
        if ids is None and isinstance(text, str):
            return text
        raise FileError(f"{path}, line {number}: give {ids_key!r}, a list of token ids, or {text_key!r}, a text")

    own, settings = row.get("options"), row.get("settings")
    options = settings if own is None else own
    if options is None:
        options = {}
    if not isinstance(options, dict):
        raise FileError(f"{path}, line {number}: the options {options!r} are not a JSON object")
    strange = sorted(set(own or ()) - set(known))
    if strange:
        raise FileError(f"{path}, line {number}: there is no option {strange[0]!r}; those are {', '.join(known)}")
    kept = {name: value for name, value in options.items() if name in known}
    if options.get("chat") and "prompt_ids" not in row:
        raise FileError(f"{path}, line {number}: the prompt of a chat is not what was fed: give its 'prompt_ids'")
    bias = kept.get("logit_bias")
    if bias is not None and not (isinstance(bias, list) and all(isinstance(item, str) for item in bias)):
        raise FileError(f'{path}, line {number}: logit_bias is a list of texts, like ["42=-5"]')
    prompt, output = tokens_or_text("prompt_ids", "prompt"), tokens_or_text("token_ids", "text")
    if isinstance(output, str) and not isinstance(prompt, str):
        raise FileError(f"{path}, line {number}: a 'text' needs a 'prompt', so that both are cut into tokens together")
    return SampleLine(number, prompt, output, kept)


def _parse_row(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise FileError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from None
    except UnicodeDecodeError:
        raise FileError(f"{path}, line {number}: not UTF-8") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise FileError(f"{path}, line {number}: a number of too many digits, or too deep nesting") from None
    if not isinstance(row, dict):
        raise FileError(f"{path}, line {number}: not a JSON object")
    return row


def read_finished(path: Path, prompts: Sequence[str], settings: dict[str, Any]) -> int:
    """How many prompts an earlier, interrupted run has written to its output. A half-written last line is cut off.

    Raises:
        FileError: the file is not the beginning of this run's output: it has another prompt, or other settings, or it
            is no output at all. Then it is left as it is.
    """
    if not path.exists():
        return 0
    *lines, half = read_bytes(path).split(b"\n")
    for index, line in enumerate(lines):
        row = _parse_row(path, index + 1, line)
        expected = {"index": index, "prompt": prompts[index] if index < len(prompts) else None, "settings": settings}
        differing = [key for key, value in expected.items() if row.get(key) != value]
        if differing:
            raise FileError(
                f"{path}, line {index + 1} comes from another run (its {', '.join(differing)} differ): "
                "choose another output file, or remove this one"
            )
    if half:
        if not half.startswith(_ROW_BEGINS) and not _ROW_BEGINS.startswith(half):
            raise FileError(
                f"{path}, line {len(lines) + 1} was not written by this command: choose another output file"
            )
        with path.open("r+b") as stream:
            stream.truncate(path.stat().st_size - len(half))
    return len(lines)
