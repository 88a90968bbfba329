"""Chat messages, formatted by the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from outrider.errors import PromptError


def chat_text(tokenizer: Any | None, messages: Sequence[Any]) -> str:
    """Prompt text of a chat, with the generation prompt.

    Raises:
        PromptError: there is no template; or it does not accept these messages; or they are not text alone.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise PromptError("this model has no chat template: give the prompt as text")
    from jinja2 import TemplateError

    texts = [_text_of(index, message) for index, message in enumerate(messages)]
    said = [text.strip() for message, text in zip(messages, texts, strict=True) if text and message["role"] == "user"]

    def write(form: Callable[[str], Any]) -> str:
        written = [
            dict(message) if text is None else {**message, "content": form(text)}
            for message, text in zip(messages, texts, strict=True)
        ]
        text: str = tokenizer.apply_chat_template(written, add_generation_prompt=True, tokenize=False)
        return text

    errors = TemplateError, TypeError, ValueError  # templates compute with the content of messages
    try:
        text = write(str)
    except errors as error:
        raise PromptError(f"the model's chat template does not accept these messages: {error}") from None
    if all(part in text for part in said):
        return text
    # Some templates accept lists of parts only, and skip plain text. Others change or shorten the text, and would print
    # a list as Python does.
    with suppress(*errors):
        parted = write(lambda content: [{"type": "text", "text": content}])
        if all(part in parted for part in said) and "{'type': 'text'" not in parted:
            return parted
    return text


def _text_of(index: int, message: Any) -> str | None:
    """Text of a message, which may be in parts; None if it has none (tool calls)."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise PromptError(f"message {index} is not an object with a 'role' and a 'content'")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise PromptError(f"the content of message {index} is text, or a list of parts of text")
    return "".join(_text_of_part(index, part) for part in content)


def _text_of_part(index: int, part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise PromptError(f"message {index} has a part of type {kind!r}: only text can be given here")
    return text
