"""Request bodies, checked.

``fields`` lists the fields. ``Sampling`` checks the ranges of sampling options and names the option.

Sources: OpenAI's API reference (completions, chat completions).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import PromptError, UsageError
from outrider.serve.fields import SAMPLING, check_names, given_names
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.json_input import read_json
from outrider.serve.structured import structure_of
from outrider.serve.tools import ToolUse, descriptions_of, tools_of, with_calls_read
from outrider.text.chat import FIELDS, Chat, ChatOptions, read_message
from outrider.text.chat_images import has_images
from outrider.text.tokenizer import Prompt

MOST_CHOICES = 16  # n
_MOST_BAD_WORDS = 1000
_MOST_STOPS, _MOST_STOP_CHARACTERS = 16, 1000
_MOST_LOGPROBS = 20
_NOT_READ = ("audio", "function_call")  # of messages: no template reads these
_DEFAULT_MAX_TOKENS = 16  # of completions, as OpenAI's; a chat may fill the context


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A generation request, checked as far as possible without the models.

    Attributes:
        prompts: strings, lists of token ids, or a chat.
        n: completions per prompt.
        max_tokens: None for the rest of the context; 0 for none, with ``echo``.
        options: other fields of ``Sampling``.
        num_draft_tokens: K; None for the server's default.
        acceptance: the requested rule; None for the server's.
        priority: within a client, the lowest number goes first.
        names: the body's names for options with aliases.
        structured_by: the field that constrains the output; ``options`` has the constraint in the library's form.
        tools: those that may be called.
        splits_thoughts: thoughts are no part of the content.
        shows_thoughts: they are sent.
        skips_special: special tokens have no text.
        adds_special: see ``encode``.
        includes_stop: see ``RowText``.
        num_prompt_logprobs: alternatives to each prompt token, with which it is scored; None: it is not scored.
        most_prompt_tokens: the last ones are kept; -1: as many as leave room for the output; None: all.
        allowed_ids: the only tokens that may be generated; None: all.
        fetched: images of the prompts, by their addresses; the server fills it before it prepares the request.
        as_token_ids: log-probabilities show tokens as ``token_id:7``, since some have the same text.
    """

    model: str | None
    prompts: Sequence[Prompt]
    n: int = 1
    max_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    num_draft_tokens: int | None = None
    acceptance: str | None = None
    echo: bool = False
    is_stream: bool = False
    includes_usage: bool = False
    has_usage_in_chunks: bool = False
    as_token_ids: bool = False
    priority: int = 0
    names: Mapping[str, str] = field(default_factory=dict)
    structured_by: str | None = None
    tools: ToolUse | None = None
    splits_thoughts: bool = True
    shows_thoughts: bool = True
    skips_special: bool = True
    adds_special: bool | None = None
    includes_stop: bool = False
    num_prompt_logprobs: int | None = None
    most_prompt_tokens: int | None = None
    allowed_ids: Sequence[int] | None = None
    fetched: dict[str, bytes] = field(default_factory=dict)

    @property
    def num_logprobs(self) -> int | None:
        value: int | None = self.options.get("logprobs")
        return value

    @property
    def scores(self) -> dict[str, int]:
        """The fields for which the prompts are scored, with the number of alternatives."""
        echoed = self.num_logprobs if self.echo else None
        found = {"prompt_logprobs": self.num_prompt_logprobs, "logprobs": echoed}
        return {name: num_top for name, num_top in found.items() if num_top is not None}


