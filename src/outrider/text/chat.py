"""Chats as prompts: messages, and options for the model's chat template.

The template is a program of the model's authors, which ignores variables that it does not know. So an option that it
does not read is refused by name. A chat ends with the token that its template writes after an answer, too, if the
checkpoint names another end.

Source: the names are those of vLLM's chat requests.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import Any

from outrider.errors import OptionError, PromptError
from outrider.options import CallOptions

FIELDS = ("tools", "documents", "chat_template_kwargs", "continue_final_message", "add_generation_prompt")
"""Options that a request, or a row of a file, may have beside its messages."""
IMAGE_KINDS = ("image", "image_url")
_THINKING = ("enable_thinking", "thinking")  # names of the switch: Qwen's and others', DeepSeek's and Granite's
_MOST_TRIALS = 8  # messages that are left out on trial, or searched alone, at the price of the whole text for each
_ANSWER = "A short answer."
_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
# Parts of an answer besides its content: a token that ends these, too, is no end of a turn.
_PARTS = (dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "A thought."), {"tool_calls": [_CALL]})


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of a chat, passed to the chat template.

    Attributes:
        system: text of a system message before the messages.
        tools: JSON schemas of tools (or Python functions, described by Transformers).
        documents: objects with a "title" and a "text".
        chat_template_kwargs: further variables of the template, such as ``enable_thinking`` or ``reasoning_effort``
            (whose values "none" and "on" are the switch of any template).
        continue_final_message: the output continues the last message, instead of answering it.
        add_generation_prompt: write the beginning of the answer; None: unless ``continue_final_message``.
        chat_template: in place of the model's; or the name of one of several that it has.

    Raises:
        OptionError: a value of another type, or two that contradict each other.
    """

    system: str | None = None
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("system", "chat_template"):
            if not isinstance(getattr(self, name), str | None):
                raise OptionError(name, getattr(self, name), "a string")
        for name in ("tools", "documents"):
            if isinstance(value := getattr(self, name), str | Mapping) or not isinstance(value, Sequence):
                raise OptionError(name, value, "a list")
        kwargs = self.chat_template_kwargs
        if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
            raise OptionError("chat_template_kwargs", kwargs, "an object: names of variables and their values")
        for name, allowed in (("continue_final_message", bool), ("add_generation_prompt", bool | None)):
            if not isinstance(getattr(self, name), allowed):
                raise OptionError(name, getattr(self, name), "true or false")
        if self.continue_final_message and self.add_generation_prompt:
            raise OptionError("add_generation_prompt", True, "with continue_final_message no new message begins")

    @property
    def has_generation_prompt(self) -> bool:
        given = self.add_generation_prompt
        return not self.continue_final_message if given is None else given

    def given(self) -> dict[str, Any]:
        default = ChatOptions()
        options = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in options.items() if value not in (getattr(default, name), [], ())}

    def over(self, others: ChatOptions) -> ChatOptions:
        """These options, and the others where these are not given."""
        kwargs = {**others.chat_template_kwargs, **self.chat_template_kwargs}
        return ChatOptions(**{**others.given(), **self.given(), "chat_template_kwargs": kwargs})


@dataclass(frozen=True, slots=True)
class Chat:
    """A chat as a prompt.

    Attributes:
        messages: objects with a "role" and a "content" of text; the text of a "refusal" is added, and the role
            "developer" becomes "system". Further fields (``tool_calls``, ...) are the template's matter. A string is a
            message of the user.
        options: for the chat template.

    Raises:
        PromptError: there are no messages, or they are not text alone.
    """

    messages: Sequence[Mapping[str, Any]]
    options: ChatOptions = field(default_factory=ChatOptions)

    def __post_init__(self) -> None:
        if isinstance(self.messages, str):
            object.__setattr__(self, "messages", [{"role": "user", "content": self.messages}])
        if isinstance(self.messages, Mapping) or not isinstance(self.messages, Sequence) or not self.messages:
            raise PromptError("a chat is a list of messages, at least one")
        object.__setattr__(self, "messages", [read_message(*pair) for pair in enumerate(self.messages)])
        if self.options.system is not None and self.messages[0]["role"] == "system":
            raise OptionError("system", self.options.system, "the chat has a system message: leave one of them out")

    @property
    def asked(self) -> str:
        """Text of the last message of the user; else of the last message."""
        said = [message for message in self.messages if message["role"] == "user"]
        return (said or self.messages)[-1].get("content") or ""

    @property
    def begun(self) -> str:
        """Text that the output continues; empty if it answers."""
        return (self.messages[-1].get("content") or "") if self.options.continue_final_message else ""


