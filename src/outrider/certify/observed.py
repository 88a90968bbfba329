"""Statistics of generated tokens under p and q: the input to the tests of outrider.certify.evidence.

p comes from a teacher-forced pass of the target over the finished sequences, which shares no cache, no rollback and no
rule with the loop that generated them; q likewise from the draft. (A drafter that needs forcing is led along them: q is
that of the token's place in its round.) Statistics of a token y:

- ``pits``: P(v before y) + w p(y), where tokens are ordered by q - p and w is a uniform number of its own. A wrong rule
  tends to push towards the draft, that is, to large values.
- ``score``: min(q(y)/p(y), 30). The derivative of the log-likelihood of (1 - e) p + e q at e = 0 is q/p - 1, so without
  the clip this is the locally most powerful test against a mixture with the draft.
- ``likelihood``: min(-log p(y), 20). It detects a distribution that is too sharp or too flat.
- ``rank``: P(v < y) + p(y)/2 over the ids of tokens. Tokens are drawn in the order of their ids, so a uniform number
  that is used twice, or conditioned on, pushes towards high or low ids.

Their means under p are subtracted exactly, clip included. A token with p = 0 (outside top-k, for example) cannot
occur by chance: it is counted, unless rounding may have moved it across the edge of a filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.certify.divergence import is_at_edge
from outrider.certify.evidence import Drift, Increments, Integers
from outrider.drafters.base import Drafter
from outrider.measure.along import Places, along, needs_forcing
from outrider.measure.teacher_forcing import ForcedTokens, Text, force
from outrider.options import Sampling
from outrider.records import Constraint, Effect
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise, one_hot

NewConstraint = Callable[[Sequence[int]], Constraint | None]
"""Creates the constraint of a new sequence with this prompt; None if unconstrained."""
MAX_RATIO, MAX_SURPRISE = 30.0, 20.0


@dataclass(frozen=True, slots=True)
class GeneratedText:
    """A generated sequence."""

    index: int  # with the seed of the tests it determines the w of the tokens
    prompt: int  # index of the prompt
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    places: tuple[int, ...]  # of each token in its round, from 0; all 0 if rounds are unknown
    slot: int = 0  # in the cache
    first_step: int = 0  # step of the loop that generated the first round

    def __post_init__(self) -> None:
        assert 0 < len(self.prompt_ids) and 0 < len(self.token_ids) == len(self.places)

    @property
    def rounds(self) -> Integers:
        """Round of each token in the sequence. [n]"""
        return np.cumsum(np.array(self.places) == 0) - 1


@dataclass(frozen=True, slots=True)
class ObservedTokens:
    """n tokens, sequence by sequence: columns of a number for each.

    - ``is_forbidden``, ``is_at_edge``: p is 0 at the token, and rounding cannot explain it; or it may (not tested);
    - ``places``, ``rounds``, ``positions``: place in the round; round in the sequence; index in the output;
    - ``texts``, ``prompts``, ``slots``, ``steps``: of the sequence; its prompt; cache slot; step of the loop;
    - ``lengths``: tokens before it, prompt included;
    - those of ``statistics_of``.
    """

    columns: Mapping[str, NDArray[Any]]

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self["pits"])

    def statistic(self, name: str) -> Increments:
        """The score, the likelihood or the rank."""
        moments = np.stack([self[f"{name}_m{power}"] for power in (2, 3, 4)])
        return Increments(self[f"{name}_values"], moments, self[f"{name}_lows"], self[f"{name}_highs"])

    @property
    def drift(self) -> Drift:
        """The drift of the score, if the tokens followed q."""
        return Drift(self["drift"], self["drift_m2"], self["distance"])

    def part(self, tokens: slice) -> ObservedTokens:
        return ObservedTokens({name: column[tokens] for name, column in self.columns.items()})


def observe(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    written: Sequence[GeneratedText],
    *,
    seed: int,
    batch_size: int,
    new_constraint: NewConstraint = lambda prompt_ids: None,
    num_draft_tokens: int = 1,
    implanted: float = 0.0,
    on_texts: Callable[[int], None] = lambda done: None,
) -> ObservedTokens:
    """Compute the statistics of sequences under the target's own distribution with ``sampling``.

    Args:
        written: not longer than the context of the target.
        seed: for the w of the probability integral transforms.
        new_constraint: creates the constraint that was enforced.
        num_draft_tokens: K of the rounds, for drafters that need forcing.
        implanted: share of the tokens that a draw from q replaces, after the same text: a known deviation.
        on_texts: called with the number of sequences just observed.
    """
    assert written and sampling.temperature > 0, "greedy rows have no randomness"
    groups: list[dict[str, Tensor]] = []
    for group in (written[begin : begin + batch_size] for begin in range(0, len(written), batch_size)):
        texts = [Text((*one.prompt_ids, *one.token_ids), len(one.prompt_ids)) for one in group]
        # By sequence and token, so that they do not depend on the batch: w, and two numbers for a token drawn from q.
        spread = [np.random.default_rng([seed, one.index]).random((3, len(one.token_ids))) for one in group]
        # The place of a token is known before it is drawn, so q may depend on it.
        offsets = [[place if place < num_draft_tokens else 0 for place in one.places] for one in group]
        parts = []
        for chunk, p, q in draft_rows(target, drafter, sampling, texts, new_constraint, offsets, num_draft_tokens):
            numbers = [spread[row][:, i] for row, i in zip(chunk.rows.tolist(), chunk.places.tolist(), strict=True)]
            piece = max(1, 2**22 // p.shape[1])  # bounds the memory
            for first in range(0, len(p), piece):
                part = slice(first, first + piece)
                uniforms, chances, places = torch.from_numpy(np.stack(numbers[part])).to(p).unbind(1)
                ids = chunk.ids[part]
                if implanted:
                    drawn = torch.searchsorted(q[part].cumsum(1), places[:, None].contiguous())[:, 0]
                    ids = torch.where(chances < implanted, drawn.clamp_max(p.shape[1] - 1), ids)
                columns = statistics_of(p[part], q[part], ids, uniforms)
                is_edge = torch.zeros_like(columns["is_forbidden"])
                for i in columns["is_forbidden"].nonzero().flatten().tolist():
                    history = chunk.history.map(itemgetter(first + i))
                    is_edge[i] = is_at_edge(chunk.logits[first + i], history, int(ids[i]), sampling)
                columns |= {"is_at_edge": is_edge, "is_forbidden": columns["is_forbidden"] & ~is_edge}
                parts.append({name: one.cpu() for name, one in (columns | {"rows": chunk.rows[part]}).items()})
        order = torch.cat([part["rows"] for part in parts]).argsort(stable=True)  # chunks hold a piece of every text
        groups.append({name: torch.cat([part[name] for part in parts])[order] for name in parts[0]})
        on_texts(len(group))
    num_tokens = [len(one.token_ids) for one in written]
    by_text = [(one.prompt, one.index, one.slot, one.first_step, len(one.prompt_ids)) for one in written]
    prompts, texts_of, slots, steps, lengths = np.repeat(np.array(by_text, dtype=np.int64), num_tokens, axis=0).T
    rounds = np.concatenate([one.rounds for one in written])
    positions = np.concatenate([np.arange(n) for n in num_tokens])
    return ObservedTokens(
        {name: torch.cat([group[name] for group in groups]).numpy() for name in groups[0]}
        | {"prompts": prompts, "texts": texts_of, "slots": slots, "steps": steps + rounds, "rounds": rounds}
        | {"places": np.array([place for one in written for place in one.places], dtype=np.int64)}
        | {"positions": positions, "lengths": lengths + positions}
    )


def join(parts: Sequence[ObservedTokens]) -> ObservedTokens:
    return ObservedTokens({name: np.concatenate([part[name] for part in parts]) for name in parts[0].columns})


def draft_rows(
    target: LM,
    drafter: Drafter,
    sampling: Sampling,
    texts: Sequence[Text],
    new_constraint: NewConstraint = lambda prompt_ids: None,
    offsets: Sequence[Sequence[int]] | None = None,
    num_draft_tokens: int = 1,
) -> Iterator[tuple[ForcedTokens, Tensor, Tensor]]:
    """Yield the target's scored tokens, chunk by chunk, with p and q in float64: q = p where nothing is drafted, and
    without a draft p squared, normalised: the target at half the temperature, to detect sharpened output.
    [M, V], [M, V]

    Args:
        new_constraint: creates the constraint that masks p and q. (A look-up proposes without.)
        offsets: of each scored token in its round, for drafters that need forcing; None for 0 (rounds that begin at
            the token).
        num_draft_tokens: K of these rounds; more than any offset.
    """
    settings = Settings.of([sampling], target.vocab_size, target.device)
    is_forced, walks = needs_forcing(drafter, texts), walks_of(texts, new_constraint)
    k, forced = (num_draft_tokens, target) if is_forced else (1, None)
    rounds = along(drafter, texts, sampling, k, target=forced, constraints=walks)
    held: dict[tuple[int, int], Tensor] = {}  # q, or the drafted token of a one-hot q, by text and token
    num_seen = [0] * len(texts)

    def hold(places: Places) -> None:
        rows, firsts = places.rows.tolist(), places.places.tolist()
        for at, offset in places.is_scored.nonzero().tolist():
            row, token = rows[at], firsts[at] + offset
            if offset == (offsets[row][token] if offsets and is_forced else 0):
                held[row, token] = places.drafted_ids[at, offset] if places.q is None else places.q[at, offset]
        for row, place in zip(rows, firsts, strict=True):
            num_seen[row] = place + 1

    for chunk in force(target, texts, [settings], walks_of(texts, new_constraint)):
        p = normalise(chunk.probs(settings))
        if drafter.most_drafted == 0:
            yield chunk, p, normalise(p.square())
            continue
        q = p.clone()
        for here, row, token in zip(q, chunk.rows.tolist(), chunk.places.tolist(), strict=True):
            while num_seen[row] <= token:
                hold(next(rounds))
            found = held.pop((row, token), None)
            if found is not None:
                here.copy_(normalise(found) if found.ndim else one_hot(found[None].to(p.device), p)[0])
        yield chunk, p, q


def statistics_of(p: Tensor, q: Tensor, ids: Tensor, uniforms: Tensor) -> dict[str, Tensor]:
    """Compute all statistics of M tokens. [M, V], [M, V], [M], [M] -> [M] each"""
    at, push = ids[:, None], q - p
    p_y, push_y = p.gather(1, at), push.gather(1, at)
    is_possible = p_y[:, 0] > 0
    is_before = (push < push_y) | ((push == push_y) & (torch.arange(p.shape[1], device=p.device) < at))
    pits = torch.where(is_possible, (p * is_before).sum(1) + uniforms * p_y[:, 0], uniforms)
    columns = {"pits": pits.clamp(0.0, 1.0), "is_forbidden": ~is_possible, "distance": push.abs().sum(1) / 2}
    is_allowed = p > 0
    ratio = torch.where(is_allowed, q / torch.where(is_allowed, p, 1.0), 0.0).clamp_max(MAX_RATIO)
    surprise = torch.where(is_allowed, -p.log(), 0.0).clamp_max(MAX_SURPRISE)
    rank = p.cumsum(1) - p / 2
    for name, x in (("score", ratio), ("likelihood", surprise), ("rank", rank)):
        x = torch.where(is_allowed, x - (p * x).sum(1, keepdim=True), 0.0)
        x = torch.where(x.amax(1, keepdim=True) - x.amin(1, keepdim=True) < 1e-9, 0.0, x)  # smaller ranges are rounding
        columns |= {f"{name}_m{power}": (p * x**power).sum(1) for power in (2, 3, 4)}
        columns |= {f"{name}_values": x.gather(1, at)[:, 0], f"{name}_lows": -x.amin(1), f"{name}_highs": x.amax(1)}
        if name == "score":
            columns |= {"drift": (q * x).sum(1), "drift_m2": (q * x**2).sum(1)}
    return columns


class UnenforcedConstraint:
    """Ends no sequence: after a forbidden token everything is allowed, so that a faulty loop can commit such tokens,
    for the tests to detect."""

    def __init__(self, inner: Constraint) -> None:
        self._inner = inner
        self._num_beyond = 0  # tokens from the first forbidden one on

    @property
    def error(self) -> str | None:
        return self._inner.error

    def effect(self) -> Effect | None:
        return None if self._num_beyond else self._inner.effect()

    def push(self, token_id: int) -> bool:
        if self._num_beyond or not self._inner.push(token_id):
            self._num_beyond += 1
        return True

    def pop(self, num_tokens: int) -> None:
        num_inner = max(0, num_tokens - self._num_beyond)
        self._num_beyond -= num_tokens - num_inner
        if num_inner:
            self._inner.pop(num_inner)


def walks_of(texts: Sequence[Text], new_constraint: NewConstraint) -> list[UnenforcedConstraint] | None:
    """A constraint for each text, advanced to its first scored token; None if unconstrained."""
    walks: list[UnenforcedConstraint] = []
    for text in texts:
        num_prompt = text.num_prompt or text.num_given
        constraint = new_constraint(text.ids[:num_prompt])
        if constraint is None:  # then none has one
            return None
        walks.append(UnenforcedConstraint(constraint))
        for token_id in text.ids[num_prompt : text.num_given]:
            walks[-1].push(token_id)
    return walks
