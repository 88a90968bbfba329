"""Formats of calls: Hermes and Qwen, Llama 3, Mistral.

Sources: the chat templates of NousResearch/Hermes-2-Pro and 3, Qwen2.5 and Qwen3, meta-llama/Llama-3.1 and 3.2,
mistralai/Mistral-7B-Instruct-v0.3 and Mistral-Small-3.x; the names of the formats are those of vLLM's parsers.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.errors import OptionError
from outrider.text.pieces import first_of
from outrider.text.tools.parser import ToolParser

_SPACE = " \t\r\n"  # of JSON, and of the grammar's text


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        parser: takes the tools' names.
        tokens: markers, which may be special tokens.
        opening, before, after, between, closing: a call is ``before``, with the tool's name for ``%s``, its arguments
            and ``after``; calls have ``between`` between them, and ``opening`` and ``closing`` around them.
        id_length: of the numbers of calls: templates may check it.
    """

    parser: Callable[[Collection[str]], ToolParser]
    tokens: Sequence[str]
    before: str
    after: str
    between: str
    opening: str = ""
    closing: str = ""
    id_length: int = 24

    @property
    def has_marker(self) -> bool:
        """Whether calls begin with a marker, so that no text looks like one."""
        return (self.opening + self.before).startswith(self.tokens[0])

    def new_id(self) -> str:
        """A new call's number."""
        letters = string.ascii_letters + string.digits
        prefix = "call_" if self.id_length > 9 else ""
        return prefix + "".join(secrets.choice(letters) for _ in range(self.id_length))


class HermesParser(ToolParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several in turn."""

    markers = ("<tool_call>",)
    ends = ("</tool_call>",)

    def _after_marker(self) -> bool:
        return self._begin()

    def _after_call(self) -> bool:
        (end,) = self.ends
        self._text = self._text.lstrip(_SPACE + "}]")  # models write brackets too many
        if end != self._text and end.startswith(self._text):
            return False
        self._text = self._text.removeprefix(end)
        self._state = self._in_text
        return True


class LlamaParser(ToolParser):
    """``{"name": ..., "parameters": {...}}``, at the beginning or after ``<|python_tag|>``; several have semicolons
    between them. Answers may be JSON too: a call has the name of a tool."""

    markers = ("<|python_tag|>",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = self._at_the_beginning

    def _at_the_beginning(self) -> bool:
        text = self._text.lstrip(_SPACE)
        if not text and not self._is_end:
            return False
        if text.startswith("{"):
            self._say(len(self._text) - len(text))
            return self._begin(self._names)
        self._state = self._in_text
        return True

    def _after_marker(self) -> bool:
        return self._begin(self._names)

    def _after_call(self) -> bool:
        self._text = self._text.lstrip("; \n")
        if self._text.startswith("{"):
            return self._begin(self._names)
        if self._text:
            self._state = self._in_text
        return bool(self._text)


class MistralParser(ToolParser):
    """``[TOOL_CALLS]`` before a list of ``{"name": ..., "arguments": {...}}``; since 2025 before each call, ``NAME``,
    ``[ARGS]`` and its arguments."""

    markers = ("[TOOL_CALLS]",)
    _before_arguments = ("[ARGS]", "{")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._is_list = False

    def _after_marker(self) -> bool:
        self._text = self._text.lstrip()
        self._is_list = self._text.startswith("[")
        if self._is_list:
            self._opening, self._text = self._opening + "[", self._text[1:]
        if self._is_list or self._text.startswith("{"):
            return self._begin()
        if (found := first_of(self._text, self._before_arguments)) is None:
            return False
        at, marker = found
        name = self._text[:at].partition("[CALL_ID]")[0].strip()
        if name not in self._names:
            num_characters = len(self._opening) + at
            self._text, self._opening = self._opening + self._text, ""
            self._say(num_characters)
            self._state = self._in_text
            return True
        self._text = self._text[at + (len(marker) if marker == "[ARGS]" else 0) :]
        return self._begin(name=name)

    def _after_call(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        if self._is_list and self._text[0] in ",]":
            is_last, self._text = self._text[0] == "]", self._text[1:]
            self._is_list = not is_last
            return True if is_last else self._begin()
        self._state = self._in_text
        return True


_OBJECT = '{"name": "%s", "arguments": '
_HERMES = ToolFormat(
    HermesParser, ("<tool_call>", "</tool_call>"), f"<tool_call>\n{_OBJECT}", "}\n</tool_call>", between="\n"
)
_LLAMA = ToolFormat(LlamaParser, ("<|python_tag|>",), '{"name": "%s", "parameters": ', "}", between="; ")
_MISTRAL_LIST = ToolFormat(
    MistralParser,
    ("[TOOL_CALLS]",),
    _OBJECT,
    "}",
    between=", ",
    opening="[TOOL_CALLS][",
    closing="]",
    id_length=9,
)
_MISTRAL = ToolFormat(
    MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), "[TOOL_CALLS]%s[ARGS]", "", between="", id_length=9
)
TOOL_FORMATS = {"hermes": _HERMES, "llama3_json": _LLAMA, "mistral": _MISTRAL}


def tool_format_of(tokenizer: Any, name: str) -> ToolFormat | None:
    """Format of a model's calls.

    Args:
        name: of the format; or "auto": the chat template and the vocabulary tell.

    Returns:
        None if the model has none of these ("auto").

    Raises:
        OptionError: there is no such format.
    """
    vocabulary = tokenizer.get_vocab()
    if name == "auto":
        name = _name_of(tokenizer, vocabulary) or "none"
        if name == "none":
            return None
    if name not in TOOL_FORMATS:
        raise OptionError("--tool-parser", name, f"choose auto, or one of {', '.join(TOOL_FORMATS)}")
    return _MISTRAL_LIST if name == "mistral" and "[ARGS]" not in vocabulary else TOOL_FORMATS[name]


def _name_of(tokenizer: Any, vocabulary: Collection[str]) -> str | None:
    if not tokenizer.chat_template:
        return None
    template = tokenizer.get_chat_template(None, [{}])
    if "[TOOL_CALLS]" in template:
        return "mistral"
    # The formats of Qwen3-Coder and GLM 4.5 have the same marker, with XML after it.
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return "hermes"
    if "<|python_tag|>" in vocabulary and '"parameters"' in template:
        return "llama3_json"
    return None
