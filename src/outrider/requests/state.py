"""The state of one request: options in, chunks of text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from outrider.records import Chunk, Completion, Origin, Request, RowRound, Timing
from outrider.text.row_text import RowText


@dataclass(slots=True)
class RequestState:
    """One request in the loop, with its text so far.

    Attributes:
        request: with ``resume_ids`` as part of the prompt.
        num_resumed: number of ``resume_ids``.
        origins: one for each token pushed to ``text``.
        chunks: so far, where they are collected.
    """

    request: Request
    text: RowText
    num_prompt_tokens: int
    num_resumed: int
    origins: list[Origin] = field(init=False)
    chunks: list[Chunk] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.origins = ["accepted"] * self.num_resumed  # their text was emitted, except characters held back

    def chunk(self, round_: RowRound, timing: Timing, row: int) -> Chunk:
        """The chunk of one of its rounds, for a caller who knows it as ``row``."""
        self.origins.extend(round_.origins)
        if round_.finish_reason is not None:
            self.text.finish()
        seed = self.request.sampling.seed
        assert seed is not None
        return Chunk.of(round_, _pieces(self.text.take(), self.origins), timing, seed, row=row)

    @property
    def completion(self) -> Completion:
        """The sum of ``chunks``."""
        return Completion.of(self.chunks, self.num_prompt_tokens)


def _pieces(text: Sequence[tuple[int, str]], origins: Sequence[Origin]) -> tuple[tuple[str, Origin], ...]:
    """Group text by origin: neighbouring tokens of the same origin are joined."""
    groups = groupby(text, key=lambda item: origins[item[0]])
    return tuple(("".join(piece for _, piece in group), origin) for origin, group in groups)
