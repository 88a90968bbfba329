"""p and q along given texts, for drafters of every kind.

``along`` begins a round at every place of a text and yields p and q of the text's own tokens:

- of a draft model whose q depends on the tokens alone, by one teacher-forced pass (outrider.measure.teacher_forcing);
- of a look-up, by its own code at every place, which needs no target;
- of any other drafter by *forcing*: under a rule of its own the engine drafts the tokens that follow in the text, and
  commits one of them. So the token at *offset* i of a draft is the i-th after the *place* where the round began, and p
  and q are those of the loop. A drafter with a one-hot q drafts tokens of its own; they are compared with the text. A
  text of n tokens takes n rounds.

``measure_alpha`` averages sum_v min(p(v), q(v)) = 1 - TV(p, q) over the places of texts: the probability that a token
drawn from q is accepted under ``rejection`` (Leviathan et al. 2211.17192, corollary 3.6).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter, Rows, q_sampling
from outrider.errors import PromptError
from outrider.measure.intervals import bounded_mean
from outrider.measure.teacher_forcing import ForcedTokens, Text, force
from outrider.options import Sampling
from outrider.records import Constraint, Draft, Interval, Request, Verdict
from outrider.runtime.lm import LM
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.probs import Probs, Settings, full, normalise
from outrider.sampling.rules import REJECTION, Rule

_PLAIN = Sampling()


class Places(NamedTuple):
    """M places of texts at which a round begins.

    Attributes:
        rows, places: index of each text, and number of its scored tokens before the round. [M]
        num_drafted: [M]
        ids: the text's tokens at the K offsets. [M, K]
        drafted_ids: the drafted tokens: those of the text, unless q is one-hot. [M, K]
        is_scored: whether a token was drafted there, after the text's own tokens, and the text has one. [M, K]
        q: at the K offsets, each row up to its sum; None if one-hot. [M, K, V]
        p: likewise; None if unknown. [M, K, V]
    """

    rows: Tensor
    places: Tensor
    num_drafted: Tensor
    ids: Tensor
    drafted_ids: Tensor
    is_scored: Tensor
    q: Tensor | None
    p: Tensor | None

    def q_of_ids(self) -> Tensor:
        """q of the text's tokens. [M, K]"""
        if self.q is None:
            return (self.drafted_ids == self.ids).to(torch.float64)
        return normalise(self.q).gather(2, self.ids[..., None])[..., 0]


def needs_forcing(drafter: Drafter, texts: Sequence[Text] = ()) -> bool:
    """Whether q is known in rounds only: with a model whose q depends on hidden states of the target, or on where the
    round began, or one that reads the last tokens only of one of these texts."""
    if drafter.lm is None:
        return bool(drafter.models or drafter.features)
    most = drafter.lm.context_len + 1  # the last token is not fed
    return any(len(text.ids) > most for text in texts)


def along(
    drafter: Drafter,
    texts: Sequence[Text],
    sampling: Sampling,
    k: int,
    *,
    target: LM | None = None,
    limits: Sequence[int] | None = None,
    constraints: Sequence[Constraint] | None = None,
) -> Iterator[Places]:
    """Yield p and q; the places of a text in order. Where q depends on the tokens alone there is one offset, which
    stands for all.

    Args:
        texts: one batch, each with a token to score, and within the target's context.
        k: K.
        target: for p, and for drafters that need forcing.
        limits: of each text's output; drafts get shorter near it, as in the loop. None: all rounds draft K tokens.
        constraints: of each text, advanced to its first scored token; without a target unless it is needed. (A look-up
            proposes without.)

    Raises:
        NumericsError: a model gave NaN or infinite logits.
    """
    most = limits or [len(text.ids) + k for text in texts]
    if needs_forcing(drafter, texts):
        assert target is not None
        options = [replace(sampling, max_new_tokens=limit) for limit in most]
        yield from force_drafts(target, drafter, texts, options, k, constraints=constraints)
    elif drafter.lm is not None:
        assert target is None or constraints is None
        lm = drafter.lm
        q_settings = Settings.of([q_sampling(drafter, sampling)], lm.vocab_size, lm.device)
        p_settings = [] if target is None else [Settings.of([sampling], target.vocab_size, target.device)]
        of_target: Iterator[ForcedTokens | None] = repeat(None) if target is None else force(target, texts, p_settings)
        for chunk, own in zip(force(lm, texts, [q_settings], constraints), of_target, strict=False):
            ids = chunk.ids[:, None]
            q, p = chunk.probs(q_settings), None if own is None else own.probs(*p_settings)[:, None].to(ids.device)
            num_drafted, is_scored = torch.ones_like(chunk.ids), torch.ones_like(ids, dtype=torch.bool)
            yield Places(chunk.rows, chunk.places, num_drafted, ids, ids, is_scored, q[:, None], p)
    else:
        yield from _looked_up(drafter, texts, most, k)


def _looked_up(drafter: Drafter, texts: Sequence[Text], limits: Sequence[int], k: int) -> Iterator[Places]:
    lengths = [len(text.ids) - text.num_given for text in texts]
    wanted = [[min(k, limit - t - 1) for t in range(n)] for n, limit in zip(lengths, limits, strict=True)]
    for row, (text, proposed) in enumerate(zip(texts, proposals(drafter, texts, wanted), strict=True)):
        ids = torch.tensor(text.ids[text.num_given :])
        num_drafted = torch.tensor([len(one) for one in proposed])
        drafted_ids = torch.tensor([[*one, *[-1] * (k - len(one))] for one in proposed]).view(-1, k)
        following = torch.nn.functional.pad(ids, (0, k), value=-2).unfold(0, k, 1)[: len(ids)]
        is_scored = _is_reached(drafted_ids, following) & (torch.arange(k) < num_drafted[:, None]) & (following >= 0)
        rows = torch.full_like(ids, row)
        yield Places(rows, torch.arange(len(ids)), num_drafted, following, drafted_ids, is_scored, None, None)


