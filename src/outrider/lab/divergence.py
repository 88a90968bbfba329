"""Divergence: why two texts that ought to be the same are not.

At temperature 0 speculation gives the text of plain decoding, and ``gumbel`` does at any temperature, but for rounding:
a forward over several tokens and a forward over one differ in the last bits, and a near-tie may fall the other way
(docs/numerics.md). After that the texts are different texts, so only the first difference tells anything. There the two
best tokens are compared under a forward over one token, and the same scores are computed in blocks. If their margin is
within a few times of what the blocks change, it is "numerics"; if not, it is "bug".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from outrider.decode import decode
from outrider.drafters.base import NoDrafter
from outrider.flow import Request, Sampling
from outrider.lm import LM
from outrider.noise import gumbels
from outrider.probs import Settings, mark_seen, to_probs, wide
from outrider.verify import Rule

_SLACK = 8.0  # the blocks tried are a few of many shapes, and other shapes may change more


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of two texts.

    Attributes:
        prompt: index of the prompt, or of the text where each has its own.
        position: index in the output.
        plain_id, other_id: the tokens there; None where a text has ended.
        margin: score of the plain token less that of the other, under a forward over one token. The score is the
            log-probability, with the noise added where there is some; None if there are no two tokens to compare.
        gap: the largest change of a log-probability between forwards over one and over several tokens.
    """

    prompt: int
    position: int
    plain_id: int | None
    other_id: int | None
    margin: float | None
    gap: float
    verdict: Literal["numerics", "bug"]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of it; None for equal texts."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def against_plain(
    target: LM,
    rule: Rule,
    requests: Sequence[Request],
    texts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    batch_size: int,
    on_texts: Callable[[int], None] = lambda done: None,
) -> tuple[int, list[Divergence]]:
    """Hold texts against those of plain decoding.

    Args:
        requests: what plain decoding is to do; not used before.
        texts: what was written otherwise, for each request.
        num_draft_tokens: K of those.
        on_texts: told how many were just compared.

    Returns:
        How many tokens plain decoding wrote, and the first difference of each two texts that differ.
    """
    num_tokens = 0
    differences = []
    for begin in range(0, len(requests), batch_size):
        batch = requests[begin : begin + batch_size]
        plain: list[list[int]] = [[] for _ in batch]
        for round_ in decode(target, NoDrafter(), batch, rule, num_draft_tokens=0):
            for row in round_.rows:
                plain[row.row] += row.token_ids
        num_tokens += sum(map(len, plain))
        for index, (request, own) in enumerate(zip(batch, plain, strict=True), start=begin):
            found = explain(target, index, request.prompt_ids, own, texts[index], request.sampling, num_draft_tokens)
            if found is not None:
                differences.append(found)
        on_texts(len(batch))
    return num_tokens, differences


@torch.inference_mode()
def explain(
    target: LM,
    prompt: int,
    prompt_ids: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    sampling: Sampling,
    num_draft_tokens: int,
) -> Divergence | None:
    """The first difference of what plain decoding and another wrote; None if there is none.

    Args:
        sampling: of both. Above temperature 0 it has a seed, and the texts are those of ``gumbel``.
        num_draft_tokens: K of the other.
    """
    at = first_difference(plain, other)
    if at is None:
        return None
    a, b = (text[at] if at < len(text) else None for text in (plain, other))
    prefix = [*prompt_ids, *plain[:at]]
    single = _scores(target, prefix, 1, 0, sampling)
    # The token fed last may stand anywhere in a verify forward, and has stood elsewhere in other rounds.
    widths = [(1, num_draft_tokens), (min(num_draft_tokens + 1, len(prefix)), 0), (len(prefix), 0)]
    gaps = []
    for num_fed, num_after in widths:
        if len(prefix) + num_after <= target.context_len:
            there = _scores(target, prefix, num_fed, num_after, sampling)
            is_scored = single.isfinite() & there.isfinite()
            gaps.append(float((single - there)[is_scored].abs().max()))
    gap = max(gaps)
    if a is None or b is None:
        return Divergence(prompt, at, a, b, None, gap, "bug")
    margin = float(single[a] - single[b])
    if sampling.temperature > 0:
        assert sampling.seed is not None
        noise = gumbels(torch.tensor([sampling.seed]), torch.tensor([[len(prefix)]]), target.vocab_size)[0, 0]
        margin += float(noise[a] - noise[b])
    return Divergence(prompt, at, a, b, margin, gap, "numerics" if abs(margin) <= _SLACK * gap else "bug")


def _scores(target: LM, prefix: Sequence[int], num_fed: int, num_after: int, sampling: Sampling) -> Tensor:
    """Log-probabilities after a prefix whose last ``num_fed`` tokens are fed in one forward, with ``num_after`` more
    behind them. [V]"""
    device = target.device
    length = len(prefix)
    # Which tokens stand behind does not matter: they are not seen.
    ids = torch.tensor([[*prefix, *[prefix[0]] * num_after]], device=device)
    cache = target.new_cache(1, length + num_after)
    begin = length - num_fed
    if begin:
        target.prefill(ids, torch.tensor([0], device=device), torch.tensor([begin], device=device), cache)
    positions = torch.arange(begin, length + num_after, device=device)[None]
    logits = target.forward(ids[:, begin:], positions, cache, target.view_len(length + num_after, cache))
    # The same order of scores at temperature 0 as at 1; filters keep the best token and change no order.
    warm = replace(sampling, temperature=sampling.temperature or 1.0)
    if sampling.temperature == 0:
        warm = replace(warm, top_k=0, top_p=1.0, min_p=0.0)
    settings = Settings.of([warm], target.vocab_size, device)
    seen = None
    if settings.repetition_penalty is not None:
        nothing = torch.zeros(1, target.vocab_size, dtype=torch.bool, device=device)
        seen = mark_seen(nothing, ids[:, :length])[:, -1:]
    return wide(to_probs(logits[:, num_fed - 1 : num_fed], settings, seen))[0, 0].log().cpu()
