"""Forcing: p and q of a drafter of any kind along given sequences, from the engine itself.

Under the *forcing* rule the engine drafts the tokens that follow in the sequence, and commits one of them. So a round
begins at every *place* of a sequence, the token at *offset* i of its draft is the i-th after that place, and p and q
are those of the loop. A drafter with a one-hot q drafts tokens of its own; they are compared with the sequence.

Where q depends on the tokens alone, and the draft reads all of them, teacher forcing (outrider.scoring.teacher_forcing)
gives it at once; look-ups need no target (outrider.scoring.lookups). Here a sequence of n tokens takes n rounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.records import Constraint, Draft, FinishReason, Request, Verdict
from outrider.runtime.lm import LM
from outrider.sampling.probs import Probs, full, one_hot
from outrider.sampling.rules import Rule
from outrider.scoring.teacher_forcing import Text


def needs_forcing(drafter: Drafter, texts: Sequence[Text] = ()) -> bool:
    """Whether q is known in rounds only: with a model whose q depends on hidden states of the target, or on where the
    round began, or one that reads the last tokens only of one of these texts."""
    if drafter.lm is None:
        return bool(drafter.models or drafter.features)
    most = drafter.lm.context_len + 1  # the last token is not fed
    return any(len(text.ids) > most for text in texts)


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Takes the place of noise: the tokens to draw, by number of the sequence (the seed) and position.

    Attributes:
        table: [N, L]
        seeds, starts: as of noise. [B]
    """

    table: Tensor
    seeds: Tensor
    starts: Tensor

    def select(self, rows: Tensor, k: int) -> GivenTokens:
        return replace(self, seeds=self.seeds[rows], starts=self.starts[rows])

    def at(self, offset: int) -> Tensor:
        """The tokens at an offset of the round. [B]"""
        return self.table[self.seeds, self.starts + offset]

    def token(self, offset: int) -> GivenTokens:
        return replace(self, starts=self.starts + offset)


def table_of(sequences: Sequence[Sequence[int]], num_columns: int, device: torch.device) -> Tensor:
    """The sequences as rows, followed by zeros. [N, L]"""
    return torch.tensor([[*ids, *[0] * (num_columns - len(ids))] for ids in sequences], device=device)


def forcing_rule(
    table: Tensor, verify: Callable[[Probs, Draft, GivenTokens], Verdict], draw: Callable[[Any, Tensor], Tensor]
) -> Rule:
    """A rule whose noise is a table of tokens. Its functions may have effects, so it must run eagerly.

    Args:
        table: the tokens of the request with seed i, in row i. [N, L]
        draw: (q rows [B, V], the table's tokens [B]) -> ids [B]
    """
    return Rule("forcing", lambda seeds, starts, k, vocab_size: GivenTokens(table, seeds, starts), draw, verify)


@dataclass(frozen=True, slots=True)
class ForcedRound:
    """A round of M sequences.

    Attributes:
        rows, places: index of each sequence, and number of its scored tokens before the round. [M]
        num_drafted: [M]
        ids: the sequence's tokens at the K offsets. [M, K]
        is_scored: whether one was drafted there, after the sequence's own tokens, and the sequence has one. [M, K]
        p, q: at the K offsets, each row up to its sum. [M, K, V]
    """

    rows: Tensor
    places: Tensor
    num_drafted: Tensor
    ids: Tensor
    is_scored: Tensor
    p: Tensor
    q: Tensor


