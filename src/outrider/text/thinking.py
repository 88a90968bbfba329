"""Thoughts of models that think before they answer: their markers, their budget, and constraints that begin after them.

Sources: the chat templates of DeepSeek-R1, Qwen3, Magistral and Gemma 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outrider.errors import OptionError
from outrider.records import Constraint, Effect

# Names -> the marker token that begins thoughts, a label after it, and the marker token that ends them.
_FORMATS = {
    "think": ("<think>", "", "</think>"),
    "mistral": ("[THINK]", "", "[/THINK]"),
    "gemma4": ("<|channel>", "thought", "<channel|>"),
}
_MOST_AFTER_MARKER = 16  # tokens of a prompt: a label, and white space

Stage = Literal["before", "in", "after"]
"""Before thoughts, which may be left out; in them; after them."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers around thoughts, which are tokens.

    Attributes:
        label: text after the first marker that is no thought; empty for none.
    """

    begin: str
    end: str
    begin_id: int
    end_id: int
    label: str = ""

    def stage_of(self, tokenizer: Any, prompt_ids: Sequence[int], begun: str | None = "") -> Stage:
        """Where an output begins: templates may write the first marker, or both.

        Args:
            begun: text that the output of a chat continues; None if the prompt is no chat. Then a marker anywhere in
                it counts; in a chat, messages may speak of markers.
        """
        if begun is None and next((i for i in reversed(prompt_ids) if i in self.ids), None) == self.begin_id:
            return "in"
        if begun is not None and begun.strip():
            return "in" if begun.rfind(self.begin) > begun.rfind(self.end) else "after"
        last = list(prompt_ids[-_MOST_AFTER_MARKER:])
        at = next((i for i in reversed(range(len(last))) if last[i] in self.ids), None)
        if at is None:
            return "before"
        is_begin = last[at] == self.begin_id
        rest = tokenizer.decode(last[at + 1 :]).strip()
        return "before" if rest != (self.label if is_begin else "") else "in" if is_begin else "after"

    def num_thoughts(self, tokenizer: Any, stage: Stage, token_ids: Sequence[int]) -> int:
        """Number of tokens of an output between the markers; without the second one, to the end."""
        ids = list(token_ids)
        if stage == "before" and self.begin_id in ids:
            begin = ids.index(self.begin_id)
            if not tokenizer.decode(ids[:begin]).strip():
                stage, ids = "in", ids[begin + 1 :]
        if stage != "in":
            return 0
        return ids.index(self.end_id) if self.end_id in ids else len(ids)

    @property
    def ids(self) -> tuple[int, int]:
        return self.begin_id, self.end_id


def thinking_of(tokenizer: Any, name: str) -> Thinking | None:
    """Markers of a model's thoughts.

    Args:
        name: of the format; "none"; or "auto": the one whose markers are tokens.

    Raises:
        OptionError: there is no such format, or its markers are no tokens.
    """
    if name not in ("auto", "none", *_FORMATS):
        raise OptionError("--reasoning-parser", name, f"choose auto, none, {' or '.join(_FORMATS)}")
    for own, (begin, label, end) in _FORMATS.items():
        ids = [tokenizer.convert_tokens_to_ids(marker) for marker in (begin, end)]
        if name in ("auto", own) and None not in ids and tokenizer.convert_ids_to_tokens(ids) == [begin, end]:
            return Thinking(begin, end, ids[0], ids[1], label)
    if name in _FORMATS:
        begin, _, end = _FORMATS[name]
        raise OptionError("--reasoning-parser", name, f"the tokenizer has no tokens {begin} and {end}")
    return None


class Thoughts:
    """Constraint of an output with thoughts (see ``outrider.records.Constraint``): ``inner`` begins after them, and
    they have a budget.

    Thoughts are free but for their end: the output cannot end in them if there is an ``inner``, whose demands it would
    lack; and after the last token of the budget only the marker that ends them is allowed. Later thoughts are text.

    Args:
        inner: constraint of the output from its first token after the thoughts on; None for none.
        stage: where the output begins.
        end_ids: tokens that end the sequence.
        budget: the most tokens between the markers; None for any number. Tokens of the prompt do not count.
        is_blank: whether a token is white space, which may come before the first marker.
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
    ) -> None:
        self._inner, self._thinking, self._stage = inner, thinking, stage
        self._budget, self._is_blank = budget, is_blank
        self._free: NDArray[np.bool_] | None = None
        if inner is not None:
            self._free = np.ones(vocab_size, np.bool_)
            self._free[[*end_ids]] = False
        self._forced = np.arange(vocab_size) == thinking.end_id
        self._num_thoughts = 0
        self._past: list[tuple[Stage, bool]] = []  # before each token: the stage, and whether the token is of ``inner``

    @property
    def error(self) -> str | None:
        return None if self._inner is None else self._inner.error

    def effect(self) -> Effect | None:
        if self._stage == "in":
            return self._in_thoughts
        mask = None if self._inner is None else self._inner.effect()
        if self._stage == "before" and isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
            mask = mask.copy()
            mask[self._thinking.begin_id] = True
        return mask

    @property
    def _in_thoughts(self) -> NDArray[np.bool_] | None:
        return self._forced if self._num_thoughts == self._budget else self._free

    def push(self, token_id: int) -> bool:
        stage, is_inner = self._stage, False
        if stage == "in":
            allowed = self._in_thoughts
            if allowed is not None and not allowed[token_id]:
                return False
            self._stage = "after" if token_id == self._thinking.end_id else "in"
            self._num_thoughts += self._stage == "in"
        elif stage == "before" and token_id == self._thinking.begin_id:
            self._stage = "in"
        elif self._inner is None:
            self._stage = "before" if stage == "before" and self._is_blank(token_id) else "after"
        elif self._inner.push(token_id):
            self._stage, is_inner = "after", True
        else:
            return False
        self._past.append((stage, is_inner))
        return True

    def pop(self, num_tokens: int) -> None:
        num_inner = 0
        for _ in range(num_tokens):
            after = self._stage
            self._stage, is_inner = self._past.pop()
            self._num_thoughts -= self._stage == after == "in"
            num_inner += is_inner
        if self._inner is not None:
            self._inner.pop(num_inner)
