"""Tokens that a loop has written, held against p and q: what the tests of outrider.stats.evidence are fed with.

p comes from a teacher-forced pass of the target over the finished texts, which shares no cache, no rollback and no rule
with the loop that wrote them; q likewise from the draft. Statistics of a token y:

- ``pits``: P(v before y) + w p(y), where tokens are ordered by q - p and w is a uniform number of its own. A wrong rule
  tends to push towards the draft, that is, to large values.
- ``score``: min(q(y)/p(y), 30). The derivative of the log-likelihood of (1 - e) p + e q at e = 0 is q/p - 1, so without
  the clip this is the locally most powerful test against a mixture with the draft.
- ``surprise``: min(-log p(y), 20). A law that is too sharp or too flat shows in it.
- ``rank``: P(v < y) + p(y)/2 over the ids of tokens. Tokens are drawn by ids in order, so a uniform number that is used
  twice, or that a condition was put on, pushes towards high or low ids.

Their means under p are taken off exactly, clip included. A token that p forbids (filtered out by top-k, say) is no
matter of chance: it is counted, unless rounding may have moved it across the edge of what p allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalised, one_hot
from outrider.sampling.rules import REJECTION
from outrider.scoring.lookups import proposals
from outrider.scoring.teacher_forcing import Forced, Text, force
from outrider.scoring.tolerances import is_at_edge
from outrider.stats.evidence import Drift, Floats, Increments, Integers

MAX_RATIO = 30.0
MAX_SURPRISE = 20.0
_LEAST_RANGE = 1e-9  # of a statistic over the tokens of a row; one that varies by less is rounding, and says nothing
_MAX_ELEMENTS = 2**22  # of p in one piece of work; bounds the memory


@dataclass(frozen=True, slots=True)
class Written:
    """A text that the loop has written.

    Attributes:
        index: of the text; with the seed of the tests it gives the w of its tokens.
        prompt: index of its prompt.
        places: of each token in its round, from 0; all 0 where rounds are not known.
    """

    index: int
    prompt: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        assert 0 < len(self.prompt_ids) and 0 < len(self.token_ids) == len(self.places)


@dataclass(frozen=True, slots=True)
class Observed:
    """n tokens, text by text.

    Attributes:
        pits: uniform if the tokens follow p. [n]
        drift: of the score, if the tokens followed q. [n]
        places, positions, prompts: place in the round; index in the output; index of the prompt. [n]
        is_forbidden: whether p is 0 at the token, beyond what rounding may explain. [n]
        is_at_edge: whether p is 0 at the token, and rounding may explain it. It takes no part in the tests. [n]
    """

    pits: Floats
    score: Increments
    surprise: Increments
    rank: Increments
    drift: Drift
    places: Integers
    positions: Integers
    prompts: Integers
    is_forbidden: np.ndarray
    is_at_edge: np.ndarray

    def __len__(self) -> int:
        return len(self.pits)

    def first(self, num_tokens: int) -> Observed:
        """The first so many tokens."""
        part = slice(num_tokens)
        drift = self.drift
        return Observed(
            pits=self.pits[part],
            score=self.score[part],
            surprise=self.surprise[part],
            rank=self.rank[part],
            drift=Drift(drift.means[part], drift.seconds[part], drift.distances[part]),
            places=self.places[part],
            positions=self.positions[part],
            prompts=self.prompts[part],
            is_forbidden=self.is_forbidden[part],
            is_at_edge=self.is_at_edge[part],
        )


_Columns = dict[str, Tensor]  # [M] each


def observe(
    target: LM, drafter: Drafter, sampling: Sampling, written: Sequence[Written], *, seed: int, batch_size: int
) -> Observed:
    """Judge texts by the target's own law under ``sampling``.

    Args:
        written: not longer than the context of either model.
        seed: of the w of the probability integral transforms.
    """
    assert written and sampling.temperature > 0, "greedy rows leave nothing to chance"
    columns: list[_Columns] = []
    for begin in range(0, len(written), batch_size):
        group = written[begin : begin + batch_size]
        parts = list(_judge(target, drafter, sampling, group, seed))
        rows = torch.cat([part["rows"] for part in parts])
        order = rows.argsort(stable=True)  # chunks hold a piece of every text
        columns.append({name: torch.cat([part[name] for part in parts])[order] for name in parts[0]})
    whole = {name: torch.cat([part[name] for part in columns]).numpy() for name in columns[0]}

    def increments(name: str) -> Increments:
        moments = np.stack([whole[f"{name}_{power}"] for power in ("m2", "m3", "m4")])
        return Increments(whole[f"{name}_values"], moments, whole[f"{name}_lows"], whole[f"{name}_highs"])

    return Observed(
        pits=whole["pits"],
        score=increments("score"),
        surprise=increments("surprise"),
        rank=increments("rank"),
        drift=Drift(whole["drift"], whole["drift_m2"], whole["distance"]),
        places=np.concatenate([np.array(one.places, dtype=np.int64) for one in written]),
        positions=np.concatenate([np.arange(len(one.token_ids)) for one in written]),
        prompts=np.concatenate([np.full(len(one.token_ids), one.prompt) for one in written]),
        is_forbidden=whole["is_forbidden"],
        is_at_edge=whole["is_at_edge"],
    )


def joined(parts: Sequence[Observed]) -> Observed:
    """All tokens, in order."""

    def together(items: Sequence[Any]) -> Any:
        if isinstance(items[0], np.ndarray):
            return np.concatenate(items, axis=-1)
        names = [field.name for field in fields(items[0])]
        return type(items[0])(**{name: together([getattr(item, name) for item in items]) for name in names})

    whole: Observed = together(parts)
    return whole


def draft_rows(
    target: LM, drafter: Drafter, sampling: Sampling, texts: Sequence[Text]
) -> Iterator[tuple[Forced, Tensor, Tensor]]:
    """p and q before the judged tokens of texts, a chunk at a time.

    Without a draft q is p squared, normalised: the target at half the temperature, for texts that are too sharp.

    Returns:
        The target's judged tokens; p and q in float64, q = p where a look-up proposes nothing. [M, V], [M, V]
    """
    has_penalty = sampling.repetition_penalty != 1
    settings = Settings.of([sampling], target.vocab_size, target.device)
    if drafter.lm is not None:
        pairs = zip(
            force(target, texts, has_penalty=has_penalty),
            force(drafter.lm, texts, has_penalty=has_penalty),
            strict=True,
        )
        for chunk, draft in pairs:
            yield chunk, normalised(chunk.probs(settings)), normalised(draft.probs(settings)).to(chunk.ids.device)
        return
    if drafter.most_drafted == 0 or drafter.models:  # a head's q is not a function of the text alone
        for chunk in force(target, texts, has_penalty=has_penalty):
            p = normalised(chunk.probs(settings))
            yield chunk, p, normalised(p.square())
        return
    proposed = [_look_up(target, drafter, text) for text in texts]
    taken = [0] * len(texts)
    for chunk in force(target, texts, has_penalty=has_penalty):
        p = normalised(chunk.probs(settings))
        ids = []
        for row in chunk.rows.tolist():
            ids.append(proposed[row][taken[row]])
            taken[row] += 1
        drafted = torch.tensor(ids, device=p.device)[:, None]  # [M, 1]
        yield chunk, p, torch.where(drafted >= 0, one_hot(drafted.clamp_min(0), p)[:, 0], p)


def _look_up(target: LM, drafter: Drafter, text: Text) -> list[int]:
    """What is proposed in the place of each judged token; -1 for nothing."""
    prefixes = [text.ids[:end] for end in range(text.num_given, len(text.ids))]
    proposed = proposals(drafter, prefixes, [1] * len(prefixes), REJECTION, target.vocab_size)
    return [ids[0] if ids else -1 for ids in proposed]


def _judge(
    target: LM, drafter: Drafter, sampling: Sampling, written: Sequence[Written], seed: int
) -> Iterator[_Columns]:
    texts = [Text((*one.prompt_ids, *one.token_ids), len(one.prompt_ids)) for one in written]
    # By text and token, so that they do not depend on how texts are put together in batches.
    spread = [np.random.default_rng([seed, one.index]).random(len(one.token_ids)) for one in written]
    taken = [0] * len(written)
    for chunk, p, q in draft_rows(target, drafter, sampling, texts):
        w = []
        for row in chunk.rows.tolist():
            w.append(spread[row][taken[row]])
            taken[row] += 1
        piece = max(1, _MAX_ELEMENTS // p.shape[1])
        for begin in range(0, len(p), piece):
            part = slice(begin, begin + piece)
            uniforms = torch.tensor(w[part], dtype=p.dtype, device=p.device)
            columns = _statistics(p[part], q[part], chunk.ids[part], uniforms)
            is_edge = torch.zeros_like(columns["is_forbidden"])
            for i in columns["is_forbidden"].nonzero().flatten().tolist():
                at = begin + i
                seen = None if chunk.seen is None else chunk.seen[at]
                is_edge[i] = is_at_edge(chunk.logits[at], seen, int(chunk.ids[at]), sampling)
            columns["is_at_edge"] = is_edge
            columns["is_forbidden"] = columns["is_forbidden"] & ~is_edge
            columns["rows"] = chunk.rows[part]
            yield {name: column.cpu() for name, column in columns.items()}


def _statistics(p: Tensor, q: Tensor, ids: Tensor, uniforms: Tensor) -> _Columns:
    """All that is to be known of M tokens.

    Args:
        p, q: [M, V]
        ids, uniforms: [M]
    """
    at = ids[:, None]
    p_y = p.gather(1, at)
    is_possible = p_y[:, 0] > 0
    push = q - p
    push_y = push.gather(1, at)
    is_before = (push < push_y) | ((push == push_y) & (torch.arange(p.shape[1], device=p.device) < at))
    pits = torch.where(is_possible, (p * is_before).sum(1) + uniforms * p_y[:, 0], uniforms)
    columns = {"pits": pits.clamp(0.0, 1.0), "is_forbidden": ~is_possible, "distance": push.abs().sum(1) / 2}
    is_allowed = p > 0
    ratio = torch.where(is_allowed, q / torch.where(is_allowed, p, 1.0), 0.0).clamp_max(MAX_RATIO)
    surprise = torch.where(is_allowed, -p.log(), 0.0).clamp_max(MAX_SURPRISE)
    rank = p.cumsum(1) - p / 2
    for name, x in (("score", ratio), ("surprise", surprise), ("rank", rank)):
        x = torch.where(is_allowed, x - (p * x).sum(1, keepdim=True), 0.0)
        x = torch.where(x.amax(1, keepdim=True) - x.amin(1, keepdim=True) < _LEAST_RANGE, 0.0, x)
        columns[f"{name}_values"] = x.gather(1, at)[:, 0]
        for power in (2, 3, 4):
            columns[f"{name}_m{power}"] = (p * x**power).sum(1)
        columns[f"{name}_lows"], columns[f"{name}_highs"] = -x.amin(1), x.amax(1)
        if name == "score":
            columns["drift"], columns["drift_m2"] = (q * x).sum(1), (q * x**2).sum(1)
    return columns
