"""Stop conditions of a row, and the part of its text that is final.

End tokens, stop tokens and stop strings are applied token by token, before streaming and counting. Text that could be
the prefix of a stop string is held back until it is decided. Where thoughts are split off, stop strings count in the
content alone, of one message in formats of channels. Only the token after white space tells whether a thought follows:
there, a stop string of white space ends the row one token late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from operator import itemgetter

from outrider.records import FinishReason
from outrider.text.thought_splitter import Piece, ThoughtSplitter, num_undecided
from outrider.text.tokenizer import Detokenizer


class RowText:
    """Text of one row, token by token.

    Args:
        detokenizer: None if there are only ids, no text.
        eos_ids, stop_ids, stop: tokens and strings that end the row; they have no text, and are not part of its text.
        min_tokens: stop strings that are complete by then do not end the row.
        includes_stop: the token or string that ends the row is part of its text.
        thoughts: splits off the thoughts of this row; None if all of its text is content.

    Attributes:
        stop_reason: the stop string or stop token that has ended the row; None if none has.
        pieces: for each token, the text that has come with it, also where a stop string cuts it off.
        parts: thoughts and content in the text of each ``take``. (Their reader may be behind the row.)
        num_thoughts: tokens between the markers of thoughts.
    """

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        eos_ids: Collection[int],
        stop: Sequence[str],
        stop_ids: Collection[int] = (),
        min_tokens: int = 0,
        includes_stop: bool = False,
        thoughts: ThoughtSplitter | None = None,
    ) -> None:
        assert detokenizer is not None or not stop
        self._detokenizer = detokenizer
        self._eos_ids, self._stop_ids = frozenset(eos_ids), frozenset(stop_ids)
        self._stop = tuple(stop)
        self._min_tokens, self._includes_stop = min_tokens, includes_stop
        self._thoughts = thoughts
        self.stop_reason: str | int | None = None
        self.pieces: list[str] = []
        self._held: list[tuple[int, str]] = []  # (index of the token, its text), not yet final
        self._content = ""  # of the held text, at its end: stop strings are searched in it
        self._certain: list[tuple[int, str]] = []
        self._num_characters = 0  # of all text
        self._split: list[Piece] = []  # since the last take, with the held content; neighbours of a kind are joined
        self.parts: deque[list[Piece]] = deque()
        self.num_thoughts = 0

    def push(self, token_id: int) -> FinishReason | None:
        """Add the next token; return the finish reason if the row ends with it."""
        self.pieces.append("")
        was_in_thoughts = self._is_in_thoughts
        self.num_thoughts += was_in_thoughts
        reason: FinishReason | None = None
        if token_id in self._eos_ids:
            reason = "eos"
        elif token_id in self._stop_ids:
            reason, self.stop_reason = "stop", token_id
        if self._detokenizer is None or (reason is not None and not self._includes_stop):
            return reason
        if piece := self._detokenizer.push(token_id):
            self.pieces[-1] = piece
            self._held.append((len(self.pieces) - 1, piece))
        num_held = sum(len(piece) for _, piece in self._held)
        parts = self._parts_of(piece)
        self.num_thoughts -= was_in_thoughts and not self._is_in_thoughts  # the marker of their end
        for part in parts:
            self._add(part)
            if reason is not None or not self._stop:
                continue
            if part.kind != "content":
                self._content = ""
                continue
            before, text = len(self._content), self._content + part.text
            # A stop string that was complete before this part came too early; it is held as the prefix of a longer one.
            found = [(text.find(string, max(0, before - len(string) + 1)), string) for string in self._stop]
            ends = [(at, string) for at, string in found if at >= 0]
            if ends and len(self.pieces) > self._min_tokens:
                at, self.stop_reason = min(ends, key=itemgetter(0))
                num_beyond = len(text) - at - (len(self.stop_reason) if self._includes_stop else 0)
                self._release(num_held - (self._num_characters - part.end) - num_beyond)
                self._held.clear()
                self._take_back(num_beyond)
                self._content = ""
                self._detokenizer = None  # any remainder lies beyond the end
                return "stop"
            self._content = text[len(text) - num_undecided(text, self._stop) :]
        if reason is None:
            num_waiting = 0 if self._thoughts is None or not self._stop else self._thoughts.num_waiting
            self._release(num_held - num_waiting - len(self._content))
        return reason

    def finish(self) -> None:
        """End the row: held text cannot become a stop string any more."""
        if self._detokenizer is not None:
            rest = self._detokenizer.flush()
            self._held.append((len(self.pieces) - 1, rest))
            self._release(sum(len(piece) for _, piece in self._held))
            self._content = ""
            for part in self._parts_of(rest, is_end=True):
                self._add(part)

    def take(self) -> list[tuple[int, str]]:
        """Text that has become final since the last call, as (index of its token, text)."""
        certain, self._certain = self._certain, []
        held = self._take_back(len(self._content))
        self.parts.append([part for part in self._split if part.text])
        self._split = held
        return certain

    @property
    def _is_in_thoughts(self) -> bool:
        return self._thoughts is not None and self._thoughts.is_in_thoughts

    def _parts_of(self, text: str, *, is_end: bool = False) -> list[Piece]:
        self._num_characters += len(text)
        if self._thoughts is None:
            return [Piece("content", text, end=self._num_characters)]
        return self._thoughts.feed(text, is_end=is_end)

    def _add(self, part: Piece) -> None:
        last = self._split[-1] if self._split else None
        if last is None or last.kind != part.kind or _is_header(last) or _is_header(part):
            self._split.append(part)
        else:
            self._split[-1] = part._replace(text=last.text + part.text)

    def _take_back(self, num_characters: int) -> list[Piece]:
        """Remove content from the end of what is split, and return it."""
        if not num_characters:
            return []
        last = self._split.pop()
        at = len(last.text) - num_characters
        self._split.append(last._replace(text=last.text[:at], end=last.end - num_characters))
        return [last._replace(text=last.text[at:])]

    def _release(self, num_characters: int) -> None:
        while self._held and num_characters >= len(self._held[0][1]):
            index, piece = self._held.pop(0)
            num_characters -= len(piece)
            if piece:
                self._certain.append((index, piece))
        if self._held and num_characters > 0:
            index, piece = self._held[0]
            self._certain.append((index, piece[:num_characters]))
            self._held[0] = (index, piece[num_characters:])


def _is_header(part: Piece) -> bool:
    return part.kind == "reasoning" and not part.text.strip()