def parse_body(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises Refusal."""
    try:
        value = read_json(body)
    except ValueError as error:
        raise Refusal(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise Refusal("the body is not a JSON object")
    return value


def parse_completions(body: Mapping[str, Any]) -> ParsedRequest:
    """Parse the body of ``/v1/completions``. Raises Refusal."""
    logprobs = _integer(body, "logprobs", 0, _MOST_LOGPROBS)
    echo = _flag(body, "echo")
    return _parse(
        body,
        "completions",
        prompts=_prompts(body.get("prompt")),
        logprobs=logprobs,
        echo=echo,
        least_tokens=0 if echo else 1,
        default_tokens=_DEFAULT_MAX_TOKENS,
    )


def parse_chat(body: Mapping[str, Any]) -> ParsedRequest:
    """Parse the body of ``/v1/chat/completions``. Raises Refusal."""
    top = _integer(body, "top_logprobs", 0, _MOST_LOGPROBS)
    has_logprobs = _flag(body, "logprobs")
    if top and not has_logprobs:
        raise Refusal("top_logprobs needs logprobs: true", param="top_logprobs")
    tools = tools_of(body)
    if tools is not None and tools.is_forced and body.get("stop"):
        raise Refusal("stop may cut the call that tool_choice demands: give one of the two", param="stop")
    return _parse(
        body,
        "chat",
        prompts=[_chat_prompt({**body, "tools": descriptions_of(tools) or None})],
        logprobs=(top or 0) if has_logprobs else None,
        echo=False,
        least_tokens=1,
        default_tokens=None,
        tools=tools,
    )


def _parse(
    body: Mapping[str, Any],
    kind: str,
    *,
    prompts: Sequence[Prompt],
    logprobs: int | None,
    echo: bool,
    least_tokens: int,
    default_tokens: int | None,
    tools: ToolUse | None = None,
) -> ParsedRequest:
    check_names(body, kind)
    names = given_names(body)
    n = _integer(body, "n", 1, MOST_CHOICES) or 1
    best_of = _integer(body, "best_of", 1, MOST_CHOICES)
    if best_of not in (None, n):
        raise Refusal(f"best_of = {best_of} is not supported: leave it out, or make it n", param="best_of")
    max_tokens = _integer(body, names["max_tokens"], least_tokens, None)
    given = {key: body.get(names.get(key, key)) for key in SAMPLING}
    options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if isinstance(words := body.get("bad_words"), list) and len(words) > _MOST_BAD_WORDS:
        raise Refusal(f"bad_words has {len(words)} items, of at most {_MOST_BAD_WORDS}", param="bad_words")
    structure, structured_by = structure_of(body)
    options["ignore_eos"] = _flag(body, "ignore_eos")
    options["min_tokens"] = _integer(body, names["min_tokens"], 0, None) or 0
    max_tokens = default_tokens if max_tokens is None else max_tokens
    if max_tokens is not None and options["min_tokens"] > max_tokens:
        message = f"{names['min_tokens']} is more than {names['max_tokens']}, {max_tokens}"
        raise Refusal(message, param=names["min_tokens"])
    top_k = _integer(body, "top_k", -1, None)
    seed = _integer(body, "seed", None, None)
    stream = body.get("stream_options")
    if not isinstance(stream, Mapping | None):
        raise Refusal("stream_options must be an object", param="stream_options")
    k = _integer(body, "num_draft_tokens", 0, None)
    has_draft = body.get("draft") is None or _flag(body, "draft")
    return ParsedRequest(
        model=_text(body, "model"),
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        options=options
        | structure
        | {
            **({} if top_k is None else {"top_k": max(top_k, 0)}),
            # Clients send negative numbers too.
            "seed": None if seed is None else seed & (2**63 - 1),
            "stop": _stops(body.get("stop")),
            "logit_bias": _biases(body.get("logit_bias")),
            "logprobs": logprobs,
        },
        num_draft_tokens=k if has_draft else 0,
        acceptance=_text(body, "acceptance"),
        echo=echo,
        is_stream=_flag(body, "stream"),
        includes_usage=_flag(stream or {}, "include_usage"),
        has_usage_in_chunks=_flag(stream or {}, "continuous_usage_stats"),
        as_token_ids=_flag(body, "return_tokens_as_token_ids"),
        priority=_integer(body, "priority", None, None) or 0,
        names=names,
        structured_by=structured_by,
        tools=tools,
        splits_thoughts=body.get("separate_reasoning") is None or _flag(body, "separate_reasoning"),
        shows_thoughts=body.get("include_reasoning") is None or _flag(body, "include_reasoning"),
        skips_special=body.get("skip_special_tokens") is None or _flag(body, "skip_special_tokens"),
        adds_special=_flag(body, "add_special_tokens") if body.get("add_special_tokens") is not None else None,
        includes_stop=_flag(body, "include_stop_str_in_output"),
        num_prompt_logprobs=_num_prompt_logprobs(body),
        most_prompt_tokens=_most_prompt_tokens(body),
        allowed_ids=_allowed_ids(body),
    )


def _prompts(value: Any) -> list[Prompt]:
    """One or many prompts, as strings or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_ids(value):
            return [value]
        if all(isinstance(item, str) or (isinstance(item, list) and item and _are_ids(item)) for item in value):
            return list(value)
    raise Refusal("prompt must be a string, a list of strings, a list of token ids, or a list of these", param="prompt")


def _are_ids(value: Sequence[Any]) -> bool:
    return all(type(item) is int for item in value)


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with contents of text, or in parts if there are images among them. Raises Refusal."""
    if not isinstance(value, list) or not value:
        raise Refusal("messages must be a list with at least one message", param="messages")
    messages = []
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refusal(f"{where} must be an object with a role", param=where)
        if (name := next((one for one in _NOT_READ if message.get(one) is not None), None)) is not None:
            raise Refusal(f"{where}.{name} is not supported: leave it out", param=where)
        message = with_calls_read(index, message)
        content = message.get("content")
        try:
            has_image = isinstance(content, list) and any(map(_is_image, content))
            messages.append({**message} if has_image else read_message(index, message))
        except PromptError:
            parts = "text parts and image_url parts"
            raise Refusal(f"{where}.content must be a string, or a list of {parts}", param=where) from None
    return messages


def _chat_prompt(body: Mapping[str, Any]) -> Prompt:
    """A chat, or messages with images and no options for the chat template. Raises Refusal."""
    messages = parse_messages(body.get("messages"))
    if not has_images(messages):
        return parse_chat_prompt(body)
    others = ("reasoning_effort", "add_special_tokens", "prompt_logprobs")  # scoring does not read images
    options = _chat_options(body)
    own = [name for name in options.given() if name != "add_generation_prompt" or not options.has_generation_prompt]
    given = next((name for name in others if body.get(name) is not None), next(iter(own), None))
    if given is not None:
        raise Refusal(f"{given} is not supported beside images", param=given)
    return messages


def parse_chat_prompt(body: Mapping[str, Any]) -> Chat:
    """A chat: messages, and the options for the chat template. Raises Refusal."""
    messages, options = parse_messages(body.get("messages")), _chat_options(body)
    try:
        return Chat(messages, options)
    except UsageError as error:
        raise refusal_of(error) from None


def _chat_options(body: Mapping[str, Any]) -> ChatOptions:
    """Raises Refusal."""
    options = {name: value for name in FIELDS if (value := body.get(name)) is not None}
    if (effort := _text(body, "reasoning_effort")) is not None:
        kwargs = options.get("chat_template_kwargs", {})
        if not isinstance(kwargs, Mapping) or kwargs.get("reasoning_effort", effort) != effort:
            raise Refusal("give reasoning_effort, or chat_template_kwargs with it", param="reasoning_effort")
        options["chat_template_kwargs"] = {**kwargs, "reasoning_effort": effort}
    try:
        return ChatOptions(**options)
    except UsageError as error:
        raise refusal_of(error) from None


def _is_image(part: Any) -> bool:
    image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
    return isinstance(image, dict) and isinstance(image.get("url"), str)


def _most_prompt_tokens(body: Mapping[str, Any]) -> int | None:
    most = _integer(body, "truncate_prompt_tokens", -1, None)
    if most == 0:
        raise Refusal(
            "truncate_prompt_tokens = 0 leaves no prompt: give -1, or a number", param="truncate_prompt_tokens"
        )
    return most


def _num_prompt_logprobs(body: Mapping[str, Any]) -> int | None:
    num_top = _integer(body, "prompt_logprobs", 0, _MOST_LOGPROBS)
    if num_top is not None and body.get("stream"):
        raise Refusal("prompt_logprobs are not streamed: leave stream out", param="prompt_logprobs")
    return num_top


def _allowed_ids(body: Mapping[str, Any]) -> list[int] | None:
    value = body.get("allowed_token_ids")
    if value is not None and (not isinstance(value, list) or not value or not _are_ids(value)):
        raise Refusal("allowed_token_ids must be a list of token ids, at least one", param="allowed_token_ids")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise Refusal("stop must be a string or a list of strings", param="stop")
    if len(stops) > _MOST_STOPS or any(len(one) > _MOST_STOP_CHARACTERS for one in stops):
        limits = f"at most {_MOST_STOPS}, of at most {_MOST_STOP_CHARACTERS} characters"
        raise Refusal(f"too many stop strings, or too long ones: {limits}", param="stop")
    return tuple(stops)


def _biases(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Refusal("logit_bias must map token ids to numbers", param="logit_bias")
    try:
        return {int(token_id): bias for token_id, bias in value.items()}
    except ValueError:
        raise Refusal("the keys of logit_bias must be token ids", param="logit_bias") from None


def _integer(body: Mapping[str, Any], name: str, low: int | None, high: int | None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is float and value.is_integer():  # some clients write 16.0
        value = int(value)
    if type(value) is not int or (low is not None and value < low) or (high is not None and value > high):
        limits = "" if low is None else f" of at least {low}" if high is None else f" from {low} to {high}"
        raise Refusal(f"{name} = {value!r:.60} is invalid: give an integer{limits}", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise Refusal(f"{name} must be true or false", param=name)
    return bool(value)


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if not isinstance(value, str | None):
        raise Refusal(f"{name} must be a string", param=name)
    return value
