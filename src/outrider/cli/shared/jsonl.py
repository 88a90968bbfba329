"""Files of prompts and of samples: JSON lines, or plain lines."""

from __future__ import annotations

import difflib
import json
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, Any

from outrider.errors import FileError
from outrider.options import CONSTRAINTS, Sampling
from outrider.system.files import read_text
from outrider.system.ranks import here

_OPTIONS = tuple(field.name for field in fields(Sampling))
_NOTES = {  # fields that mean nothing here, but belong to files as they are found
    "anyone's": ("id", "metadata"),
    "Spec-Bench, MT-bench": ("question_id", "reference"),
    "HumanEval": ("task_id", "entry_point", "canonical_solution", "test"),
    "MBPP": ("text", "code", "test_list", "test_setup_code", "challenge_test_list"),
    "GSM8K": ("question", "answer"),
    "HellaSwag": (
        *("ind", "activity_label", "ctx", "ctx_a", "ctx_b", "endings"),
        *("source_id", "split", "split_type", "label"),
    ),
}
_FIELDS = ("prompt", "turns", "category", *_OPTIONS)
_KNOWN = frozenset(_FIELDS).union(*_NOTES.values())
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt of a file.

    Attributes:
        number: of its line, from 1.
        category: what kind of prompt it is, where the file says so.
        options: its own, fields of ``Sampling``. Their values are not checked yet.
    """

    number: int
    text: str
    category: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


class PromptFile:
    """The prompts of a file, each read when it is asked for. Of a long file nothing is kept but where its lines begin.

    A file whose first line that is not blank begins with ``{`` is JSON lines, each an object with a ``prompt``, or with
    ``turns`` of which the first is taken (as in Spec-Bench); perhaps with a ``category`` and with options of its own.
    In any other file each line that is not blank is a prompt.

    Raises:
        FileError: with file and line number. Whether it is UTF-8 is checked at once, the rest when a line is read.
    """

    def __init__(self, path: Path, stream: IO[bytes]) -> None:
        self.path = path
        self._stream = stream
        self._starts, self._numbers = array("Q"), array("Q")
        start = 0
        # Not splitlines(), which also splits at characters that may stand within a line of JSON.
        for number, line in enumerate(stream, start=1):
            if self._decode(number, start, line).strip():
                self._starts.append(start)
                self._numbers.append(number)
            start += len(line)
        if not self._starts:
            raise FileError(f"{path} has no prompts in it")
        self._is_json = self._text(0).lstrip().startswith("{")

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> PromptLine:
        number, text = self._numbers[index], self._text(index)
        return _prompt_of(self.path, number, text) if self._is_json else PromptLine(number, text)

    def __iter__(self) -> Iterator[PromptLine]:
        return (self[index] for index in range(len(self)))

    def _text(self, index: int) -> str:
        start = self._starts[index]
        self._stream.seek(start)
        return self._decode(self._numbers[index], start, self._stream.readline())

    def _decode(self, number: int, start: int, line: bytes) -> str:
        data = line.removeprefix(_BYTE_ORDER_MARK) if start == 0 else line
        try:
            return data.decode().removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise FileError(
                f"{self.path}, line {number}: not UTF-8 (byte {start + error.start}): convert it, with iconv say"
            ) from None


@contextmanager
def open_prompts(path: Path) -> Iterator[PromptFile]:
    """The prompts of a file, or of a pipe.

    Raises:
        FileError: with file and line number.
    """
    with ExitStack() as stack:
        try:
            stream: IO[bytes] = stack.enter_context(path.open("rb"))
            if not stream.seekable():  # a pipe is read once, the prompts more often
                if here().size > 1:
                    raise FileError(f"cannot read {path}: several processes read the prompts: put them into a file")
                copy = stack.enter_context(tempfile.TemporaryFile())
                shutil.copyfileobj(stream, copy)
                copy.seek(0)
                stream = copy
            prompts = PromptFile(path, stream)
        except OSError as error:
            raise FileError(f"cannot read {path}: {error.strerror}") from None
        yield prompts


def read_prompts(path: Path) -> list[PromptLine]:
    """All prompts of a file, for commands in which they have no options of their own.

    Raises:
        FileError: with file and line number.
    """
    with open_prompts(path) as prompts:
        lines = list(prompts)
    for line in lines:
        for name in line.options:
            raise FileError(
                f"{path}, line {line.number}: this command takes no options of single prompts ({name!r}), only "
                "'outrider generate' does: give them on the command line, for all prompts"
            )
    return lines


def _prompt_of(path: Path, number: int, line: str) -> PromptLine:
    row = parse_row(path, number, line)
    for name in row:
        if name not in _KNOWN:
            nearest = difflib.get_close_matches(name, _FIELDS, n=1)
            remedy = f"did you mean {nearest[0]!r}?" if nearest else "put notes of your own under 'metadata'"
            raise FileError(f"{path}, line {number}: a prompt has no field {name!r}: {remedy}")
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
    # As in the rows of an API, null is as good as nothing.
    given = {name: row[name] for name in _OPTIONS if row.get(name) is not None}
    return PromptLine(number, prompt, category, _options_of(f"{path}, line {number}", given))


def _options_of(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options as ``Sampling`` takes them: JSON has no keys that are numbers, and no infinity."""
    for name, value in given.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise FileError(f"{where}: {name} is a number of too many digits")
    if not isinstance(given.get("ignore_eos", False), bool):
        raise FileError(f"{where}: ignore_eos is true or false, not {given['ignore_eos']!r}")
    for name in ("stop", "stop_token_ids"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        bias = given["logit_bias"]
        try:
            if any(isinstance(value, bool) for value in bias.values()):
                raise ValueError
            given["logit_bias"] = {int(token_id): float(value) for token_id, value in bias.items()}
        except (AttributeError, ValueError, TypeError, OverflowError):
            raise FileError(
                f'{where}: logit_bias is an object of token ids and numbers, like {{"42": -5, "43": "-inf"}}'
            ) from None
    return given


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
    with ``options``, or with the ``settings`` that ``outrider generate --output`` writes. Where that wrote an error,
    there is no text to read.

    Args:
        known: names of options.

    Raises:
        FileError: with file and line number.
    """
    # Not splitlines(): see PromptFile.
    numbered = enumerate(read_text(path).split("\n"), start=1)
    rows = [(number, parse_row(path, number, line)) for number, line in numbered if line.strip()]
    return [_sample_of(path, number, row, known) for number, row in rows if row.get("finish_reason") != "error"]


def _sample_of(path: Path, number: int, row: dict[str, Any], known: Sequence[str]) -> SampleLine:
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
    masked = next((name for name in CONSTRAINTS if options.get(name) is not None), None)
    if masked is not None:
        raise FileError(f"{path}, line {number}: texts under a {masked} are not judged here: leave this line out")
    bias = kept.get("logit_bias")
    if bias is not None and not (isinstance(bias, list) and all(isinstance(item, str) for item in bias)):
        raise FileError(f'{path}, line {number}: logit_bias is a list of texts, like ["42=-5"]')
    prompt, output = tokens_or_text("prompt_ids", "prompt"), tokens_or_text("token_ids", "text")
    if isinstance(output, str) and not isinstance(prompt, str):
        raise FileError(f"{path}, line {number}: a 'text' needs a 'prompt', so that both are cut into tokens together")
    return SampleLine(number, prompt, output, kept)


def parse_row(path: Path, number: int, line: str | bytes) -> dict[str, Any]:
    """The object that a line of JSON is. Raises FileError, with file and line number."""
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
