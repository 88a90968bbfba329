"""The state of one request: options in, chunks of text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from outrider.errors import OutriderError
from outrider.records import Chunk, Completion, Origin, Request, RowRound, Timing
from outrider.text.row_text import RowText

Receive = Callable[[int, Chunk | OutriderError], None]
"""Takes the next chunk of a request, or the error that ends the request, with the request's number."""


def discard(number: int, item: Chunk | OutriderError) -> None:
    """Receive nothing."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request in the loop, with its text so far.

    Attributes:
        request: with ``resume_ids`` as part of the prompt.
        num_resumed: number of ``resume_ids``.
        room: the most tokens that rounds may commit, prompt included.
        origins: one for each token pushed to ``text``.
        chunks: so far, where they are collected.
        number, receive: where the chunks go; set when the request is submitted, as are ``client`` and ``priority``.
        index: the engine's number of the row; -1 while the request waits for an engine.
    """

    request: Request
    text: RowText
    num_prompt_tokens: int
    num_resumed: int
    room: int
    origins: list[Origin] = field(init=False)
    chunks: list[Chunk] = field(default_factory=list, init=False)
    number: int = 0
    receive: Receive = discard
    client: str = ""
    priority: int = 0
    index: int = -1

    def __post_init__(self) -> None:
        self.origins = ["accepted"] * self.num_resumed  # their text was emitted, except characters held back

    def chunk(self, round_: RowRound, timing: Timing) -> Chunk:
        """The chunk of one of its rounds."""
        self.origins.extend(round_.origins)
        if round_.finish_reason is not None:
            self.text.finish()
        seed = self.request.sampling.seed
        assert seed is not None
        # Text by origin: neighbouring tokens of the same origin are joined.
        groups = groupby(self.text.take(), key=lambda item: self.origins[item[0]])
        pieces = tuple(("".join(piece for _, piece in group), origin) for origin, group in groups)
        return Chunk.of(round_, pieces, timing, seed, row=self.number)

    @property
    def completion(self) -> Completion:
        """The sum of ``chunks``."""
        return Completion.of(self.chunks, self.num_prompt_tokens)


def collect(states: Sequence[RequestState], chunks: Iterable[Chunk]) -> list[Completion]:
    """The completions of all requests."""
    for chunk in chunks:
        states[chunk.row].chunks.append(chunk)
    return [state.completion for state in states]
