"""Sample files as JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import FileError
from outrider.options import MASKS
from outrider.system.files import parse_row, read_text


class SampleLine(NamedTuple):
    """A sample of another system, from a file.

    Attributes:
        prompt, output: string, or token ids.
        options: sampling options, in the names of ``Sampling``; missing ones are unspecified.
        num_tokens: tokens of the output without the end token, as the system counted them; None if it did not.
        has_ended: an end token ended the output, whether or not it is among the ids.
    """

    number: int
    prompt: str | tuple[int, ...]
    output: str | tuple[int, ...]
    options: dict[str, Any]
    num_tokens: int | None = None
    has_ended: bool = False


def read_samples(path: Path, known: Sequence[str]) -> list[SampleLine]:
    """Read samples from JSON lines with these known options, each with ``prompt_ids`` or ``prompt``, ``token_ids`` or
    ``text``, and optionally ``options``, or the ``settings`` that ``outrider generate --output`` writes; ``num_tokens``
    and ``has_ended``. Skips rows with an error. Raises FileError: with file and line number."""
    # Not splitlines(): see PromptFile.
    numbered = enumerate(read_text(path).split("\n"), start=1)
    rows = [(number, parse_row(f"{path}, line {number}", line)) for number, line in numbered if line.strip()]
    whole = [(number, row) for number, row in rows if row.get("finish_reason") != "error"]
    return [_sample_of(f"{path}, line {number}", number, row, known) for number, row in whole]


def _sample_of(where: str, number: int, row: dict[str, Any], known: Sequence[str]) -> SampleLine:
    def tokens_or_text(ids_key: str, text_key: str) -> str | tuple[int, ...]:
        ids, text = row.get(ids_key), row.get(text_key)
        if isinstance(ids, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            return tuple(ids)
        if ids is None and isinstance(text, str):
            return text
        raise FileError(f"{where}: give {ids_key!r}, a list of token ids, or {text_key!r}, a string")

    own, settings = row.get("options"), row.get("settings")
    options = (settings or {}) if own is None else own
    if not isinstance(options, dict):
        raise FileError(f"{where}: the options {options!r} are not a JSON object")
    strange = sorted(set(own or ()) - set(known))
    if strange:
        raise FileError(f"{where}: unknown option {strange[0]!r}; choose from {', '.join(known)}")
    kept = {name: value for name, value in options.items() if name in known}
    if options.get("chat") and "prompt_ids" not in row:
        raise FileError(f"{where}: a chat prompt lacks its template's tokens: give 'prompt_ids'")
    masked = next((name for name in MASKS if options.get(name) not in (None, [])), None)
    if masked is not None:
        raise FileError(f"{where}: samples with a {masked} cannot be tested: leave this line out")
    bias = kept.get("logit_bias")
    if bias is not None and not (isinstance(bias, list) and all(isinstance(item, str) for item in bias)):
        raise FileError(f'{where}: logit_bias must be a list of strings, like ["42=-5"]')
    output = tokens_or_text("token_ids", "text")
    prompt = tokens_or_text("prompt_ids", "prompt")
    if isinstance(output, str):
        prompt = row.get("prompt", prompt)
        if not isinstance(prompt, str):
            remedy = "because both are tokenized together; a chat needs 'token_ids'"
            raise FileError(f"{where}: 'text' needs 'prompt', {remedy}")
    count, has_ended = row.get("num_tokens"), row.get("has_ended", False)
    if not (count is None or type(count) is int) or not isinstance(has_ended, bool):
        raise FileError(f"{where}: 'num_tokens' must be a whole number, and 'has_ended' true or false")
    return SampleLine(number, prompt, output, kept, count, has_ended)
