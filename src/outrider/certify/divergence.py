"""Divergence: why the output differs from plain decoding where both should be equal.

At temperature 0 speculation generates the tokens of plain decoding, and ``gumbel`` does so at any temperature, up to
rounding: a forward over several tokens and a forward over one differ in the last bits, and so do the keys and values
that they write to the cache; a near-tie may be resolved the other way (docs/how-it-works/same-bytes.md). After that the
sequences diverge, so only the first difference is informative. There the scores of the two tokens are computed as in
plain decoding, and in blocks of several sizes. If the blocks change them by no more than rounding can, and the margin
is within a few times that change, the verdict is "numerics"; otherwise it is "bug".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import NumericsError
from outrider.measure.teacher_forcing import allowed_tokens
from outrider.options import Sampling
from outrider.records import Constraint, Request
from outrider.runtime.lm import LM, OF_IMAGES, PROMISED
from outrider.runtime.weight_tensors import stored_tensors
from outrider.sampling.history import NO_HISTORY, History
from outrider.sampling.noise import gumbels
from outrider.sampling.probs import Settings, is_finite, to_probs, wide
from outrider.sampling.rules import Rule
from outrider.text.tokenizer import Prompt

# Logits this close may change their order by rounding (observed values: docs/how-it-works/same-bytes.md).
ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
REQUIRED = "required"  # of another system, by whoever asks


@dataclass(frozen=True, slots=True)
class Divergence:
    """First difference of two sequences.

    Attributes:
        margin: score of the plain token less that of the other, fed token by token. The score is the log-probability
            before filters, plus the noise, if any; None unless there are two tokens to compare.
        gap: largest total change of the two scores when fed in blocks, or what another system may have; None as above.
    """

    prompt: int  # index of the prompt, or of the sequence if each has its own
    position: int
    plain_id: int | None  # None after the end of a sequence
    other_id: int | None
    margin: float | None
    gap: float | None
    verdict: Literal["numerics", "bug", "unexplained"]


@dataclass(frozen=True, slots=True)
class GreedyReport:
    """Token-by-token comparison with plain decoding."""

    num_texts: int
    num_tokens: int
    differences: Sequence[Divergence]  # the first of each pair of sequences that differ
    has_noise: bool  # both were sampled, by ``gumbel`` with the same seeds
    promise: str  # whether the same bytes are promised, in a word (``LM.same_bytes``), or REQUIRED

    @property
    def is_ok(self) -> bool:
        """Whether the texts are the same, or rounding explains each difference where it may make one."""
        is_excused = self.promise not in (PROMISED, REQUIRED)
        return not self.differences or (is_excused and all(one.verdict == "numerics" for one in self.differences))


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference; None if equal."""
    end = None if len(plain) == len(other) else min(len(plain), len(other))
    return next((index for index, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), end)


def plain_texts(target: LM, rule: Rule, requests: Sequence[Request], num_slots: int) -> list[list[int]]:
    """Generate by plain decoding, ``num_slots`` requests concurrently, each unused (they hold state)."""
    texts: list[list[int]] = [[] for _ in requests]
    for round_ in decode(target, NO_DRAFTER, requests, rule, num_draft_tokens=0, num_slots=num_slots):
        for row in round_.rows:
            texts[row.row] += row.token_ids
    return texts


Texts = Sequence[Sequence[int]]
"""Token ids of outputs, one for each request."""


def compare_texts(
    decoder: Decoder,
    given: Sequence[tuple[Prompt, dict[str, Any]]],
    plain: Texts,
    texts: Texts,
    *,
    explains: bool = True,
) -> GreedyReport:
    """Compare outputs of a decoder with those of its target alone: of prompts, each with its options; see
    ``Decoder.request`` and ``against_plain``."""
    requests = [decoder.request(prompt, options).request for prompt, options in given]
    return against_plain(decoder.target, requests, plain, texts, decoder.constant_k, explains=explains)


def against_plain(
    target: LM, requests: Sequence[Request], plain: Texts, texts: Texts, k: int | None, explains: bool = True
) -> GreedyReport:
    """Compare outputs with those of plain decoding, and explain differences.

    Args:
        requests: unused ones (they hold state).
        plain, texts: output of plain decoding, and outputs to compare.
        k: K of ``texts``; None for those of another system.
        explains: else differences are found only, which cannot fail.
    """
    promise, differences = target.same_bytes, []
    if k is None:
        promise = "not promised (another system)"
    elif promise == PROMISED and any(one.media is not None for one in requests):
        promise = OF_IMAGES
    for index, (one, right, text) in enumerate(zip(requests, plain, texts, strict=True)):
        found = _unexplained(index, right, text)
        if explains and found is not None:
            given = index, one.prompt_ids, right, text, one.sampling, k, one.constraint
            found = explain(target, *given)
        differences += [] if found is None else [found]
    has_noise = any(one.sampling.temperature > 0 for one in requests)
    return GreedyReport(len(texts), sum(map(len, plain)), differences, has_noise, promise)


def _unexplained(prompt: int, plain: Sequence[int], other: Sequence[int]) -> Divergence | None:
    at = first_difference(plain, other)
    if at is None:
        return None
    a, b = (one[at] if at < len(one) else None for one in (plain, other))
    return Divergence(prompt, at, a, b, None, None, "unexplained")


