"""Conversations: the prompt of the next answer, from all that was said before.

A model for chats answers messages in its template. A base model, which has none, continues one text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from outrider.errors import OptionError
from outrider.text.chat import Chat, ChatOptions


class Conversation(Protocol):
    """Everything that was said."""

    def prompt(self, text: str) -> Chat | str | None:
        """The prompt for an answer to this text; None if there is nothing to answer."""
        ...

    def add(self, text: str, answer: str) -> None:
        """Keep a text and its answer."""
        ...

    def reset(self) -> None:
        """Forget all texts and answers."""
        ...

    def set_system(self, text: str) -> None:
        """Set the system message; an empty one is none. Raises OptionError."""
        ...


@dataclass(slots=True)
class ChatConversation:
    """Messages in a chat template."""

    options: ChatOptions
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def prompt(self, text: str) -> Chat | None:
        return Chat([*self.messages, {"role": "user", "content": text}], self.options) if text.strip() else None

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self.messages.clear()

    def set_system(self, text: str) -> None:
        self.options = replace(self.options, system=text or None)


@dataclass(slots=True)
class Continuation:
    """One text. User and model write parts of it in turn, the user each on a line of its own."""

    model: str
    text: str = ""

    def prompt(self, text: str) -> str | None:
        return "\n".join(part for part in (self.text, text) if part.strip()) or None

    def add(self, text: str, answer: str) -> None:
        self.text = (self.prompt(text) or "") + answer

    def reset(self) -> None:
        self.text = ""

    def set_system(self, text: str) -> None:
        raise OptionError("system", text, f"{self.model} has no chat template, so there is no system message")
