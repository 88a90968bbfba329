"""Finds calls of tools in a model's output, as it arrives, and passes on no half a marker. The thoughts have been split
off: see ``RowText``.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection

from outrider.text.thought_splitter import Piece, num_undecided
from outrider.text.tool_formats import SPACE, ToolFormat

_PLAIN = re.compile(r'[^"\\]+')  # in a string: read at once, since one character after another takes quadratic time
_CLOSERS = {"{": "}", "[": "]"}
_STRING = r'"([^"\\]*)"\s*'
# A call as formats have it, up to the bracket of its arguments.
_HEAD = re.compile(
    rf'\s*{{\s*(?:"(?:type|id)"\s*:\s*{_STRING},\s*)*'
    rf'"name"\s*:\s*{_STRING},\s*"(?:arguments|parameters)"\s*:\s*{{'
)
_FIRST_KEY = re.compile(r'\s*{\s*"(?:name|type|id|arguments|parameters)"\s*:')


class OutputParser:
    """Parser of one output with thoughts, calls, or both, from the parts of each chunk to come (see ``RowText``).
    Without content, text outside calls is the beginning of a call that was cut."""

    def __init__(self, parts: deque[list[Piece]], calls: CallParser | None = None, *, has_content: bool = True) -> None:
        self._parts, self._calls, self._has_content = parts, calls, has_content

    @property
    def is_in_call(self) -> bool:
        """Whether the text so far ends in a call that is incomplete."""
        return self._calls is not None and self._calls.is_in_call

    def next_pieces(self, *, is_end: bool = False) -> list[Piece]:
        """Parse the next chunk, or at the end all that remain; return what is certain, at the end all."""
        parts = self._parts.popleft()
        while is_end and self._parts:
            parts += self._parts.popleft()
        if self._calls is None:
            return parts
        pieces = []
        for part in parts:
            pieces += [part] if part.kind == "reasoning" else self._calls.feed(part.text, part.end)
        pieces += self._calls.feed("", is_end=True) if is_end else []
        return [piece for piece in pieces if self._has_content or piece.kind != "content"]


class CallParser:
    """Splits one output into content and calls of these tools, as it arrives.

    White space before a call is no content. Text that begins like a call, and is none, is content."""

    def __init__(self, form: ToolFormat, names: Collection[str]) -> None:
        self._form, self._names = form, frozenset(names)
        self._text = ""  # not yet parsed
        self._end = 0  # of the text
        self._space = ""  # content, unless a call follows
        self._opening = ""  # text of a marker: content, unless a call follows
        self._reader: CallReader | None = None
        self._pieces: list[Piece] = []
        self._num_calls = 0
        self._is_end = False
        self._state = self._in_text if form.has_marker else self._at_the_beginning

    def feed(self, text: str, end: int | None = None, *, is_end: bool = False) -> list[Piece]:
        """Add text up to this place of the output; return the parts that are certain, at the end all."""
        self._text += text
        self._end = self._end + len(text) if end is None else end
        self._is_end = is_end
        while self._state():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces + self._rest() if is_end else pieces

    @property
    def is_in_call(self) -> bool:
        return self._reader is not None and self._reader.has_begun and not self._reader.is_complete

    def _rest(self) -> list[Piece]:
        reader = self._reader
        pieces = [] if reader is None else reader.finish()
        unread = "" if reader is None or reader.has_begun else reader.raw
        rest = self._opening + unread + (self._text if self._opening else "")
        if rest or not self._num_calls:
            rest = self._space + rest
        return [*pieces, Piece("content", rest, end=self._end)] if rest else pieces

    # States: each parses some of the text, and returns whether there may be more to do.

    def _at_the_beginning(self) -> bool:
        text = self._text.lstrip(SPACE)
        if not text and not self._is_end:
            return False
        if text.startswith("{"):
            self._say(len(self._text) - len(text))
            return self._begin()
        self._state = self._in_text
        return True

    def _in_text(self) -> bool:
        trigger = self._form.tokens[0]
        at = self._text.find(trigger)
        if at < 0:
            self._say(len(self._text) - (0 if self._is_end else num_undecided(self._text, (trigger,))))
            return False
        self._opening = trigger
        self._say(at)
        self._text = self._text[len(trigger) :]
        self._state = self._after_marker
        return True

    def _after_marker(self) -> bool:
        if not self._form.may_begin_with_name:
            return self._begin()
        self._text = self._text.lstrip()
        if self._text.startswith("["):
            self._opening, self._text = self._opening + "[", self._text[1:]
            return self._begin()
        if self._text.startswith("{"):
            return self._begin()
        at = min((at for mark in ("[ARGS]", "{") if (at := self._text.find(mark)) >= 0), default=None)
        if at is None:
            return False
        name, *_ = re.split(r"[\s\[<{]", self._text, maxsplit=1)
        if name not in self._names:
            self._text, num_said = self._opening + self._text, len(self._opening) + at
            self._opening = ""
            self._say(num_said)
            self._state = self._in_text
            return True
        self._text = self._text[at:].removeprefix("[ARGS]")
        return self._begin(name)

    def _begin(self, name: str | None = None) -> bool:
        self._reader = CallReader(self._num_calls, None if self._form.has_marker else self._names, name)
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        reader = self._reader
        assert reader is not None
        self._text = self._text[reader.consume(self._text) :]
        self._pieces += reader.take()
        if reader.has_begun:
            self._num_calls, self._space, self._opening = reader.number + 1, "", ""
        if not (reader.is_done or reader.is_wrong):
            return False
        if reader.has_begun:
            self._state = self._after_call if reader.is_done else self._in_rest
        else:
            num_said = len(self._opening)
            self._text, self._opening = self._opening + reader.raw + self._text, ""
            self._say(num_said)
            self._state, self._reader = self._in_text, None
        return True

    def _after_call(self) -> bool:
        self._text = self._text.lstrip(self._form.skipped)
        if not self._text:
            return False
        if end := self._form.end:
            if end != self._text and end.startswith(self._text):
                return False
            self._text = self._text.removeprefix(end)
        elif self._text.startswith("{"):
            return self._begin()
        self._state = self._in_text
        return True

    def _in_rest(self) -> bool:
        """The rest of a call that has gone wrong: the client will find its arguments invalid."""
        assert self._reader is not None
        end = self._form.end
        found = self._text.find(end) if end else -1
        undecided = num_undecided(self._text, (end,)) if end and not self._is_end else 0
        at = found if found >= 0 else len(self._text) - undecided
        if at:
            self._pieces.append(Piece("arguments", self._text[:at], self._reader.number))
        self._text = self._text[at:]
        if found >= 0:
            self._state = self._after_call
        return found >= 0

    def _say(self, num_characters: int) -> None:
        """Pass on the beginning of the text as content; white space at its end waits."""
        text, self._text = self._space + self._text[:num_characters], self._text[num_characters:]
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._pieces.append(Piece("content", said, end=self._end - len(self._space) - len(self._text)))


class CallReader:
    """Reads one call, a JSON object with a name and arguments. The arguments are passed on while they are still being
    written, if the name comes first; else once the object is complete. An object whose name is none of the tools' is no
    call. If the name is known already, the text is the arguments alone.

    Attributes:
        is_done: the object is complete.
        is_wrong: this is no call: not JSON, another object, or one without a name. The text from there on is not read.
        has_begun: its name has been taken.
        is_complete: there is a name with all its arguments, though the object may not be done.
        raw: the text read, up to the name.
    """

    def __init__(self, number: int, names: Collection[str] | None = None, name: str | None = None) -> None:
        self.number, self._names, self._name = number, names, name
        self.is_done = self.is_wrong = self.has_begun = self.is_complete = False
        self.raw = ""
        self._open: list[str] = []  # closing brackets to come
        self._depth = 1 if name is None else 0  # brackets around the arguments
        self._arguments: list[str] = []  # parts not taken yet
        self._has_arguments = False
        self._is_string = self._is_escaped = False

    def consume(self, text: str) -> int:
        """Read up to the end of the object, or to where it goes wrong. Returns the number of characters read."""
        num_read = 0
        try:
            while num_read < len(text) and not self.is_done:
                plain = _PLAIN.match(text, num_read) if self._is_string and not self._is_escaped else None
                part = text[num_read] if plain is None else plain[0]
                self._push(part)
                num_read += len(part)
        except (ValueError, RecursionError):
            # Models forget the last bracket.
            self.is_done, self.is_wrong = self.is_complete, not self.is_complete
        return num_read

    def take(self) -> list[Piece]:
        pieces = []
        if self._name is not None and not self.has_begun:
            self.has_begun = True
            pieces.append(Piece("call", self._name, self.number))
        if arguments := "".join(self._arguments):
            pieces.append(Piece("arguments", arguments, self.number))
            self._arguments, self._has_arguments = [], True
        return pieces

    def finish(self) -> list[Piece]:
        """The rest at the end: a call without arguments has none to read, and their JSON is an empty object."""
        has_none = self.has_begun and not self.is_wrong and not self._has_arguments
        return [Piece("arguments", "{}", self.number)] if has_none else []

    def _push(self, part: str) -> None:
        """Read a character; in a string, plain ones at once. Raises ValueError."""
        text = self.raw + part if self._name is None else ""
        was_inside, was_complete = len(self._open) > self._depth, self.is_complete
        if self._is_string:
            self._is_string = self._is_escaped or part != '"'
            self._is_escaped = part == "\\" and not self._is_escaped
        elif part in _CLOSERS:
            self._open.append(_CLOSERS[part])
            if self._name is None and len(self._open) == 2 and (head := _HEAD.fullmatch(text)):
                self._set_name(head[2])
        elif part in "}]":
            if not self._open or self._open.pop() != part:
                raise ValueError
            self.is_complete |= self._name is not None and len(self._open) == self._depth
            if not self._open:
                self._end(text)
        elif part == "<" or not (self._open or part.isspace()):  # of a marker; or before the object
            raise ValueError
        elif part == ":" and len(self._open) == 1 and self._name is None and not _FIRST_KEY.match(text):
            raise ValueError
        else:
            self._is_string = part == '"'
        if self._name is None:
            self.raw = text
        elif not was_complete and (was_inside or len(self._open) > self._depth):
            self._arguments.append(part)

    def _set_name(self, name: object) -> None:
        if not isinstance(name, str) or (self._names is not None and name not in self._names):
            raise ValueError
        self._name = name

    def _end(self, text: str) -> None:
        if self._name is None:
            call = json.loads(text)
            self._set_name(call.get("name"))
            given = call.get("arguments", call.get("parameters"))
            self._arguments.append(given if isinstance(given, str) else json.dumps(given or {}, ensure_ascii=False))
        self.is_done = self.is_complete = True
