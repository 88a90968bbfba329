"""Thoughts of models that think before they answer: their markers, their budget, and constraints that begin after them.

Sources: the chat templates of DeepSeek-R1, Qwen3, Magistral, Gemma 4 and gpt-oss, and OpenAI's description of the
latter's format (openai/harmony, ``docs/format.md``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OptionError
from outrider.records import Constraint, Effect

# Names -> the markers that begin thoughts, a label after them, and the marker that ends them; in formats of channels
# also the beginning of a later message, and the header of the answer.
_FORMATS = {
    "think": ("<think>", "", "</think>", "", ""),
    "mistral": ("[THINK]", "", "[/THINK]", "", ""),
    "gemma4": ("<|channel>", "thought", "<channel|>", "", ""),
    "harmony": ("<|channel|>analysis<|message|>", "", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
}
_CHANNELS = ("<|channel|>analysis", "<|channel|>commentary", "<|channel|>final", "<|message|>", "<|constrain|>json")
_MARKER = r"<[^<>]+>|\[[^\[\]]+\]"
_MOST_AFTER_MARKER = 16  # tokens of a prompt: a label, and white space

Stage = Literal["before", "in", "after"]
"""Before thoughts, which may be left out; in them; after them."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers around thoughts, which are tokens.

    Attributes:
        label: text after the first marker that is no thought; empty for none.
        turn, answer: in a format of channels, the beginning of a message after a thought, and the header of the answer
            in it; then later messages may be thoughts too, and headers are no content. Else empty.
    """

    begin: str
    end: str
    begin_ids: tuple[int, ...]
    end_id: int
    label: str = ""
    turn: str = ""
    answer: str = ""
    turn_ids: tuple[int, ...] = ()
    answer_ids: tuple[int, ...] = ()

    def stage_of(self, tokenizer: Any, prompt_ids: Sequence[int], begun: str | None = "") -> Stage:
        """Where an output begins: templates may write the first marker, or both. The output of a chat continues a text;
        it is None if the prompt is no chat. Then a marker anywhere in it counts; in a chat, messages may speak of
        markers. Of channels, text without a header's beginning at its end goes on with no message."""
        if begun is None:
            place, is_begin = self._last_marker(prompt_ids)
            if is_begin:
                return "in"
            if self.turn and place != len(prompt_ids) and not self.head_of(prompt_ids):
                return "after"
        if begun is not None and begun.strip():
            return "in" if begun.rfind(self.begin) > begun.rfind(self.end) else "after"
        last = list(prompt_ids[-_MOST_AFTER_MARKER:])
        after, is_begin = self._last_marker(last)
        if after == 0:
            return "before"
        rest = tokenizer.decode(last[after:]).strip()
        if rest != (self.label if is_begin else self.turn + self.answer):
            return "before"
        return "in" if is_begin else "after"

    def head_of(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """Beginning of a message's header at the end of a prompt; empty for none, and without channels."""
        headers = [self.turn_ids + ids for ids in (self.begin_ids, self.answer_ids) if self.turn]
        heads = [header[:num] for header in headers for num in range(1, len(header) + 1)]
        return max((head for head in heads if tuple(prompt_ids[-len(head) :]) == head), key=len, default=())

    def _last_marker(self, ids: Sequence[int]) -> tuple[int, bool]:
        """The place after the last marker, 0 without any, and whether it begins thoughts."""
        for place in reversed(range(len(ids))):
            is_begin = tuple(ids[place : place + len(self.begin_ids)]) == self.begin_ids
            if ids[place] == self.end_id or is_begin:
                return place + (len(self.begin_ids) if is_begin else 1), is_begin
        return 0, False

    @property
    def ids(self) -> tuple[int, ...]:
        return *self.begin_ids, self.end_id, *self.turn_ids, *self.answer_ids

    @property
    def headers(self) -> tuple[str, ...]:
        """Parts of messages that are no content, in a format of channels; calls have a recipient between them."""
        return (self.turn, self.end, *_CHANNELS) if self.turn else ()


def thinking_of(tokenizer: Any, name: str) -> Thinking | None:
    """Markers of a model's thoughts, by the name of their format; "none"; or "auto": the one whose markers are tokens.
    Raises OptionError: there is no such format, or its markers are no tokens."""
    if name not in ("auto", "none", *_FORMATS):
        raise OptionError("--reasoning-parser", name, f"choose auto, none, {' or '.join(_FORMATS)}")
    for own, (begin, label, end, turn, answer) in _FORMATS.items():
        ids = [_ids_of(tokenizer, text) for text in (begin, end, turn, answer)]
        if name in ("auto", own) and None not in ids:
            begin_ids, (end_id,), turn_ids, answer_ids = (one or () for one in ids)
            return Thinking(begin, end, begin_ids, end_id, label, turn, answer, turn_ids, answer_ids)
    if name in _FORMATS:
        begin, _, end, *_ = _FORMATS[name]
        raise OptionError("--reasoning-parser", name, f"the tokenizer has no tokens {begin} and {end}")
    return None


def _ids_of(tokenizer: Any, text: str) -> tuple[int, ...] | None:
    """Tokens of markers and of words between them; None if a marker is no token."""
    ids: list[int] = []
    for part in re.findall(rf"{_MARKER}|[^<\[]+", text):
        if re.fullmatch(_MARKER, part):
            own = [tokenizer.convert_tokens_to_ids(part)]
            if own == [None] or tokenizer.convert_ids_to_tokens(own) != [part]:
                return None
        else:
            own = tokenizer.encode(part, add_special_tokens=False)
        ids += own
    return tuple(ids)


class Thoughts:
    """Constraint of an output with thoughts (see ``outrider.records.Constraint``): ``inner`` begins after them, and
    they have a budget.

    Thoughts are free but for their end: the output cannot end in them if there is an ``inner``, whose demands it would
    lack; and after the last token of the budget only the marker that ends them is allowed. Later thoughts are text; of
    channels they share the budget, and none begins after it.

    Args:
        inner: constraint of the output from its first token after the thoughts on; None for none.
        budget: the most tokens between the markers; None for any number. Tokens of the prompt do not count.
        is_blank: whether a token is white space, which may come before the first marker.
        head: beginning of a message's header that the prompt has written (see ``Thinking.head_of``).
    """

    def __init__(
        self,
        inner: Constraint | None,
        thinking: Thinking,
        stage: Stage,
        vocab_size: int,
        end_ids: frozenset[int],
        budget: int | None = None,
        is_blank: Callable[[int], bool] = lambda token_id: False,
        head: tuple[int, ...] = (),
    ) -> None:
        if thinking.turn and inner is None and stage == "after":
            stage = "before"  # of a later message's thoughts
        self._inner, self._thinking, self._stage = inner, thinking, stage
        self._budget, self._is_blank = budget, is_blank
        self._head = head
        self._free: NDArray[np.bool_] | None = None
        if inner is not None:
            self._free = np.ones(vocab_size, np.bool_)
            self._free[[*end_ids]] = False
        self._forced = np.arange(vocab_size) == thinking.end_id
        self._answer = thinking.turn_ids + thinking.answer_ids
        self._num_thoughts = 0
        # Before each token: the stage, the header, and whether the token is of ``inner``.
        self._past: list[tuple[Stage, tuple[int, ...], bool]] = []

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    def effect(self) -> Effect | None:
        if self._stage == "in":
            return self._in_thoughts
        if self._inner is None:
            forbidden = self._forbidden
            return None if forbidden is None else np.arange(len(self._forced)) != forbidden
        is_before = self._stage == "before"
        mask = self._inner.effect() if not is_before or self._head == self._answer else np.zeros_like(self._forced)
        if is_before and isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
            mask = mask.copy()
            mask[[*self._next_ids]] = True
        return mask

    @property
    def _in_thoughts(self) -> NDArray[np.bool_] | None:
        return self._forced if self._num_thoughts == self._budget else self._free

    @property
    def _is_spent(self) -> bool:
        return bool(self._thinking.turn) and self._num_thoughts == self._budget

    @property
    def _forbidden(self) -> int | None:
        begin = self._thinking.begin_ids
        return begin[1] if self._is_spent and self._head[-1:] == begin[:1] else None

    @property
    def _next_ids(self) -> set[int]:
        num, thoughts = len(self._head), self._thinking.turn_ids + self._thinking.begin_ids
        headers = (self._answer,) if self._is_spent else (self._answer, thoughts)
        return {header[num] for header in headers if header[:num] == self._head and len(header) > num}

    def push(self, token_id: int) -> bool:
        thinking, past, is_inner = self._thinking, (self._stage, self._head), False
        stage, head = past
        extended = (*head, token_id)
        if stage == "in":
            allowed = self._in_thoughts
            if allowed is not None and not allowed[token_id]:
                return False
            self._num_thoughts += token_id != thinking.end_id
            if token_id == thinking.end_id:
                self._stage, self._head = "before" if thinking.turn else "after", ()
        elif stage == "before" and extended[-len(thinking.begin_ids) :] == thinking.begin_ids:
            self._stage = "in"
        elif self._inner is None:
            if token_id == self._forbidden:
                return False
            is_before = stage == "before" and (thinking.turn or self._is_blank(token_id))
            self._stage, self._head = ("before" if is_before else "after"), extended[-len(thinking.begin_ids) :]
        elif stage == "before" and token_id in self._next_ids:
            self._head = extended
        elif (stage == "after" or head == self._answer) and self._inner.push(token_id):
            self._stage, is_inner = "after", True
        else:
            return False
        self._past.append((*past, is_inner))
        return True

    def pop(self, num_tokens: int) -> None:
        num_inner = 0
        for _ in range(num_tokens):
            after = self._stage
            self._stage, self._head, is_inner = self._past.pop()
            self._num_thoughts -= self._stage == after == "in"
            num_inner += is_inner
        if self._inner is not None:
            self._inner.pop(num_inner)
