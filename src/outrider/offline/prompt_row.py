"""A row of a prompt file: a prompt, or the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import FileError, OptionError, PromptError
from outrider.options import Sampling, nearest
from outrider.text.chat import FIELDS, Chat, ChatOptions

_OPTIONS = tuple(field.name for field in fields(Sampling))
_LABELS = ("category", "id")
NOTES = {  # ignored fields of common files
    "anyone's": ("metadata",),
    "Spec-Bench, MT-bench": ("question_id", "reference"),
    "HumanEval": ("task_id", "entry_point", "canonical_solution", "test"),
    "MBPP": ("text", "code", "test_list", "test_setup_code", "challenge_test_list"),
    "GSM8K": ("question", "answer"),
    "HellaSwag": (
        *("ind", "activity_label", "ctx", "ctx_a", "ctx_b", "endings"),
        *("source_id", "split", "split_type", "label"),
    ),
}
_PROMPTS = ("prompt", "messages", "turns")
_FIELDS = (*_PROMPTS, *FIELDS, "category", "id", *_OPTIONS)
_KNOWN = frozenset(_FIELDS).union(*NOTES.values())


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt from a file.

    Attributes:
        place: in the file, "line 3" or "item 3", from 1.
        prompt: string, or a chat.
        labels: fields copied to the output row: ``category`` and ``id``.
        options: per-prompt fields of ``Sampling``, not checked yet.
    """

    place: str
    prompt: str | Chat
    labels: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Text of the prompt; of a chat, what the user said last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt.asked

    @property
    def category(self) -> str | None:
        return self.labels.get("category")

    @property
    def source(self) -> dict[str, Any]:
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        return {"messages": self.prompt.messages, **self.prompt.options.given()}


def prompt_of(path: object, place: str, row: dict[str, Any]) -> PromptLine:
    """Parse a row as a prompt. Raises FileError: with file and place."""
    where = f"{path}, {place}"
    labels = {name: row[name] for name in _LABELS if row.get(name) is not None}
    _check_characters(where, labels)
    if not isinstance(labels.get("category", ""), str):
        raise FileError(f"{where}: the category {labels['category']!r} is not a string")
    for name in row:
        if name not in _KNOWN:
            near = nearest(name, _FIELDS)
            remedy = f"did you mean {near!r}?" if near else "put your own notes under 'metadata'"
            raise FileError(f"{where}: a prompt has no field {name!r}: {remedy}")
    if "prompt" in row and "messages" in row:
        raise FileError(f"{where}: give a prompt or messages, not both")
    name = next((name for name in _PROMPTS if name in row), "prompt")
    prompt: Any = _chat(where, row) if name == "messages" else row.get(name)
    if name == "turns":
        prompt = prompt[0] if isinstance(prompt, list) and prompt else None
    if name != "messages":
        if not isinstance(prompt, str):
            raise FileError(f"{where}: the key {name!r} has no string")
        for other in FIELDS:
            if row.get(other) is not None:
                raise FileError(f"{where}: {other} is for the messages of a chat: give 'messages', not a {name}")
    # As in API requests, null means absent.
    options = {name: row[name] for name in _OPTIONS if row.get(name) is not None}
    _check_characters(where, {name: row[name] for name in (name, *FIELDS) if name in row} | options)
    return PromptLine(place, prompt, labels, _options_of(where, options))


def _chat(where: str, row: Mapping[str, Any]) -> Chat:
    from outrider.serve.bodies import read_messages
    from outrider.serve.http_errors import Refusal

    options = {name: row[name] for name in FIELDS if row.get(name) is not None}
    try:
        return Chat(read_messages(row["messages"]), ChatOptions(**options))
    except (Refusal, OptionError, PromptError) as error:
        raise FileError(f"{where}: {error}") from None


def _check_characters(where: str, values: Mapping[str, Any]) -> None:
    """Raises FileError for lone surrogates, which cannot be written to a file."""
    for name, value in values.items():
        try:
            (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
        except UnicodeEncodeError as error:
            raise FileError(f"{where}: the {name} has a lone surrogate at {error.start}") from None


def _options_of(where: str, given: dict[str, Any]) -> dict[str, Any]:
    """Options as ``Sampling`` takes them: JSON has neither numeric keys nor infinities."""
    for name, value in given.items():
        if isinstance(value, int) and abs(value) >= 2**63:
            raise FileError(f"{where}: {name} is a number with too many digits")
    if not isinstance(given.get("ignore_eos", False), bool):
        raise FileError(f"{where}: ignore_eos must be true or false, not {given['ignore_eos']!r}")
    for name in ("stop", "stop_token_ids", "bad_words"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        bias = given["logit_bias"]
        try:
            if any(isinstance(value, bool) for value in bias.values()):
                raise ValueError
            given["logit_bias"] = {int(token_id): float(value) for token_id, value in bias.items()}
        except (AttributeError, ValueError, TypeError, OverflowError):
            example = '{"42": -5, "43": "-inf"}'
            raise FileError(f"{where}: logit_bias must map token ids to numbers, like {example}") from None
    return given