def proposals(drafter: Drafter, texts: Sequence[Text], wanted: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Look up the tokens proposed before each scored token of each text.

    One session follows all texts, a token per step: its work is that of generating them. ``drafter`` has a one-hot q,
    and no models; ``wanted`` are the most tokens to propose there."""
    most = max((num for one in wanted for num in one), default=0)
    ids = torch.zeros(len(texts), max(len(text.ids) for text in texts) + most, dtype=torch.long)
    session = drafter.open(len(texts), ids.shape[1], ids.device, most)
    settings = Settings.neutral(len(texts), ids.device)
    proposed: list[list[list[int]]] = [[] for _ in texts]
    for step in range(max(map(len, wanted))):
        lengths = torch.tensor([min(text.num_given + step, len(text.ids)) for text in texts])
        for row, text, length in zip(ids, texts, lengths.tolist(), strict=True):
            begin = 0 if step == 0 else length - 1
            row[begin:length] = torch.tensor(text.ids[begin:length])
        here = [one[step] if step < len(one) else 0 for one in wanted]
        rows = Rows(
            ids=ids,
            lengths=lengths,
            last_ids=ids.gather(1, torch.stack((lengths - 2, lengths - 1), dim=1).clamp_min(0)),
            num_wanted=torch.tensor(here),
            settings=settings,
            history=NO_HISTORY,
            most_wanted=here,
            longest=int(lengths.max()),
        )
        session.catch_up(rows)
        # A one-hot q is drawn without noise, so that any rule will do.
        noise = REJECTION.make_noise(torch.zeros_like(lengths), lengths, max(here), 1)
        draft = session.propose(rows, max(here), REJECTION, noise)
        assert draft.probs is None, "a draft that is looked up has a one-hot q"
        drafts = zip(proposed, wanted, draft.ids.tolist(), draft.num_drafted.tolist(), strict=True)
        for own, num_wanted, drafted, num_drafted in drafts:
            if step < len(num_wanted):
                own.append(drafted[:num_drafted])
    return proposed


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


def _end_after(num_tokens: int) -> Any:
    reasons = iter([*[None] * (num_tokens - 1), "stop"])
    return SimpleNamespace(push=lambda token_id: next(reasons))


@torch.inference_mode()
def force_drafts(
    target: LM,
    drafter: Drafter,
    texts: Sequence[Text],
    samplings: Sequence[Sampling],
    k: int,
    *,
    num_slots: int | None = None,
    constraints: Sequence[Constraint] | None = None,
) -> Iterator[Places]:
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
            _end_after(len(text.ids) - text.num_given),
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
        own, drafted_ids, num_drafted = ids[rows[:, None], positions], draft.ids[slots], draft.num_drafted[slots]
        is_there = (offsets < num_drafted[:, None]) & (positions < ends[rows][:, None])
        is_scored = _is_reached(drafted_ids, own) & is_there
        q = None if draft.probs is None else full(draft.probs[slots])
        yield Places(rows, places, num_drafted, own, drafted_ids, is_scored, q, full(p[slots, :-1]))


def _is_reached(drafted_ids: Tensor, ids: Tensor) -> Tensor:
    """Whether all drafted tokens before each offset are those of the text. [M, K]"""
    num_led = (drafted_ids == ids).long().cumprod(dim=1).sum(dim=1)
    return torch.arange(ids.shape[1], device=ids.device) <= num_led[:, None]


def overlap(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """sum_v min(p(v), q(v)), in float64 where the device has it. [..., V], [..., V] -> [...]"""
    return torch.minimum(normalise(target_probs), normalise(draft_probs)).sum(dim=-1)


@torch.inference_mode()
def measure_alpha(
    target: LM, drafter: Drafter, texts: Sequence[Text], sampling: Sampling = _PLAIN, batch_size: int = 8
) -> Interval:
    """Measure alpha, of a round's first token, with an interval over the texts. Nothing is generated. ``drafter``: with
    a q that is not one-hot. ``texts``: cut to the target's context; texts without a token to score are left out. Raises
    PromptError: there is nothing to score."""
    most = target.context_len
    texts = [Text(text.ids[:most], text.num_given) for text in texts if min(len(text.ids), most) > text.num_given]
    sums = torch.zeros(2, len(texts), dtype=torch.float64)  # of overlaps, and of tokens
    for begin in range(0, len(texts), batch_size):
        for places in along(drafter, texts[begin : begin + batch_size], sampling, 1, target=target):
            if places.q is not None and places.p is not None:  # else nothing could be drafted
                is_scored = places.is_scored[:, 0]
                values = overlap(places.p[is_scored, 0], places.q[is_scored, 0]).to("cpu", torch.float64)
                rows = begin + places.rows[is_scored].cpu()
                sums.index_add_(1, rows, torch.stack((values, torch.ones_like(values))))
    overlaps, counts = sums[:, sums[1] > 0].tolist()
    if not counts:
        what = f"{drafter.name} has drafted no token of these texts" if texts else "no text has two tokens or more"
        raise PromptError(f"{what}, so there is no token to score")
    return bounded_mean(overlaps, counts, (0.0, 1.0))
