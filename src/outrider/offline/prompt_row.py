"""A row of a prompt file: a prompt, the messages of a chat, or a request in OpenAI's batch format.

Source of that format: https://platform.openai.com/docs/api-reference/batch/request-input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from outrider.errors import FileError
from outrider.options import CONSTRAINTS, Sampling, instead_of, own_name
from outrider.text.chat import FIELDS, Chat

_OPTIONS = tuple(field.name for field in fields(Sampling))
_LABELS = ("category", "id", "custom_id")
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
_BATCH_FIELDS = ("custom_id", "method", "url", "body", "id", "category", "metadata")


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt from a file.

    Attributes:
        place: in the file, "line 3" or "item 3", from 1.
        prompt: string, or a chat.
        labels: fields copied to the output row: ``category`` and ``id``, or ``custom_id``.
        options: per-prompt fields of ``Sampling``, not checked yet.
        model: the requested model.
    """

    place: str
    prompt: str | Chat
    labels: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    model: str | None = None

    @property
    def text(self) -> str:
        """Text of the prompt; of a chat, what the user said last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt.asked

    @property
    def category(self) -> str | None:
        """Kind of prompt, if the file has one."""
        return self.labels.get("category")

    @property
    def source(self) -> dict[str, Any]:
        """Prompt as written to its output row."""
        if isinstance(self.prompt, str):
            return {"prompt": self.prompt}
        return {"messages": self.prompt.messages, **self.prompt.options.given()}


def prompt_of(path: object, place: str, row: dict[str, Any]) -> PromptLine:
    """Parse a row as a prompt.

    Raises:
        FileError: with file and place.
    """
    where = f"{path}, {place}"
    labels = {name: row[name] for name in _LABELS if row.get(name) is not None}
    _check_characters(where, labels)
    if not isinstance(labels.get("category", ""), str):
        raise FileError(f"{where}: the category {labels['category']!r} is not a string")
    if "body" in row:
        return _of_batch(where, place, row, labels)
    _check_names(where, "a prompt", row, _FIELDS, _KNOWN)
    given = [name for name in ("prompt", "messages") if name in row]
    if len(given) > 1:
        raise FileError(f"{where}: give a prompt or messages, not both")
    name = given[0] if given else "turns" if "turns" in row else "prompt"
    prompt: Any = row.get(name)
    if name == "messages":
        prompt = _parse_as_server(where, _chat, row)
    elif name == "turns":
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


def _of_batch(where: str, place: str, row: dict[str, Any], labels: dict[str, Any]) -> PromptLine:
    """Parse a batch request as the server would."""
    from outrider.serve.protocol import parse_chat, parse_completions

    _check_names(where, "a batch request", row, _BATCH_FIELDS, frozenset(_BATCH_FIELDS))
    kinds: dict[Any, Callable[[Mapping[str, Any]], Any]] = {
        "/v1/chat/completions": parse_chat,
        "/v1/completions": parse_completions,
    }
    if row.get("method", "POST") != "POST":
        raise FileError(f"{where}: the method must be POST, not {row['method']!r}")
    url, body = row.get("url"), row["body"]
    if url not in kinds:
        raise FileError(f"{where}: the url must be one of {', '.join(kinds)}, not {url!r}")
    if not isinstance(body, dict):
        raise FileError(f"{where}: the body is not a JSON object")
    _check_characters(where, {"body": body})
    ask = _parse_as_server(f"{where}, body", kinds[url], body)
    for name, value, unset in (
        ("n", ask.n, 1),
        ("stream", ask.is_stream, False),
        ("echo", ask.echo, False),
        ("acceptance", ask.acceptance, None),
        ("num_draft_tokens", ask.num_draft_tokens, None),
        ("return_tokens_as_token_ids", ask.as_token_ids, False),
        ("add_special_tokens", ask.adds_special, None),
        ("allowed_token_ids", ask.allowed_ids, None),
        ("include_reasoning", ask.shows_thoughts, True),
        ("include_stop_str_in_output", ask.includes_stop, False),
        ("prompt_logprobs", ask.num_prompt_logprobs, None),
        ("skip_special_tokens", ask.skips_special, True),
        ("truncate_prompt_tokens", ask.most_prompt_tokens, None),
    ):
        if value != unset:
            raise FileError(f"{where}, body: {name} = {value!r} is not supported in a prompt file: leave it out")
    if ask.tools is not None and (ask.tools.demands_form or ask.structured_by is not None):
        message = "tools that must be called, called once, strictly, or beside a constraint are not supported in a"
        raise FileError(f"{where}, body: {message} prompt file: leave them to the model")
    prompt, *others = ask.prompts
    if others or not isinstance(prompt, str | Chat):
        raise FileError(f"{where}, body: the prompt must be one string")
    options = {
        name: value
        for name, value in ask.options.items()
        if body.get(ask.names.get(name, name)) is not None or (name in CONSTRAINTS and value is not None)
    }
    if body.get(ask.names["max_tokens"]) is not None:
        options["max_new_tokens"] = ask.max_tokens  # else the command's default, not the server's
    return PromptLine(place, prompt, labels, _options_of(where, options), ask.model)


def _chat(row: Mapping[str, Any]) -> Chat:
    from outrider.serve.protocol import parse_chat_prompt

    return parse_chat_prompt(row)


def _parse_as_server(where: str, parse: Callable[[Any], Any], value: Any) -> Any:
    """Parse a value as the server would."""
    from outrider.serve.http_errors import Refusal

    try:
        return parse(value)
    except Refusal as error:
        raise FileError(f"{where}: {error}") from None


def _check_names(where: str, what: str, row: Mapping[str, Any], names: Sequence[str], known: frozenset[str]) -> None:
    """Raises FileError for an unknown field.

    Args:
        names: names to suggest.
    """
    for name in row:
        if name not in known:
            meant = own_name(name, names)
            instead = instead_of(name) or "put your own notes under 'metadata'"
            remedy = f"did you mean {meant!r}?" if meant else instead
            raise FileError(f"{where}: {what} has no field {name!r}: {remedy}")


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
            raise FileError(
                f'{where}: logit_bias must map token ids to numbers, like {{"42": -5, "43": "-inf"}}'
            ) from None
    return given
