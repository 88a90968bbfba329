"""Thoughts of models that think before they answer: their markers, and constraints that begin after them.

Sources: the chat templates of DeepSeek-R1, Qwen3 and Magistral.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from outrider.errors import OptionError
from outrider.records import Constraint, Effect

_FORMATS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}

Stage = Literal["before", "in", "after"]
"""Before thoughts, which may be left out; in them; after them."""


@dataclass(frozen=True, slots=True)
class Thinking:
    """Markers around thoughts, which are tokens."""

    begin: str
    end: str
    begin_id: int
    end_id: int

    def stage_of(self, tokenizer: Any, prompt_ids: Sequence[int], begun: str = "") -> Stage:
        """Where an output begins: templates may write the first marker, or both.

        Args:
            begun: text that the output continues.
        """
        if begun.strip():
            return "in" if begun.rfind(self.begin) > begun.rfind(self.end) else "after"
        last = next((i for i in reversed(prompt_ids) if i in self.ids or tokenizer.decode([i]).strip()), None)
        return "in" if last == self.begin_id else "after" if last == self.end_id else "before"

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
    vocabulary = tokenizer.get_vocab()
    if name not in ("auto", "none", *_FORMATS):
        raise OptionError("--reasoning-parser", name, f"choose auto, none, {' or '.join(_FORMATS)}")
    for own, (begin, end) in _FORMATS.items():
        if name in ("auto", own) and begin in vocabulary and end in vocabulary:
            return Thinking(begin, end, vocabulary[begin], vocabulary[end])
    if name in _FORMATS:
        raise OptionError("--reasoning-parser", name, f"the tokenizer has no tokens {' and '.join(_FORMATS[name])}")
    return None


class AfterThinking:
    """Constraint of the output after the thoughts, which are free (see ``outrider.records.Constraint``). The output
    cannot end in them, since it would then lack what the constraint demands.

    Args:
        inner: from its first token on.
        stage: where the output begins.
        end_ids: tokens that end the sequence.
    """

    def __init__(
        self, inner: Constraint, thinking: Thinking, stage: Stage, vocab_size: int, end_ids: frozenset[int]
    ) -> None:
        self._in_thoughts = np.ones(vocab_size, np.bool_)
        self._in_thoughts[[*end_ids]] = False
        self._inner, self._thinking, self._stage = inner, thinking, stage
        self._past: list[tuple[Stage, bool]] = []  # before each token: the stage, and whether the token is of ``inner``

    @property
    def error(self) -> str | None:
        return self._inner.error

    def effect(self) -> Effect | None:
        if self._stage == "in":
            return self._in_thoughts
        mask = self._inner.effect()
        if self._stage == "before" and isinstance(mask, np.ndarray) and mask.dtype == np.bool_:
            mask = mask.copy()
            mask[self._thinking.begin_id] = True
        return mask

    def push(self, token_id: int) -> bool:
        stage, is_inner = self._stage, False
        if stage == "in":
            if not self._in_thoughts[token_id]:
                return False
            self._stage = "after" if token_id == self._thinking.end_id else "in"
        elif stage == "before" and token_id == self._thinking.begin_id:
            self._stage = "in"
        elif self._inner.push(token_id):
            self._stage, is_inner = "after", True
        else:
            return False
        self._past.append((stage, is_inner))
        return True

    def pop(self, num_tokens: int) -> None:
        num_inner = 0
        for _ in range(num_tokens):
            self._stage, is_inner = self._past.pop()
            num_inner += is_inner
        self._inner.pop(num_inner)
