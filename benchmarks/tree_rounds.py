"""Chains, trees and paths along recorded sequences of a target: what benchmarks/trees.py studies.

Everything is found from one recorded output under Gumbel noise, without another sample of the target.

- *Gumbel tree.* The noise G of a position is the same for the target, the draft and all nodes at that position. The
  score of a child is log softmax((log q + G) / tau), summed along its path; the N best nodes of depth at most D are the
  tree. The target takes its own Gumbel sample at each node and follows it while it is a child, so that the output is
  that of plain decoding. At temperature 0 the score is log softmax(logits / tau). The nodes are drafted level by level,
  one forward each. A child's score is never above its parent's, so that the N best nodes of depth at most d contain the
  nodes at depth d of every deeper tree: one pass finds the trees of all N and D.
- *Paths.* M paths are drawn from q independently. Tokens are ordered by p/q; the lexicographically greatest path wins.
  The winner is a chain again, of probabilities q_sel (``by_paths``), and is judged by `block`. So the probability,
  given the sequence, that i tokens are accepted is min(1, rho_1, ..., rho_i) with q_sel in place of q
  (outrider.replay.renewal), and needs p and q along the sequence only.
- *Chains*, under `block` and `gumbel`.

The next round begins where one has ended: expectations are over the rounds of walks from the first places of each
sequence, not over all places.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import NoDrafter
from outrider.options import Sampling
from outrider.records import Request
from outrider.replay.renewal import Floats, Integers, RoundDistribution, by_block, by_matches
from outrider.runtime.cache_argument import cache_argument
from outrider.runtime.lm import LM
from outrider.sampling.noise import gumbels
from outrider.sampling.rules import GUMBEL

SIZES = (8, 16, 28, 60)  # N
NUM_STARTS, NUM_BEYOND = 64, 32  # rounds begin at these places, and end at the latest so many further on
MOST_DEPTH = 16  # of trees, and K of chains
_NUM_PATHS = (2, 4)
_NUM_OFFSETS = 8  # walks begin at each of the first places
_MOST_GIVEN = 64  # tokens of a prompt
_CHUNK = 32  # places whose trees are drafted at once


@dataclass(frozen=True, slots=True)
class Recorded:
    """A prompt with the target's output under Gumbel noise."""

    ids: tuple[int, ...]
    num_given: int
    seed: int


@dataclass(frozen=True, slots=True)
class Draft:
    """A weighted mean of the logits of models.

    Attributes:
        window: the tokens that they see.
        stride: one sequence of so many is studied.
    """

    name: str
    parts: tuple[tuple[float, LM], ...]
    window: int = sys.maxsize
    stride: int = 1


def drafts(target: LM, draft: LM) -> list[Draft]:
    return [
        Draft("fable-draft", ((1.0, draft),)),
        Draft("weak", ((1.0, draft),), window=2),
        Draft("strong", ((0.5, draft), (0.5, target)), stride=3),
    ]


def prompts_of(decoder: Decoder, path: Path, num: int) -> Iterator[tuple[int, ...]]:
    """Prompts from JSON lines, or paragraphs from all over a text."""
    if path.suffix == ".txt":
        paragraphs = [one for one in path.read_text().split("\n\n") if len(one) > 300]
        texts = random.Random(0).sample(paragraphs, num)
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()[:num]]
        texts = [row["turns"][0] if "turns" in row else row.get("prompt") or row["question"] for row in rows]
    for text in texts:
        yield tuple(decoder.encode(text[: 8 * _MOST_GIVEN])[:_MOST_GIVEN])  # the whole may be beyond the context


def requests_of(prompts: Sequence[Sequence[int]], temperature: float, num_tokens: int) -> list[Request]:
    sampling = Sampling(temperature=temperature, max_new_tokens=num_tokens, ignore_eos=True)
    return [Request(ids, replace(sampling, seed=seed), drafts_beyond_end=True) for seed, ids in enumerate(prompts)]