class ChatChanges(CallOptions, total=False):
    """Keywords of ``Decoder.chat``: the fields of ``ChatOptions`` and of ``Sampling``, and options of the call."""

    system: str | None
    tools: Sequence[Mapping[str, Any] | Callable[..., Any]]
    documents: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    continue_final_message: bool
    add_generation_prompt: bool | None
    chat_template: str | None


def chat_text(tokenizer: Any | None, chat: Chat) -> str:
    """Prompt text of a chat. Many templates take one system message: for these, those at the beginning are joined.
    Raises PromptError: there is no template, or it does not accept these messages; OptionError: the template does not
    read an option."""
    options = chat.options
    if tokenizer is None or not (tokenizer.chat_template or options.chat_template):
        raise PromptError("this model has no chat template: give the prompt as text")
    own = [] if options.system is None else [{"role": "system", "content": options.system}]
    messages = [*own, *chat.messages]
    try:
        return _text_of(tokenizer, messages, options)
    except PromptError:
        first = list(takewhile(lambda message: message["role"] == "system", messages))
        if len(first) < 2:
            raise
        joined = {**first[0], "content": "\n\n".join(message["content"] for message in first)}
        return _text_of(tokenizer, [joined, *messages[len(first) :]], options)


def _text_of(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: ChatOptions) -> str:
    """Text that the template makes of these messages. Raises PromptError, OptionError."""
    from jinja2 import TemplateError

    # Templates compute with the content of messages.
    errors = TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError
    texts = [message.get("content") for message in messages]
    said = [(text or "").strip() for text in texts]
    of_users = [text for text, message in zip(said, messages, strict=True) if text and message["role"] == "user"]

    def write(form: Callable[[str, int], Any], without: int | None = None) -> str:
        written = [
            dict(message) if text is None else {**message, "content": form(text, index)}
            for index, (message, text) in enumerate(zip(messages, texts, strict=True))
            if index != without
        ]
        text = tokenizer.apply_chat_template(
            written,
            tools=list(options.tools) or None,
            documents=list(options.documents) or None,
            chat_template=options.chat_template,
            continue_final_message=options.continue_final_message,
            add_generation_prompt=options.has_generation_prompt,
            tokenize=False,
            **kwargs,
        )
        return str(text)

    text, refusal, kwargs = "", None, {}
    try:
        kwargs = _checked_kwargs(tokenizer, options)
        text = write(lambda content, _: content)
    except errors as error:
        reason = str(error) or type(error).__name__
        refusal = PromptError(f"the model's chat template does not accept these messages: {reason}")
    if refusal or not all(_found(of_users, text)):
        # Some templates accept lists of parts only, and skip plain text. Others change or shorten the text, and would
        # print a list as Python does.
        with suppress(*errors):
            parted = write(lambda content, _: [{"type": "text", "text": content}])
            if all(_found(of_users, parted)) and "{'type': 'text'" not in parted:
                return parted
    if refusal:
        raise refusal
    # A short text of another role may be there by chance.
    doubtful = [
        index
        for index, (message, is_there) in enumerate(zip(messages, _found(said, text), strict=True))
        if texts[index] and not (is_there and message["role"] in ("user", "assistant"))
    ]
    marked = ""
    with suppress(*errors):
        marked = write(lambda content, index: f"{content} mark{index}.") if doubtful else ""
    is_marked = {int(index) for index in re.findall(r" mark(\d{1,9})\.", marked)}
    lacking = [index for index in doubtful if index not in is_marked]
    for index in lacking[:_MOST_TRIALS]:
        # Templates change the text of users and assistants, but write some of it.
        with suppress(*errors):
            if write(lambda content, _: content, without=index) == text:
                if options.system is not None and index == 0:
                    raise OptionError("system", options.system, "the model's chat template skips system messages")
                role = messages[index]["role"]
                raise PromptError(f"the model's chat template skips messages of the role {role!r}")
    return text


def _found(parts: Sequence[str], text: str) -> Iterator[bool]:
    """Whether each part was found in a text. Parts in their order are found in one pass: a long chat has many. Of the
    others the first few are searched alone; no more are found."""
    place = num_alone = 0
    for part in parts:
        if num_alone == _MOST_TRIALS:
            yield False
        elif (at := text.find(part, place)) >= 0:
            place = at + len(part)
            yield True
        else:
            num_alone += 1
            yield part in text