@torch.inference_mode()
def explain(
    target: LM,
    prompt: int,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    sampling: Sampling,
    num_draft_tokens: int | None,
    constraint: Constraint | None = None,
) -> Divergence | None:
    """Find and explain the first difference from plain decoding; None if the sequences are equal. Raises NumericsError:
    the target has no distribution there.

    Args:
        sampling: of both. Above temperature 0 it has a seed, and both were generated by ``gumbel``.
        num_draft_tokens: K of the other; None for another system, whose rounding is not the target's.
        constraint: of both, in its initial state; it is advanced.
    """
    found = _unexplained(prompt, plain, other)
    if found is None:
        return None
    at, a, b = found.position, found.plain_id, found.other_id
    if a is None or b is None:
        return replace(found, verdict="bug")
    prefix = [*prompt_ids, *plain[:at]]
    begin = len(prompt_ids) - 1  # from here on plain decoding feeds token by token
    # Log-probabilities before top-k, top-p and min-p; temperature 0 uses those of 1, in the same order.
    bare = replace(sampling, temperature=sampling.temperature or 1.0, top_k=0, top_p=1.0, min_p=0.0)
    settings = Settings.of([bare], target.vocab_size, torch.device("cpu"))
    history = settings.with_room(NO_HISTORY, 1, target.vocab_size)
    history.begin(0, torch.tensor(prefix), len(prompt_ids))
    history = history.map(itemgetter(0))
    blocks = [(1, 0)]
    if num_draft_tokens is not None:
        # The token fed last may be anywhere in a verify forward.
        num_after = min(num_draft_tokens, target.context_len - len(prefix))
        blocks += [(1, num_after), (num_draft_tokens + 1, 0), (len(prefix), 0)]
    is_allowed = torch.ones(target.vocab_size, dtype=torch.bool)
    if constraint is not None:
        for token_id in plain[:at]:
            constraint.push(token_id)
        is_allowed = torch.from_numpy(allowed_tokens(constraint, target.vocab_size))
    logits = [_logits(target, prefix, begin, *block).masked_fill(~is_allowed, -torch.inf) for block in blocks]
    scores = [_probs(one, settings, history).log()[[a, b]] for one in logits]
    margin = float(scores[0][0] - scores[0][1])
    if not all(score.isfinite().all() for score in scores):  # forbidden by a bias or the constraint
        return replace(found, verdict="bug")
    if sampling.temperature > 0:
        assert sampling.seed is not None
        noise = gumbels(torch.tensor([sampling.seed]), torch.tensor([[len(prefix)]]), target.vocab_size)[0, 0]
        margin += float(noise[a] - noise[b])
    # Scores are logits over the temperature, or penalised logits.
    scale = 2 * max(sampling.repetition_penalty, 1 / sampling.repetition_penalty) / (sampling.temperature or 1.0)
    largest = float(logits[0][logits[0].isfinite()].abs().max())
    last_bit = scale * largest * torch.finfo(logits[0].dtype).eps
    # Others may multiply integers with activations of 8 bits, whose steps are as large as those of bfloat16.
    stored = (tensor for one in target.weights.parameters() for tensor in stored_tensors(one))
    is_coarse = num_draft_tokens is None and not all(tensor.is_floating_point() for tensor in stored)
    most = scale * ROUNDING[torch.bfloat16 if is_coarse else target.dtype]
    gap = max((float((score - scores[0]).abs().sum()) for score in scores[1:]), default=most)
    is_near = abs(margin) <= min(most, max(8 * gap, last_bit))  # other shapes of blocks may differ more
    if sampling.temperature > 0 and not is_near:
        # Rounding may also move a token across the edge of a filter.
        is_near = any(is_at_edge(logits[0], history, token_id, sampling) for token_id in (a, b))
    return replace(found, margin=margin, gap=gap, verdict="numerics" if gap <= most and is_near else "bug")


def _logits(target: LM, prefix: Sequence[int], begin: int, width: int, num_after: int) -> Tensor:
    """Logits after a prefix that is fed in blocks of ``width`` tokens from ``begin`` on, the last followed by
    ``num_after`` masked tokens. [V], on the CPU"""
    device, length = target.device, len(prefix)
    ids = torch.tensor([[*prefix, *[prefix[0]] * num_after]], device=device)
    cache = target.new_cache(1, length + num_after)
    if width >= length:
        begin = 0
    if begin:
        ends = torch.tensor([begin], device=device)
        target.prefill(ids, torch.zeros_like(ends), ends, cache, latest=0, num_columns=begin)
    for start in range(begin, length, width):
        is_last = start + width >= length
        end = length + num_after if is_last else start + width
        positions = torch.arange(start, end, device=device)[None]
        logits = target.forward(ids[:, start:end], positions, cache, target.view_len(end, cache))
        if not is_last:
            cache.settle(torch.tensor([end], device=device))
    last = logits[0, length - 1 - start].cpu()
    if not bool(is_finite(last)):
        raise NumericsError.at(target.name, length)
    return last


def _probs(logits: Tensor, settings: Settings, history: History) -> Tensor:
    """Probabilities at one position. [V], a history of one position -> [V]"""
    return wide(to_probs(logits[None, None], settings, history.map(lambda values: values[None, None])))[0, 0]


def is_at_edge(logits: Tensor, history: History, token_id: int, sampling: Sampling) -> bool:
    """Whether rounding decides if a token is allowed: whether its probability is above 0 with its logit moved up, and
    not with the logit moved down. The mass of the others moves accordingly: a tail with mass 1 - top-p has at most
    e^shift times that (at temperature 1). [V], a history of one position
    """

    def is_allowed(shift: float) -> bool:
        moved = logits.clone()
        moved[token_id] += shift
        top_p = 1 - (1 - sampling.top_p) * math.exp(min(50.0, -shift / sampling.temperature))
        loose = replace(sampling, top_p=min(1.0, max(1e-9, top_p)))
        return bool(_probs(moved, Settings.of([loose], len(logits), logits.device), history)[token_id] > 0)

    shift = 2 * ROUNDING[logits.dtype]
    return is_allowed(shift) and not is_allowed(-shift)
