"""Checks of tree_rounds.py: with the engine's rounds, with best-first search by plain forwards, with an enumeration.

python benchmarks/tree_checks.py
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor
from tree_rounds import (
    MOST_DEPTH,
    NUM_STARTS,
    Along,
    Branches,
    Draft,
    Recorded,
    along_of,
    by_paths,
    drafted_trees,
    drafts,
    mean_of,
    noise_of,
    recorded,
    requests_of,
)

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import Drafter
from outrider.models.placement import Placement
from outrider.replay.record import header_of, record_batch
from outrider.replay.renewal import Floats, RoundDistribution, by_block
from outrider.replay.replay import replay
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL


def main() -> None:
    torch.set_num_threads(1)
    decoder = load("fable", device="cpu", dtype="float32")
    check(decoder, load_drafter(decoder, "fable-draft", placement=Placement("cpu", "float32")))


@torch.inference_mode()
def check(decoder: Decoder, drafter: Drafter) -> None:
    """Compare with the engine, with plain forwards, and with an enumeration."""
    target = decoder.target
    prompts = [tuple(decoder.encode(text)) for text in ("Once upon a time", "The king said to his daughter, ")]
    for temperature in (0.0, 1.0):
        for text in recorded(target, prompts, temperature):
            for draft in drafts(target, drafter.models[0])[:2]:
                _check_text(target, drafter, draft, text, temperature)
    _check_replay(decoder, drafter, prompts)
    for seed in range(3):
        _check_paths(np.random.default_rng(seed))
    print("checks passed", file=sys.stderr)


def _check_text(target: LM, drafter: Drafter, draft: Draft, text: Recorded, temperature: float) -> None:
    branches = [Branches(lm, text.ids, draft.window) for _, lm in draft.parts]
    noise = noise_of(text, target.vocab_size, temperature)
    along = along_of(target, draft, branches, text, noise, temperature)
    arguments = draft, branches, text, noise
    # A tree of one node in each level is the chain.
    places = text.num_given + torch.arange(NUM_STARTS)
    chain = drafted_trees(*arguments, places, temperature, 1.0, MOST_DEPTH, most_in_level=1)
    k = 5
    with np.errstate(divide="ignore"):
        matching = by_block(np.log(along.agrees), k)[:NUM_STARTS].sum(axis=1) - 1
    assert (chain.num_followed(k, k).numpy() == matching).all()
    # The target draws the sequence from this noise.
    if temperature > 0:
        p_logits = Branches(target, text.ids, sys.maxsize).logits[text.num_given - 1 : -1]
        drawn = (p_logits / temperature + noise[text.num_given :]).argmax(dim=1)
        assert drawn.tolist() == list(text.ids[text.num_given :])
    # A path alone is the chain.
    with np.errstate(divide="ignore"):
        expected = by_block(np.log(along.q) - np.log(along.p), k)
    assert np.allclose(by_paths(along.q, along.p, along.below, 1, k), expected, atol=1e-12)
    if draft.window == sys.maxsize:
        # The engine commits what the chain matches, round by round.
        request = requests_of([()] * (text.seed + 1), temperature, NUM_STARTS)[text.seed]
        request = replace(request, prompt_ids=text.ids[: text.num_given])
        t = 0
        for round_ in decode(target, drafter, [request], GUMBEL, num_draft_tokens=k):
            (row,) = round_.rows
            assert row.num_accepted == matching[t], (t, row.num_accepted, matching[t])
            t += row.num_accepted + 1
    _check_best_first(*arguments, along, temperature)


def _check_replay(decoder: Decoder, drafter: Drafter, prompts: Sequence[tuple[int, ...]]) -> None:
    """Along other output of the target, ``replay`` predicts the same rounds of chains."""
    options = {"temperature": 1.0, "max_new_tokens": NUM_STARTS, "ignore_eos": True}
    labels = [(index, "", None, index) for index in range(len(prompts))]
    records, _ = record_batch(decoder, prompts, labels, options, num_probs=1)
    k = 5
    draft = drafts(decoder.target, drafter.models[0])[0]
    for record, found in zip(
        records, replay(records, header_of(decoder, options, 1), drafter, "block", [k]), strict=True
    ):
        text = Recorded((*record.prompt_ids, *record.token_ids), len(record.prompt_ids), record.index)
        branches = [Branches(lm, text.ids, draft.window) for _, lm in draft.parts]
        along = along_of(decoder.target, draft, branches, text, noise_of(text, decoder.target.vocab_size, 1.0), 1.0)
        survival = by_paths(along.q, along.p, along.below, 1, k)
        probs = RoundDistribution.of(survival, np.full(len(survival), k)).probs
        assert np.allclose(probs[:-k], found.distributions(k)[0].probs[:-k], atol=1e-4)


def _check_best_first(
    draft: Draft, branches: Sequence[Branches], text: Recorded, noise: Tensor, along: Along, temperature: float
) -> None:
    """Best-first search by forwards over whole sequences finds the same trees, and follows as many tokens."""
    size, tau = 12, 0.7
    places = text.num_given + torch.tensor([0, 7, 40])
    trees = drafted_trees(draft, branches, text, noise, places, temperature, tau, size)
    for row, place in enumerate(places.tolist()):
        for depth in (3, MOST_DEPTH):
            threshold = trees.threshold(size, depth)[row]
            found = set()
            paths: dict[int, tuple[int, ...]] = {0: ()}
            for scores, tokens, parents in zip(trees.scores[:depth], trees.tokens, trees.parents, strict=False):
                nodes = [node for node, score in enumerate(scores[row].tolist()) if score > -np.inf]
                paths = {node: (*paths[int(parents[row, node])], int(tokens[row, node])) for node in nodes}
                found |= {paths[node] for node in nodes if scores[row, node] >= threshold}
            wanted = _best_first(draft, text, noise, place, temperature, tau, size, depth)
            assert found == wanted, (place, depth, found ^ wanted)
            num = next(i for i in range(size + 1) if text.ids[place : place + i + 1] not in wanted)
            assert int(trees.num_followed(size, depth)[row]) == num


def _best_first(
    draft: Draft, text: Recorded, noise: Tensor, place: int, temperature: float, tau: float, size: int, depth: int
) -> set[tuple[int, ...]]:
    def children(path: tuple[int, ...], base: float) -> list[tuple[float, tuple[int, ...]]]:
        ids = (*text.ids[:place], *path)
        logits = mean_of(
            [weight for weight, _ in draft.parts],
            [Branches(lm, ids, draft.window).logits[-1] for _, lm in draft.parts],
        )
        x = logits / temperature + noise[place + len(path)] if temperature > 0 else logits
        top = (x / tau).log_softmax(dim=-1).topk(size)
        pairs = zip(top.values.tolist(), top.indices.tolist(), strict=True)
        return [(-(base + score), (*path, token)) for score, token in pairs]

    heap, nodes = children((), 0.0), set[tuple[int, ...]]()
    heapq.heapify(heap)
    while len(nodes) < size:
        score, path = heapq.heappop(heap)
        nodes.add(path)
        for child in children(path, -score) if len(path) < depth else ():
            heapq.heappush(heap, child)
    return nodes


def _check_paths(rng: np.random.Generator) -> None:
    """The probability, given a text, that i tokens of the winner are accepted: by enumeration of all paths, and by
    ``by_paths``."""
    num_tokens, k, num_paths = 3, 2, 2
    prefixes = [one for length in range(k + 2) for one in product(range(num_tokens), repeat=length)]
    p, q = ({one: rng.dirichlet(np.ones(num_tokens)) for one in prefixes} for _ in range(2))

    def order(prefix: tuple[int, ...]) -> list[int]:
        """Rank of each token."""
        return [int(rank) for rank in np.argsort(np.argsort(p[prefix] / q[prefix], kind="stable"))]

    def law(path: tuple[int, ...], rows: Mapping[tuple[int, ...], Floats]) -> float:
        return float(np.prod([rows[path[:i]][x] for i, x in enumerate(path)]))

    paths = list(product(range(num_tokens), repeat=k))
    ranks = {path: [order(path[:i])[x] for i, x in enumerate(path)] for path in paths}
    winners = dict.fromkeys(paths, 0.0)
    for drawn in product(paths, repeat=num_paths):
        winners[max(drawn, key=ranks.__getitem__)] += float(np.prod([law(path, q) for path in drawn]))
    # q_sel from the winners themselves; `block` by its definition (Sun et al., algorithm 2).
    mass = {
        prefix: sum(chance for path, chance in winners.items() if path[: len(prefix)] == prefix)
        for prefix in prefixes
        if len(prefix) <= k
    }
    q_sel = {
        prefix: np.array([mass[(*prefix, x)] for x in range(num_tokens)]) / mass[prefix]
        for prefix in prefixes
        if len(prefix) < k
    }
    joint: dict[tuple[int, ...], Floats] = {text: np.zeros(k + 1) for text in prefixes if len(text) == k + 1}
    for path, chance in winners.items():
        weights = [1.0]
        for i, x in enumerate(path):
            weights.append(min(1.0, weights[-1] * p[path[:i]][x] / q_sel[path[:i]][x]))
        for i in range(k, -1, -1):
            rest = p[path[:i]] if i == k else np.maximum(weights[i] * p[path[:i]] - q_sel[path[:i]], 0.0)
            accepted = weights[i] if i == k else rest.sum() / (rest.sum() + 1 - weights[i]) if i else 1.0
            for text, probs in joint.items():
                if accepted > 0 and text[:i] == path[:i]:
                    after = [p[text[:j]][text[j]] for j in range(i + 1, k + 1)]
                    probs[i] += chance * accepted * rest[text[i]] / rest.sum() * np.prod(after)
            chance *= 1 - accepted
    for text, probs in joint.items():
        assert np.isclose(probs.sum(), law(text, p), atol=1e-12), "not lossless"
        befores = [text[:i] for i in range(k + 1)]
        p_x, q_x = (np.array([rows[one][x] for one, x in zip(befores, text, strict=True)]) for rows in (p, q))
        is_below = [np.array(order(one)) < order(one)[x] for one, x in zip(befores, text, strict=True)]
        below = np.array([(q[one] * mask).sum() for one, mask in zip(befores, is_below, strict=True)])
        expected = probs[::-1].cumsum()[::-1] / probs.sum()
        assert np.allclose(by_paths(q_x, p_x, below, num_paths, k)[0], expected, atol=1e-12)


if __name__ == "__main__":
    main()