def _checked_kwargs(tokenizer: Any, options: ChatOptions) -> dict[str, Any]:
    """Further variables for the template, which reads all options. Raises OptionError."""
    if options.chat_template and "{" not in options.chat_template and not isinstance(tokenizer.chat_template, dict):
        raise OptionError("chat_template", options.chat_template, "the model has no named templates")
    from outrider.text.templates import variables_of

    variables = variables_of(tokenizer.get_chat_template(options.chat_template, list(options.tools) or None))
    kwargs, own = dict(options.chat_template_kwargs), inspect.signature(tokenizer.apply_chat_template).parameters
    effort = kwargs.get("reasoning_effort")
    if effort == "on" and not {*_THINKING, "reasoning_effort"} & variables:
        from outrider.text.thinking import thinking_of  # which imports NumPy

        if thinking_of(tokenizer, "auto") is None:
            raise OptionError("reasoning_effort", effort, "this model has no thoughts to switch on: leave it out")
    if effort == "on" or (effort == "none" and "reasoning_effort" not in variables):
        # Clients send them to all models. Templates have other names for the switch, and most models do not think.
        del kwargs["reasoning_effort"]
        kwargs = {name: effort == "on" for name in _THINKING if name in variables} | kwargs
    for name, is_given in (
        ("tools", bool(options.tools)),
        ("documents", bool(options.documents)),
        ("add_generation_prompt", options.add_generation_prompt is False and not options.continue_final_message),
    ):
        if is_given and name not in variables:
            raise OptionError(name, getattr(options, name), "the model's chat template does not read it: leave it out")
    for name in kwargs:
        if name in own or name == "messages":
            raise OptionError("chat_template_kwargs", kwargs, f"{name!r} is not one of them: it has its own name")
        if name not in variables:
            known = ", ".join(sorted(variables - own.keys() - tokenizer.special_tokens_map.keys() - {"messages"}))
            remedy = f"the model's chat template does not read {name!r}, but {known or 'no such variables'}"
            raise OptionError("chat_template_kwargs", kwargs, remedy)
    return kwargs


def read_message(
    index: int, message: Any, read_image: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """A message as chat templates know it: its text in one piece (in parts where ``read_image`` makes one of each
    image), a refusal as text, and the role ``developer`` as ``system``, its older name. The text of an assistant may be
    missing: it is None beside calls of tools, else empty. Raises PromptError: the message is no object, has no role, or
    has no text."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {index} is not an object with a 'role' and a 'content'")
    read = {name: value for name, value in message.items() if name != "refusal"}
    read["role"] = "system" if message["role"] == "developer" else message["role"]
    content, refusal = message.get("content"), message.get("refusal")
    may_lack = content is None and message["role"] == "assistant"
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [] if may_lack else content
    if not isinstance(parts, Sequence):
        raise PromptError(f"the content of message {index} is text, or a list of parts of text")
    if refusal is not None:
        parts = [*parts, {"type": "refusal", "refusal": refusal}]
    if parts or not (may_lack and message.get("tool_calls")):
        texts = [_read_part(index, part, read_image) for part in parts]
        if read_image is None:
            read["content"] = "".join(texts)
        else:
            read["content"] = [{"type": "text", "text": one} if isinstance(one, str) else one for one in texts]
    return read


def _read_part(index: int, part: Any, read_image: Callable[[Mapping[str, Any]], Any] | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if read_image is not None and kind in IMAGE_KINDS:
        return read_image(part)
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        allowed = "only text" if read_image is None else "text and images"
        raise PromptError(f"message {index} has a part of type {kind!r}: {allowed} can be given here")
    return text


def turn_end(tokenizer: Any | None) -> int | None:
    """Token that a tokenizer's chat template writes after an answer; None if it writes none, or there is none."""
    if tokenizer is None or not tokenizer.chat_template:
        return None

    def answered(part: Mapping[str, Any]) -> str:
        messages = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER, **part}]
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # templates raise what they like, and may want other messages
            return ""

    text = answered({})
    if _ANSWER not in text:
        return None
    added: dict[str, int] = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    after = text.rpartition(_ANSWER)[2].lstrip()
    end = max((name for name in added if after.startswith(name)), key=len, default=None)
    if end is None:
        return None
    others = [other for part in _PARTS if _ANSWER in (other := answered(part))]
    return None if any(other.count(end) > text.count(end) for other in others) else added[end]


def ends_text(name: str, tokenizer: Any | None, eos_ids: Collection[int], turn_ids: Collection[int]) -> str:
    """The line that names a model's ends."""

    def names_of(ids: Collection[int]) -> str:
        words = [str(i) if tokenizer is None else f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in sorted(ids)]
        return ", ".join(words) or "no token"

    of_turns = {*turn_ids} - {*eos_ids}
    of_chats = f"; chats also with {names_of(of_turns)}" if of_turns else ""
    return f"{name}: texts end with {names_of(eos_ids)}{of_chats}"
