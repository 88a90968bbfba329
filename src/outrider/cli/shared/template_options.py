"""Prompts of a command: texts or chats, by the options of the chat template, and their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.options import field_of
from outrider.cli.shared.output import say
from outrider.errors import FileError, OptionError, PromptError
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.offline.prompt_row import PromptLine
    from outrider.text.chat import Chat, ChatOptions


@dataclass(frozen=True)
class TemplateOptions:
    """Options of the chat template, for all prompts of a command."""

    chat: bool = field_of(None, False, "Apply the model's chat template. A text is a message of the user.", "--chat")
    system: str | None = field_of("Chat", None, "System message. Implies --chat.", metavar="TEXT")
    chat_template_kwargs: str | None = field_of(
        "Chat",
        None,
        "Variables of the chat template, like '{\"enable_thinking\": false}'. Implies --chat.",
        metavar="JSON",
    )

    @property
    def is_chat(self) -> bool:
        return self.chat or self.system is not None or self.chat_template_kwargs is not None

    def __post_init__(self) -> None:
        try:
            kwargs = json.loads(self.chat_template_kwargs or "{}")
        except (ValueError, RecursionError):
            kwargs = None
        if not isinstance(kwargs, dict):
            remedy = "a JSON object, like '{\"enable_thinking\": false}'"
            raise OptionError("--chat-template-kwargs", self.chat_template_kwargs, remedy)

    @property
    def options(self) -> ChatOptions:
        from outrider.text.chat import ChatOptions

        return ChatOptions(system=self.system, chat_template_kwargs=json.loads(self.chat_template_kwargs or "{}"))

    def to_json(self) -> dict[str, Any]:
        return {"chat": self.is_chat, "system": self.system, "chat_template_kwargs": self.chat_template_kwargs}

    def prompt(self, given: str | Chat) -> str | Chat:
        """A prompt with these options, and its own, which override them. Raises OptionError."""
        from outrider.text.chat import Chat

        if isinstance(given, Chat):
            return Chat(given.messages, given.options.over(self.options))
        return Chat(given, self.options) if self.is_chat else given  # type: ignore[arg-type]

    def read_lines(self, path: Path | None) -> list[PromptLine]:
        """The prompts of a file, which have no sampling options of their own; None: the built-in texts. Raises
        FileError, OptionError."""
        from outrider.offline.prompt_file import read_prompts
        from outrider.offline.prompt_row import PromptLine
        from outrider.text.example_prompts import PROMPTS

        texts = [PromptLine(f"prompt {index}", text) for index, text in enumerate(PROMPTS)]
        return [replace(line, prompt=self.prompt(line.prompt)) for line in (read_prompts(path) if path else texts)]


def read_prompt(argument: str | None) -> str:
    """Text of a prompt: the argument, or standard input (None, and "-"). Raises PromptError, FileError."""
    if argument not in (None, "-"):
        text = str(argument)
    elif sys.stdin.isatty():
        raise PromptError("no prompt: give one as an argument, pipe it in, or use --prompts FILE")
    else:
        try:
            text = sys.stdin.buffer.read().decode("utf-8").rstrip("\n")
        except UnicodeDecodeError as error:
            raise FileError(f"standard input is not UTF-8 (byte {error.start})") from None
    if not text.strip():
        raise PromptError.empty()
    return text


def encode_lines(
    decoder: Decoder,
    lines: Sequence[PromptLine],
    path: Path | None = None,
    encode: Callable[[str | Chat], list[int]] | None = None,
) -> list[list[int]]:
    """Token ids of prompts. ``path``: the file of the prompts, if any. ``encode``: in place of ``decoder.encode``,
    which leaves room for output. Raises PromptError: with the place of the prompt."""
    encode = encode or decoder.encode
    hint_at_chat(decoder, [line.prompt for line in lines])
    prompts = []
    for line in lines:
        try:
            prompts.append(encode(line.prompt))
        except (PromptError, OptionError) as error:
            where = line.place if path is None else f"{path}, {line.place}"
            raise PromptError(f"{where}: {error}") from None
    return prompts


def hint_at_chat(decoder: Decoder, prompts: Sequence[str | Chat]) -> None:
    """Remind of ``--chat`` if a model for chats is given plain text. Text in which special tokens are written may come
    from a template already."""
    tokenizer = decoder.tokenizer
    if tokenizer is None or not tokenizer.chat_template:
        return
    special = [token for token in tokenizer.all_special_tokens if token]
    if any(isinstance(text, str) and not any(token in text for token in special) for text in prompts):
        name = short_name(decoder.target.name)
        say(f"{name} has a chat template, but continues plain text here: add --chat to ask it as a user")