def recorded(target: LM, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[Recorded]:
    """Plain decoding of all prompts by the engine."""
    outputs: list[list[int]] = [[] for _ in prompts]
    requests = requests_of(prompts, temperature, NUM_STARTS + NUM_BEYOND)
    for round_ in decode(target, NoDrafter(), requests, GUMBEL, num_draft_tokens=0, num_slots=8):
        for row in round_.rows:
            outputs[row.row] += row.token_ids
    return [
        Recorded((*ids, *output), len(ids), seed)
        for seed, (ids, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


class Branches:
    """One model over one text, and over trees that leave it at several places (the rows).

    Keys and values of the text are shared by all rows; a mask hides the text from the place on, and all nodes but the
    ancestors.
    """

    def __init__(self, lm: LM, ids: Sequence[int], window: int) -> None:
        self._model: Any = lm.model
        self._ids, self._window = torch.tensor([ids]), window
        self._text = DynamicCache()
        columns = torch.arange(len(ids))[None]
        self.logits = self._forward(self._ids, columns, _sees(columns, columns, window), self._text)[0]  # [n, V]

    def at(self, places: Tensor) -> None:
        """Begin trees whose first tokens are at these positions. [P]"""
        num_rows, length = len(places), self._ids.shape[1]
        self._cache = DynamicCache()
        for index, layer in enumerate(self._text.layers):
            shape = (num_rows, -1, -1, -1)
            self._cache.update(layer.keys.expand(shape), layer.values.expand(shape), index)
        columns = torch.arange(length).expand(num_rows, -1)
        # Positions of the keys; the rest of the text is beyond any query.
        self._positions = torch.where(columns < places[:, None], columns, sys.maxsize)
        self._ancestors = torch.zeros(num_rows, 1, 0, dtype=torch.bool)

    def feed(self, ids: Tensor, parents: Tensor, positions: Tensor) -> Tensor:
        """Feed the next level of each tree.

        Args:
            ids: [P, W]
            parents: index in the level before; the first has one, the root. [P, W]
            positions: [P]

        Returns:
            logits [P, W, V]
        """
        num_rows, width = ids.shape
        index = parents[..., None].expand(-1, -1, self._ancestors.shape[2])
        self._ancestors = torch.cat(
            (self._ancestors.gather(1, index), torch.eye(width, dtype=torch.bool).expand(num_rows, -1, -1)), dim=2
        )
        queries = positions[:, None].expand(-1, width)
        self._positions = torch.cat((self._positions, queries), dim=1)
        sees = _sees(queries, self._positions, self._window)
        sees[..., self._ids.shape[1] :] &= self._ancestors
        return self._forward(ids, queries, sees, self._cache)

    def _forward(self, ids: Tensor, positions: Tensor, sees: Tensor, cache: DynamicCache) -> Tensor:
        mask = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)[:, None]
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{cache_argument(self._model): cache},
        )
        logits: Tensor = output.logits
        return logits


def _sees(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """Positions [B, Q], [B, K] -> [B, Q, K]"""
    distances = queries[..., None] - keys[:, None]
    return (distances >= 0) & (distances < window)


@dataclass(frozen=True, slots=True)
class Trees:
    """The best nodes of trees at P places, level by level.

    Attributes:
        scores: of the nodes of each level, -inf for padding. D x [P, W]
        tokens, parents: of the nodes; parents are indices in the level before. D x [P, W]
        followed: score of the node with which the text agrees up to each level, -inf if there is none. [P, D]
    """

    scores: tuple[Tensor, ...]
    tokens: tuple[Tensor, ...]
    parents: tuple[Tensor, ...]
    followed: Tensor

    def threshold(self, size: int, depth: int) -> Tensor:
        """Score of the last of the ``size`` best nodes of depth at most ``depth``. [P]"""
        scores = torch.cat(self.scores[:depth], dim=1)
        if scores.shape[1] < size:
            return torch.full((len(scores),), -torch.inf)
        return scores.topk(size, dim=1).values[:, -1]

    def num_followed(self, size: int, depth: int) -> Tensor:
        """Tokens of the text that each tree contains. [P]"""
        is_there = self.followed[:, :depth] >= self.threshold(size, depth)[:, None]
        is_there &= self.followed[:, :depth].isfinite()
        return is_there.long().cumprod(dim=1).sum(dim=1)

    def widths(self, size: int) -> Tensor:
        """Columns of the draft forward for each level: the nodes of the level before among the best so far. [P, D]"""
        columns = [torch.ones(len(self.followed), dtype=torch.long)]
        for depth, scores in enumerate(self.scores[:-1], start=1):
            is_node = (scores >= self.threshold(size, depth)[:, None]) & scores.isfinite()
            columns.append(is_node.sum(dim=1))
        return torch.stack(columns, dim=1)


def drafted_trees(
    draft: Draft,
    branches: Sequence[Branches],
    text: Recorded,
    noise: Tensor,
    places: Tensor,
    temperature: float,
    tau: float,
    most_nodes: int,
    *,
    most_in_level: int | None = None,
) -> Trees:
    """Draft best-first trees at some places of a text.

    Args:
        noise: of each position of the text, [n, V]; zero at temperature 0.
        places: positions of the first drafted token. [P]
        most_in_level: nodes of a level; 1 for a chain.
    """
    ids = torch.tensor(text.ids)
    weights = [weight for weight, _ in draft.parts]
    for one in branches:
        one.at(places)
    logits = mean_of(weights, [one.logits[places - 1][:, None] for one in branches])
    base, on_text = torch.zeros(len(places), 1), torch.ones(len(places), 1, dtype=torch.bool)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    followed = []
    best = torch.full((len(places), most_nodes), -torch.inf)
    for depth in range(MOST_DEPTH):
        x = logits / temperature + noise[places + depth][:, None] if temperature > 0 else logits
        scores = ((x / tau).log_softmax(dim=-1) + base[..., None]).flatten(1)
        top = scores.topk(most_in_level or most_nodes, dim=1)
        best = torch.cat((best, top.values), dim=1).topk(most_nodes, dim=1).values
        is_kept = (top.values >= best[:, -1:]) & top.values.isfinite()
        width = int(is_kept.sum(dim=1).max())
        if width == 0:
            break
        vocab_size = logits.shape[-1]
        base = top.values.masked_fill(~is_kept, -torch.inf)[:, :width]
        parents, tokens = top.indices[:, :width] // vocab_size, top.indices[:, :width] % vocab_size
        on_text = on_text.gather(1, parents) & (tokens == ids[places + depth][:, None]) & base.isfinite()
        followed.append(torch.where(on_text, base, -torch.inf).amax(dim=1))
        levels.append((base, tokens, parents))
        if depth + 1 < MOST_DEPTH:
            logits = mean_of(weights, [one.feed(tokens, parents, places + depth) for one in branches])
    scores_of, tokens_of, parents_of = zip(*levels, strict=True)
    return Trees(scores_of, tokens_of, parents_of, torch.stack(followed, dim=1))


def mean_of(weights: Sequence[float], logits: Sequence[Tensor]) -> Tensor:
    if len(logits) == 1:
        return logits[0]
    return torch.stack([weight * one for weight, one in zip(weights, logits, strict=True)]).sum(dim=0)


@dataclass(frozen=True, slots=True)
class Along:
    """Probabilities of each token of a text. [n]

    Attributes:
        below: q of all tokens ordered before it by p/q.
        agrees: whether the draft draws it from its Gumbel noise.
        overlap: sum_v min(p, q).
    """

    p: Floats
    q: Floats
    below: Floats
    agrees: Floats
    overlap: Floats

    @classmethod
    def of(cls, p_logits: Tensor, q_logits: Tensor, ids: Tensor, noise: Tensor, temperature: float) -> Along:
        p, q = (_probs(logits, temperature) for logits in (p_logits, q_logits))
        ratios = torch.where(q > 0, p / q, torch.inf)
        index = ids[:, None]
        here = ratios.gather(1, index)
        is_below = (ratios < here) | ((ratios == here) & (torch.arange(q.shape[1]) < index))
        agrees = (q.log() + noise).argmax(dim=1) == ids
        values = (p.gather(1, index)[:, 0], q.gather(1, index)[:, 0], (q * is_below).sum(dim=1))
        return cls(*(one.double().numpy() for one in (*values, agrees, torch.minimum(p, q).sum(dim=1))))


def _probs(logits: Tensor, temperature: float) -> Tensor:
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(dim=-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(dim=-1)


def by_paths(q: Floats, p: Floats, below: Floats, num_paths: int, k: int) -> Floats:
    """S of the lexicographically greatest of M paths under ``block``. [n] -> [n, K+1]

    With A the mass of q below a prefix, S its own and F that below a token (A + S = 1 by rescaling), the next token of
    the winner is x with probability

        q_sel(x) = ((A + S (F + q(x)))^M - (A + S F)^M) / (1 - A^M)

    where both differences of powers have the factor S, which is divided out.
    """
    n = len(q)
    q, p, below = (np.concatenate((one, np.full(k, end))) for one, end in ((q, 0.0), (p, 1.0), (below, 0.0)))
    a, s = np.zeros(n), np.ones(n)
    log_rho, survival = np.zeros(n), [np.zeros(n)]
    for j in range(k):
        q_x, p_x, f = q[j : j + n], p[j : j + n], below[j : j + n]
        low, high = a + s * f, a + s * (f + q_x)
        powers = sum(high**i * low ** (num_paths - 1 - i) for i in range(num_paths))
        q_sel = q_x * powers / sum(a**i for i in range(num_paths))
        with np.errstate(divide="ignore"):
            log_rho = log_rho + np.log(q_sel) - np.log(p_x)
        survival.append(np.minimum(survival[-1], log_rho))
        a, s = np.where(q_x > 0, low, 1.0), s * q_x
        a, s = a / (a + s), s / (a + s)
    return np.exp(np.stack(survival, axis=1))


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to draft, over all texts.

    Attributes:
        size: drafted tokens that are verified.
        rounds, tokens: of each text. [X]
        forwards: draft forwards by their columns. [X, 62]
    """

    kind: str
    size: int
    depth: int
    tau: float | None
    rounds: Floats
    tokens: Floats
    forwards: Floats

    @property
    def name(self) -> str:
        return f"{self.kind}, {'K' if 'chain' in self.kind else 'N'} = {self.size}"


def study(target: LM, draft: Draft, texts: Sequence[Recorded], temperature: float, taus: Sequence[float]) -> Studied:
    """All arms over all texts."""
    taken: dict[tuple[Any, ...], list[tuple[float, float, Floats]]] = {}
    overlaps = []
    for text in texts:
        with torch.inference_mode():
            branches = [Branches(lm, text.ids, draft.window) for _, lm in draft.parts]
            noise = noise_of(text, target.vocab_size, temperature)
            along = along_of(target, draft, branches, text, noise, temperature)
            overlaps.append(float(along.overlap[:NUM_STARTS].mean()))
            for key, survival, widths in _chains_and_paths(along):
                taken.setdefault(key, []).append(_walked(survival, widths))
            for tau in taus:
                for key, survival, widths in _trees(draft, branches, text, noise, temperature, tau):
                    taken.setdefault(key, []).append(_walked(survival, widths))
    arms = [Arm(*key, *(np.array(column) for column in zip(*found, strict=True))) for key, found in taken.items()]
    return Studied(arms, np.array(overlaps))


@dataclass(frozen=True, slots=True)
class Studied:
    """Arms, and alpha on each text. [X]"""

    arms: list[Arm]
    alphas: Floats


def noise_of(text: Recorded, vocab_size: int, temperature: float) -> Tensor:
    """Gumbel noise of each position of the text. [n, V]"""
    if temperature == 0:
        return torch.zeros(len(text.ids), vocab_size)
    return gumbels(torch.tensor([text.seed]), torch.arange(len(text.ids))[None], vocab_size)[0].float()


def along_of(
    target: LM, draft: Draft, branches: Sequence[Branches], text: Recorded, noise: Tensor, temperature: float
) -> Along:
    before = slice(text.num_given - 1, -1)
    p_logits = Branches(target, text.ids, sys.maxsize).logits[before]
    q_logits = mean_of([weight for weight, _ in draft.parts], [one.logits[before] for one in branches])
    return Along.of(p_logits, q_logits, torch.tensor(text.ids[text.num_given :]), noise[text.num_given :], temperature)


def _chains_and_paths(along: Along) -> Iterator[tuple[tuple[Any, ...], Floats, Integers]]:
    """Arm, S, and the columns of each draft forward. [n, K]"""
    n = len(along.p)
    with np.errstate(divide="ignore"):
        ratios, agreements = np.log(along.q) - np.log(along.p), np.log(along.agrees)
    for k in range(1, MOST_DEPTH + 1):
        ones = np.ones((n, k), dtype=np.int64)
        yield ("block chain", k, k, None), by_block(ratios, k), ones
        yield ("gumbel chain", k, k, None), by_block(agreements, k), ones
    for num, size in product(_NUM_PATHS, SIZES):
        k = size // num
        columns = np.full((n, k), num)
        columns[:, 0] = 1
        yield (f"{num} paths", size, k, None), by_paths(along.q, along.p, along.below, num, k), columns


def _trees(
    draft: Draft, branches: Sequence[Branches], text: Recorded, noise: Tensor, temperature: float, tau: float
) -> Iterator[tuple[tuple[Any, ...], Floats, Integers]]:
    places = text.num_given + torch.arange(NUM_STARTS)
    arguments = temperature, tau, max(SIZES)
    parts = [drafted_trees(draft, branches, text, noise, part, *arguments) for part in places.split(_CHUNK)]
    for size in SIZES:
        widths = np.concatenate([_padded(part.widths(size)) for part in parts])
        for depth in range(1, min(size, MOST_DEPTH) + 1):
            followed = np.concatenate([part.num_followed(size, depth).numpy() for part in parts])
            yield ("gumbel tree", size, depth, tau), by_matches(followed, depth), widths[:, :depth]


def _padded(widths: Tensor) -> Integers:
    padded: Integers = torch.nn.functional.pad(widths, (0, MOST_DEPTH - widths.shape[1])).numpy()
    return padded


def _walked(survival: Floats, widths: Integers) -> tuple[float, float, Floats]:
    """Rounds, tokens, and draft forwards by width, of walks from each of the first places.

    Args:
        survival: S. [n, K+1]
        widths: columns of each draft forward, 0 for none. [n, K]
    """
    n, width = survival.shape
    probs = RoundDistribution.of(survival, np.full(n, width - 1)).probs
    begins = np.zeros(NUM_STARTS + width)
    begins[:_NUM_OFFSETS] = 1 / _NUM_OFFSETS
    for t in range(NUM_STARTS):
        begins[t + 1 : t + 1 + width] += begins[t] * probs[t]
    begins = begins[:NUM_STARTS]
    tokens = begins @ (probs[:NUM_STARTS] @ np.arange(1, width + 1))
    weights = np.repeat(begins, widths.shape[1])
    forwards: Floats = np.bincount(widths[:NUM_STARTS].flatten(), weights, max(SIZES) + 2).astype(np.float64)
    forwards[0] = 0.0
    return float(begins.sum()), float(tokens), forwards
