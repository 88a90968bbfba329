"""Slow twins: the same mathematics in plain Python, written to be obviously right. Rows of probabilities are lists of
floats, p has one row more than q, and a text is a tuple of token ids."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers.generation import logits_process as hf

from outrider.options import Sampling

Probs = list[float]
Law = dict[tuple[int, ...], float]


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def philox_uniforms(seed: int, counter: Sequence[int]) -> tuple[float, float]:
    """Two numbers in (0, 1) of 52 bits each, by Philox-4x32-10 (Salmon et al. 2011, section 3.3)."""
    words = philox(counter, (seed % 2**32, seed >> 32))
    bits = [(words[0] >> 6) * 2**26 + (words[1] >> 6), (words[2] >> 6) * 2**26 + (words[3] >> 6)]
    return (bits[0] + 0.5) / 2**52, (bits[1] + 0.5) / 2**52


def hf_probs(
    logits: torch.Tensor, prefix: Sequence[int], sampling: Sampling, num_prompt: int | None = None
) -> torch.Tensor:
    """The distribution after ``prefix``, by Hugging Face's own processors in the order of `generate`. [V] -> [V]"""
    num_prompt = len(prefix) if num_prompt is None else num_prompt
    bias = {(i,): float(b) for i, b in (sampling.logit_bias or {}).items()}
    is_sampled, ends = sampling.temperature != 0.0, list(sampling.stop_token_ids)
    processors = (
        bias and hf.SequenceBiasLogitsProcessor(bias),
        sampling.repetition_penalty != 1.0 and hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        lambda _, scores: scores - counted_penalties(prefix[num_prompt:], sampling, scores),
        sampling.min_tokens
        and hf.MinNewTokensLengthLogitsProcessor(num_prompt, sampling.min_tokens, ends, device="cpu"),
        is_sampled and sampling.temperature != 1.0 and hf.TemperatureLogitsWarper(sampling.temperature),
        is_sampled and sampling.top_k and hf.TopKLogitsWarper(sampling.top_k),
        is_sampled and sampling.top_p < 1.0 and hf.TopPLogitsWarper(sampling.top_p),
        is_sampled and sampling.min_p > 0.0 and hf.MinPLogitsWarper(sampling.min_p),
    )
    scores, input_ids = logits[None].clone(), torch.tensor([list(prefix)])
    for process in filter(None, processors):
        scores = process(input_ids, scores)
    if sampling.temperature == 0.0:
        return torch.nn.functional.one_hot(scores[0].argmax(), len(logits)).to(logits.dtype)
    return scores[0].softmax(dim=-1)


def counted_penalties(output: Sequence[int], sampling: Sampling, scores: torch.Tensor) -> torch.Tensor:
    """Penalty to subtract, by OpenAI's API reference, "Frequency and presence penalties". [1, V]"""
    counts = torch.tensor([list(output).count(token) for token in range(scores.shape[-1])], dtype=scores.dtype)
    return (counts * sampling.frequency_penalty + (counts > 0).to(scores.dtype) * sampling.presence_penalty)[None]


def table_law(table: torch.Tensor, prompt: Sequence[int], sampling: Sampling, num_tokens: int) -> Law:
    """The exact law of what a Markov chain says after the prompt."""

    def next_law(text: tuple[int, ...]) -> Law:
        whole = (*prompt, *text)
        probs = hf_probs(table[whole[-1]], whole, sampling, len(prompt)).tolist()
        return {(token,): prob for token, prob in enumerate(probs) if prob > 0}

    return rounds_law(next_law, num_tokens)


def leftover(p: Probs, q: Probs, weight: float = 1.0) -> Probs:
    """(weight * p - q)+, not normalised."""
    return [max(weight * a - b, 0.0) for a, b in zip(p, q, strict=True)]


def rejection_thresholds(p: Sequence[Probs], q: Sequence[Probs], ids: Sequence[int]) -> list[float]:
    """min(1, p/q) at each drafted token: it stands if its uniform number is below."""
    return [min(1.0, p[i][x] / q[i][x]) for i, x in enumerate(ids)]


def rejection_length(thresholds: Sequence[float], uniforms: Sequence[float]) -> int:
    """How many tokens stand: up to the first uniform that is not below its threshold."""
    stands = [u < threshold for threshold, u in zip(thresholds, uniforms, strict=True)]
    return [*stands, False].index(False)


