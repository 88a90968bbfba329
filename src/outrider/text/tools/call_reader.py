"""Reads a call, a JSON object with a name and arguments, as it arrives."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from outrider.text.pieces import Piece

_PLAIN = re.compile(r'[^"\\]+')  # in a string: read at once, since one character after another takes quadratic time
_CLOSERS = {"{": "}", "[": "]"}
_ARGUMENTS = ("arguments", "parameters")
_BEFORE_NAME = ("name", "type", "id", *_ARGUMENTS)


class CallReader:
    """Reads one call, whose arguments are passed on while they are still being written.

    Args:
        number: of the call.
        names: of the tools; an object with another name is no call. None: any name.
        name: known already: the text is the arguments alone.

    Attributes:
        is_done: the object is complete.
        is_wrong: this is no call: not JSON, another object, or one without a name. The text from there on is not read.
        has_begun: its name has been taken.
        raw: the text read.
    """

    def __init__(self, number: int, names: Collection[str] | None = None, name: str | None = None) -> None:
        self.number, self._names, self._name = number, names, name
        self.is_done = self.is_wrong = self.has_begun = False
        self.raw = ""
        self._is_named = name is not None
        self._open = ["}"] if self._is_named else []  # closing brackets to come
        self._key = "arguments" if self._is_named else None  # of the value being read
        self._token = ""  # that value so far, or the key
        self._is_string = self._is_escaped = False
        self._arguments: str | None = None  # once complete
        self._num_taken = 0  # characters of them

    def read(self, text: str) -> int:
        """Read up to the end of the object, or to where it goes wrong. Returns the number of characters read."""
        num_read = 0
        try:
            while num_read < len(text) and not self.is_done:
                plain = _PLAIN.match(text, num_read) if self._is_string and not self._is_escaped else None
                self._push(part := text[num_read] if plain is None else plain[0])
                num_read += len(part)
        except (ValueError, RecursionError):
            # Models forget the last bracket.
            self.is_done = self.is_complete
            self.is_wrong = not self.is_done
        self.raw += text[:num_read]
        return num_read

    def take(self) -> list[Piece]:
        """The new parts of the call."""
        pieces = []
        if self._name is not None and not self.has_begun:
            self.has_begun = True
            pieces.append(Piece("call", self._name, self.number))
        arguments = self._arguments
        if arguments is None and self._key in _ARGUMENTS:
            # A string or null is rewritten when it is complete.
            arguments = self._token if self._token.startswith("{") or self.is_wrong else None
        if arguments is None and self.is_done:
            arguments = "{}"
        if self.has_begun and arguments is not None and len(arguments) > self._num_taken:
            pieces.append(Piece("arguments", arguments[self._num_taken :], self.number))
            self._num_taken = len(arguments)
        return pieces

    def finish(self) -> list[Piece]:
        """The rest at the end: a call without arguments has none to read, and their JSON is an empty object."""
        has_none = self.has_begun and not self.is_wrong and not self._num_taken
        return [Piece("arguments", "{}", self.number)] if has_none else []

    @property
    def is_complete(self) -> bool:
        """Whether there is a name with all its arguments, though the object may not be done."""
        is_object = self._key in _ARGUMENTS and self._token.endswith("}") and len(self._open) == 1
        has_arguments = self._arguments is not None or (is_object and not self._is_string)
        return self.is_done or (self._name is not None and has_arguments)

    def _push(self, character: str) -> None:
        """Read a character; in a string, plain ones at once. Raises ValueError."""
        if self._is_string:
            self._token += character
            self._is_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
        elif character in _CLOSERS:
            self._token += character if self._open else ""
            self._open.append(_CLOSERS[character])
        elif not self._open:
            if not character.isspace():
                raise ValueError
        elif character in "}]":
            if self._open[-1] != character:
                raise ValueError
            self._open.pop()
            self._token += character if self._open else ""
            if not self._open or (self._is_named and len(self._open) == 1):
                self._end_value()
                if self._name is None:
                    raise ValueError
                self.is_done = True
        elif len(self._open) > 1:
            self._token += character
            self._is_string = character == '"'
        elif character == ":" and self._key is None:
            self._key, self._token = str(json.loads(self._token)), ""
            if self._name is None and self._key not in _BEFORE_NAME:
                raise ValueError
        elif character == ",":
            self._end_value()
        elif character == "<":  # of a marker
            raise ValueError
        elif not character.isspace():
            self._token += character
            self._is_string = character == '"'

    def _end_value(self) -> None:
        """Raises ValueError."""
        key, self._key, token, self._token = self._key, None, self._token, ""
        if key == "name" and self._name is None:
            name = json.loads(token)
            if not isinstance(name, str) or (self._names is not None and name not in self._names):
                raise ValueError
            self._name = name
        elif key in _ARGUMENTS and self._arguments is None:
            inner = None if not token or token.startswith("{") else json.loads(token)
            self._arguments = inner if isinstance(inner, str) else "{}" if token in ("", "null") else token
        elif key is None and token:
            raise ValueError
