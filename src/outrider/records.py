"""The records that the parts exchange. Read this file first.

A ``Sampling`` holds the sampling options of one row. In each round a drafter proposes a ``Draft``, a rule verifies it
and returns a ``Verdict``, and the loop yields a ``Round`` with the committed tokens. ``Decoder`` turns rounds into
``Chunk``s of text, and these into a ``Completion``. ``Stats`` and ``Timing`` add; ratios are computed at the edge.

Words: p and q are the target's and the draft's probabilities *after* temperature, top-k and the like; B rows, K drafted
tokens, V vocabulary. A committed token is *accepted* (drafted and kept), a *correction* (drawn from the residual after
a rejection) or a *bonus* (drawn from p after full acceptance; with K = 0 every token is one).

This module knows no model and no file. It does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields
from itertools import zip_longest
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

from outrider.errors import OutriderError
from outrider.options import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Origin = Literal["accepted", "correction", "bonus"]
FinishReason = Literal["eos", "stop", "length", "error"]
"""``eos``: an end token of the model; ``stop``: a stop string or token; ``length``: max_new_tokens, or the context is
full; ``error``: a model gave NaN or infinite logits."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The drafter's proposal for one round.

    Attributes:
        ids: the drafted tokens. [B, K]
        probs: q, the rows that ``ids`` were drawn from: a tensor, or candidates (sampling/candidates.py); None where q
            is one-hot at ``ids``. [B, K, V]
        num_drafted: drafted tokens of each row; further columns are padding. [B]
        is_finite: whether the draft model's logits were finite, for each token; None without a model. [B, K]
    """

    ids: Tensor
    probs: Any
    num_drafted: Tensor
    is_finite: Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, k = self.ids.shape
        assert self.num_drafted.shape == (num_rows,)
        assert self.probs is None or self.probs.shape[:2] == (num_rows, k)
        assert self.is_finite is None or self.is_finite.shape == (num_rows, k)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of verifying a draft.

    Attributes:
        num_accepted: length of the accepted prefix. [B]
        next_ids: the token after it, correction or bonus. [B]
        drafted_probs: p and q of each drafted token. [B, K, 2]
    """

    num_accepted: Tensor
    next_ids: Tensor
    drafted_probs: Tensor

    def __post_init__(self) -> None:
        assert self.num_accepted.shape == self.next_ids.shape == self.drafted_probs.shape[:1]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a committed token and of the most probable ones, natural logarithm, raw target logits.

    Attributes:
        logprob: log-probability of the token.
        top: ids and log-probabilities, the largest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class DraftedToken(NamedTuple):
    """A drafted token with its p and q.

    Attributes:
        p, q: its probability under the target and under the draft.
    """

    token_id: int
    p: float
    q: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of wall clock; on a CUDA device the first three are device time. They add.

    Attributes:
        prefill_s: feeding prompts.
        draft_s: draft steps.
        verify_s: target forwards of rounds.
        total_s: all of these and the rest.
    """

    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    total_s: float = 0.0

    def __add__(self, other: Timing) -> Timing:
        return Timing(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def decode_s(self) -> float:
        """Total without prefill."""
        return self.total_s - self.prefill_s

    @property
    def rest_s(self) -> float:
        """Bookkeeping, readback, waiting."""
        return self.total_s - self.prefill_s - self.draft_s - self.verify_s

    def to_json(self) -> dict[str, float]:
        """The seconds by part."""
        return {name: getattr(self, f"{name}_s") for name in ("prefill", "draft", "verify", "rest", "total")}


@dataclass(frozen=True, slots=True)
class RowRound:
    """The tokens that one round committed to one row.

    Attributes:
        row: index of the request.
        token_ids: the committed tokens, after stop handling.
        origins: one for each token.
        num_drafted, num_accepted: as verified, before stop handling.
        is_truncated: the row ended inside the round; tokens after the end were dropped.
        finish_reason: set in a row's last round, as in ``Completion``.
        logprobs: one for each token, if asked for.
        num_cached_tokens: in a row's first round in a slot, the prompt tokens found in the cache.
        queued_s: in a row's first round in a slot, the seconds that the row waited for a slot.
        error: why the row has ended, where ``finish_reason`` is "error"; no token of this round is committed then.
        drafted: all drafted tokens, rejected or not, if asked for.
        slot: the row's slot of the cache.
        has_broken_draft: the draft was cut, since the draft model gave NaN or infinite logits.
        logits: the target's raw logits for each token, if asked for. [N, V]
    """

    row: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_drafted: int
    num_accepted: int
    is_truncated: bool
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] | None
    num_cached_tokens: int = 0
    error: OutriderError | None = None
    drafted: tuple[DraftedToken, ...] | None = None
    slot: int = field(default=0, compare=False)
    queued_s: float = field(default=0.0, compare=False)
    has_broken_draft: bool = False
    logits: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def stats(self) -> Stats:
        """The counts of this round."""
        if self.error is not None:
            return Stats()
        if self.is_truncated:
            return Stats(num_generated_tokens=len(self.token_ids), num_truncated_rounds=1)
        return Stats(
            num_generated_tokens=len(self.token_ids),
            acceptance_histogram=(0,) * self.num_accepted + (1,),
            drafted_histogram=(0,) * self.num_drafted + (1,),
            full_histogram=(0,) * self.num_drafted + (1,) if self.num_accepted == self.num_drafted else (),
        )


_after_row = attrgetter(*[one.name for one in fields(RowRound)][1:])


class Round(NamedTuple):
    """One draft-verify-commit cycle over the unfinished rows."""

    rows: tuple[RowRound, ...]
    timing: Timing


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts of rounds by outcome, of one sequence or several. They add. Counts of real rounds are integers, expected
    ones are not. The acceptance of a truncated round is unknown beyond the end, so it counts in
    ``num_generated_tokens`` and ``num_truncated_rounds`` only.

    Attributes:
        acceptance_histogram: at index i the rounds in which exactly i drafted tokens were accepted.
        drafted_histogram: at index i the rounds in which exactly i tokens were drafted.
        full_histogram: at index i the rounds in which i tokens were drafted and all accepted.
        num_truncated_rounds: rounds in which the sequence ended; they are in no histogram.
    """

    num_generated_tokens: int = 0
    acceptance_histogram: tuple[float, ...] = ()
    drafted_histogram: tuple[float, ...] = ()
    full_histogram: tuple[float, ...] = ()
    num_truncated_rounds: float = 0

    def __add__(self, other: Stats) -> Stats:
        pairs = [(getattr(self, one.name), getattr(other, one.name)) for one in fields(self)]
        sums: Any = [add_counts(a, b) if isinstance(a, Sequence) else a + b for a, b in pairs]
        return Stats(*sums)

    @property
    def num_rounds(self) -> float:
        """Rounds that were not truncated."""
        return sum(self.acceptance_histogram)

    @property
    def num_draft_tokens(self) -> float:
        return _weighted(self.drafted_histogram)

    @property
    def num_accepted_draft_tokens(self) -> float:
        return _weighted(self.acceptance_histogram)

    @property
    def mean_acceptance_length(self) -> float | None:
        """tau: tokens committed per round, correction or bonus included. 1.0 is plain decoding."""
        return 1 + self.num_accepted_draft_tokens / self.num_rounds if self.num_rounds else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    def to_json(self) -> dict[str, object]:
        """The counts and the two ratios, under the field names that vLLM uses."""
        names = (
            "mean_acceptance_length draft_acceptance_rate acceptance_histogram drafted_histogram num_rounds "
            "num_truncated_rounds num_draft_tokens num_accepted_draft_tokens num_generated_tokens"
        )
        found = {name: getattr(self, name) for name in names.split()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _weighted(histogram: Sequence[float]) -> float:
    return sum(i * count for i, count in enumerate(histogram))


def add_counts(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
    """Add histograms element by element; the shorter one is padded with zeros."""
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk(RowRound):
    """The tokens that one round added to one row, and their text as far as it is final.

    ``text`` may lag behind ``token_ids``: an incomplete character, or a possible prefix of a stop string, is held back
    until it is decided. The joined texts of a row's chunks are the text of the completion.

    Attributes:
        row: index of the completion.
        pieces: the text, split where the origin of its tokens changes.
        timing: the round's, in the first of its chunks; zero in the others, so that the timings of all chunks add up.
        seed: the seed in use, also where none was given. Under "auto" it need not reproduce the text unless it was
            given, since K adapts to the load.
    """

    pieces: tuple[tuple[str, Origin], ...]
    timing: Timing
    seed: int

    @classmethod
    def of(
        cls, round_: RowRound, pieces: tuple[tuple[str, Origin], ...], timing: Timing, seed: int, *, row: int
    ) -> Chunk:
        """The chunk of a round of the request that the caller knows as ``row``."""
        return cls(row, *_after_row(round_), pieces=pieces, timing=timing, seed=seed)

    @property
    def text(self) -> str:
        """Text of this chunk."""
        return "".join(text for text, _ in self.pieces)


@dataclass(frozen=True, slots=True)
class Completion:
    """The output for one prompt.

    Attributes:
        text: without the stop string and without special tokens.
        token_ids: the generated tokens, an end token included.
        origins: for each token, whether it was accepted, a correction or a bonus.
        logprobs: the log-probabilities of each token, if requested.
        finish_reason: "eos" (an end token), "stop" (a stop string or token), "length" (``max_new_tokens``, or the
            context is full), "error"; None if it was interrupted.
        stats: counts of all its rounds.
        seed: see ``Chunk``.
        num_cached_tokens: prompt tokens found in the cache, and not fed again.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason | None
    stats: Stats
    num_prompt_tokens: int
    seed: int
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, chunks: Sequence[Chunk], num_prompt_tokens: int) -> Completion:
        """The sum of all chunks of a row, at least one."""
        has_logprobs = chunks[0].logprobs is not None
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
            origins=tuple(origin for chunk in chunks for origin in chunk.origins),
            logprobs=tuple(item for chunk in chunks for item in chunk.logprobs or ()) if has_logprobs else None,
            finish_reason=chunks[-1].finish_reason,
            stats=sum((chunk.stats for chunk in chunks), Stats()),
            num_prompt_tokens=num_prompt_tokens,
            seed=chunks[0].seed,
            num_cached_tokens=chunks[0].num_cached_tokens,
        )


Effect: TypeAlias = "NDArray[np.bool_] | NDArray[np.floating[Any]] | Callable[[Tensor], Tensor]"
"""On the next token: a mask of the allowed tokens, at least one [V]; biases of their logits, -inf for forbidden ones
[V]; or a function of the logits [V] -> [V], which captured steps do not take."""


class Constraint(Protocol):
    """Masks the next token of a row, or changes its logits. The loop advances it over the drafts of a round, rolls it
    back, and advances it over the committed tokens.

    Attributes:
        error: why it can give no further masks; None as long as it can.
    """

    @property
    def error(self) -> str | None: ...

    def effect(self) -> Effect | None:
        """On the next token; None for none."""
        ...

    def push(self, token_id: int) -> bool:
        """Advance by a token if it is allowed. Returns whether it is."""
        ...

    def pop(self, num_tokens: int) -> None:
        """Roll back by ``num_tokens``."""
        ...


class Stop(Protocol):
    """Decides when a row ends. Called with every committed token, in order."""

    def push(self, token_id: int) -> FinishReason | None: ...


@dataclass(frozen=True, slots=True)
class MediaPrompt:
    """A prompt with images, as the text decoder reads it (runtime/media.py).

    Attributes:
        embeddings: [1, P, D]
        position_ids: in the form that the decoder takes, where they are not those of the tokens.
        offset: what the positions of later tokens exceed their number by.
        visible: by layer type, the keys that each token sees where the model has its own masks for images. [P, P]
        more: further arguments of the decoder.
    """

    embeddings: Tensor
    position_ids: Tensor | None
    offset: int
    visible: Mapping[str, Tensor]
    more: Mapping[str, Any]

    @property
    def num_tokens(self) -> int:
        """P"""
        return self.embeddings.shape[1]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence for the loop to generate.

    Attributes:
        prompt_ids: at least one token. The last ``num_resumed`` of them are output of an earlier stream.
        sampling: with a seed; for the whole output.
        stop: called after every token.
        constraint: called before every token.
        num_draft_tokens: a constant K for this row; None where the schedule chooses.
        reports_drafts: fill ``RowRound.drafted``.
        reports_logits: fill ``RowRound.logits``.
        drafts_beyond_end: the last rounds draft as many tokens as the others, though not all of them may be committed,
            so that the output is a prefix of that with a larger ``max_new_tokens``.
        media: the embeddings of the prompt, where it has images. Drafts read the placeholders in ``prompt_ids``.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    stop: Stop | None = None
    num_draft_tokens: int | None = None
    reports_drafts: bool = False
    reports_logits: bool = False
    drafts_beyond_end: bool = False
    num_resumed: int = 0
    constraint: Constraint | None = None
    media: MediaPrompt | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval; the ends are None for a single value."""

    value: float
    low: float | None
    high: float | None
    level: float = 0.95

    def to_json(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high, "level": self.level}