def rejection_rest(p: Sequence[Probs], q: Sequence[Probs], ids: Sequence[int], length: int) -> Probs:
    """What the token after ``length`` accepted ones is drawn from."""
    return leftover(p[length], q[length]) if length < len(ids) else p[length]


def block_weights(p: Sequence[Probs], q: Sequence[Probs], ids: Sequence[int]) -> list[float]:
    """w_0 .. w_n of Sun et al. 2403.10444 (their p_i): the probability that at least i tokens stand, given them."""
    weights = [1.0]
    for i, x in enumerate(ids):
        weights.append(min(1.0, weights[-1] * p[i][x] / q[i][x]))
    return weights


def block_thresholds(p: Sequence[Probs], q: Sequence[Probs], ids: Sequence[int]) -> list[float]:
    """Each prefix's own coin (their h_i), for prefixes of 1 to n tokens."""
    w = block_weights(p, q, ids)
    thresholds = []
    for i in range(1, len(ids)):
        mass = math.fsum(leftover(p[i], q[i], w[i]))
        thresholds.append(mass / (mass + 1.0 - w[i]) if mass > 0 else 0.0)
    return thresholds + w[len(ids) :] if ids else []


def block_length(thresholds: Sequence[float], uniforms: Sequence[float]) -> int:
    """How many tokens stand: the longest prefix whose uniform is below its threshold."""
    good = [i + 1 for i, (threshold, u) in enumerate(zip(thresholds, uniforms, strict=True)) if u < threshold]
    return max(good, default=0)


def block_rest(p: Sequence[Probs], q: Sequence[Probs], ids: Sequence[int], length: int) -> Probs:
    if length == len(ids):
        return p[length]
    return leftover(p[length], q[length], block_weights(p, q, ids)[length])


THRESHOLDS = {"rejection": rejection_thresholds, "block": block_thresholds}
LENGTHS = {"rejection": rejection_length, "block": block_length}
RESTS = {"rejection": rejection_rest, "block": block_rest}


def invert(weights: Probs, uniform: float) -> int:
    """The token in whose cell of the cumulative sum the number falls."""
    *_, last = found = list(cells(weights))
    return next((token for token, _, high in found if uniform < high), last[0])


def draft_paths(
    first: int, table: Sequence[Probs], length: int, later: Sequence[Probs] | None = None
) -> Iterator[tuple[tuple[int, ...], float]]:
    """All drafts of this length that have a chance, with their probability. (``later``: from the second token on.)"""
    tables = [table, *[later or table] * length]
    for ids in itertools.product(range(len(table)), repeat=length):
        chances = [rows[last][x] for rows, last, x in zip(tables, (first, *ids), ids, strict=False)]
        if all(chance > 0 for chance in chances):
            yield ids, math.prod(chances)


def accept_branches(thresholds: Sequence[float]) -> Iterator[tuple[list[float], float]]:
    """For each way the coins may fall: uniform numbers just inside the branch, and its probability."""
    sides = []
    for t in thresholds:
        margin = min(1e-9, t / 2, (1.0 - t) / 2)
        sides.append([(t - margin, t), (t + margin, 1.0 - t)] if 0.0 < t < 1.0 else [(0.5, 1.0)])
    for branch in itertools.product(*sides):
        yield [u for u, _ in branch], math.prod(weight for _, weight in branch)


def cells(weights: Probs) -> Iterator[tuple[int, float, float]]:
    """The tokens of an unnormalised row, each with the interval of uniform numbers that chooses it."""
    total, low = math.fsum(weights), 0.0
    for token, weight in enumerate(weights):
        if weight > 0:
            yield token, low, low + weight / total
        low += weight / total


def rounds_law(round_law: Callable[[tuple[int, ...]], Law], num_tokens: int) -> Law:
    """The law of the first tokens, from the law of what one round commits after a given output."""
    done: Law = {}
    open_: Law = {(): 1.0}
    while open_:
        text, mass = open_.popitem()
        for committed, chance in round_law(text).items():
            longer = (*text, *committed)
            target = done if len(longer) >= num_tokens else open_
            longer = longer[:num_tokens]
            target[longer] = target.get(longer, 0.0) + mass * chance
    return done


def law_distance(a: Law, b: Law) -> float:
    return max(abs(a.get(text, 0.0) - b.get(text, 0.0)) for text in a.keys() | b.keys())