class _End:
    """Ends a row after some tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    def push(self, token_id: int) -> FinishReason | None:
        self._num_left -= 1
        return None if self._num_left else "stop"


@torch.inference_mode()
def force_drafts(
    target: LM,
    drafter: Drafter,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    k: int,
    *,
    num_slots: int | None = None,
    constraints: Sequence[Constraint | None] | None = None,
) -> Iterator[ForcedRound]:
    """Lead the engine along texts, round by round.

    Args:
        texts: each with a token to score, and within the target's context.
        samplings: the options of each; drafts get shorter near ``max_new_tokens``, as in the loop.
        num_slots: concurrent texts; None for all.
        constraints: the constraint of each text, advanced to the text's first scored token.

    Raises:
        NumericsError: the target gave NaN or infinite logits.
    """
    ids = table_of([text.ids for text in texts], max(len(text.ids) for text in texts) + k + 1, target.device)
    ends = torch.tensor([len(text.ids) for text in texts], device=ids.device)
    num_given = torch.tensor([text.num_given for text in texts], device=ids.device)
    num_done = torch.zeros_like(num_given)
    rounds: deque[tuple[Probs, Draft]] = deque()

    def verify(p: Probs, draft: Draft, noise: GivenTokens) -> Verdict:
        rounds.append((p, draft))
        return Verdict(torch.zeros_like(draft.num_drafted), noise.at(0), torch.zeros(*draft.ids.shape, 2))

    requests = [
        Request(
            text.ids[: text.num_given],
            replace(sampling, seed=i),
            _End(len(text.ids) - text.num_given),
            num_resumed=text.num_given - (text.num_prompt or text.num_given),
            constraint=None if constraints is None else constraints[i],
        )
        for i, (text, sampling) in enumerate(zip(texts, samplings, strict=True))
    ]
    rule = forcing_rule(ids, verify, lambda q, tokens: tokens)
    eager = target.uncaptured(), drafter.with_models(LM.uncaptured)
    for round_ in decode(*eager, requests, rule, num_draft_tokens=k, num_slots=num_slots):
        p, draft = rounds.popleft()
        rows, slots = torch.tensor([(row.row, row.slot) for row in round_.rows], device=ids.device).T
        places = num_done[rows]
        num_done[rows] += 1
        offsets = torch.arange(draft.ids.shape[1], device=ids.device)
        positions = (num_given[rows] + places)[:, None] + offsets
        own, drafted, num_drafted = ids[rows[:, None], positions], draft.ids[slots], draft.num_drafted[slots]
        num_led = (drafted == own).long().cumprod(dim=1).sum(dim=1)  # drafted tokens that are the sequence's
        is_reached = offsets <= num_led[:, None]
        p_rows = full(p[slots, :-1])
        q = one_hot(drafted, p_rows) if draft.probs is None else full(draft.probs[slots])
        yield ForcedRound(
            rows=rows,
            places=places,
            num_drafted=num_drafted,
            ids=own,
            is_scored=is_reached & (offsets < num_drafted[:, None]) & (positions < ends[rows][:, None]),
            p=p_rows,
            q=q,
        )


@dataclass(frozen=True, slots=True)
class MeasuredDrafts:
    """Measurements of the drafts that begin after each of the n scored tokens of a text, the first before them.

    Attributes:
        num_drafted: [n]
        values: NaN where no token is scored. [S, n, K]
    """

    num_drafted: NDArray[np.int64]
    values: NDArray[np.float64]


def measure_drafts(
    target: LM,
    drafter: Drafter,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    k: int,
    measure: Callable[[Tensor, Tensor, Tensor], Tensor],
    num_values: int,
) -> list[MeasuredDrafts]:
    """Measure p and q at every place and offset of texts, in one batch. Arguments and errors: see ``force_drafts``.

    Args:
        measure: (p [M, V], q [M, V], the texts' tokens [M]) -> S numbers for each. [S, M]
        num_values: S
    """
    lengths = [len(text.ids) - text.num_given for text in texts]
    found = [MeasuredDrafts(np.zeros(n, np.int64), np.full((num_values, n, k), np.nan)) for n in lengths]
    for one in force_drafts(target, drafter, texts, samplings, k):
        values = torch.full((num_values, *one.ids.shape), torch.nan, dtype=torch.float64)
        at = one.is_scored
        values[:, at.cpu()] = measure(one.p[at], one.q[at], one.ids[at]).to("cpu", torch.float64)
        counts = zip(one.rows.tolist(), one.places.tolist(), one.num_drafted.tolist(), strict=True)
        for i, (row, place, num_drafted) in enumerate(counts):
            found[row].num_drafted[place] = num_drafted
            found[row].values[:, place, : values.shape[2]] = values[:, i].numpy()
    return found
