"""Faulty rules, drafters and caches that look correct. Each is known from public code, or is an easy slip.

The tests of the output distribution must detect all of them, and so must a valid certificate (``CONTROLS``).
Most accept more drafts than a correct rule can, which looks like success. Only tests and certificates may import this.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from outrider.decoding.verify import VerifyStep
from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.records import Draft, Verdict
from outrider.runtime.execution import Execution
from outrider.runtime.lm import LM
from outrider.sampling.noise import RoundUniforms, round_uniforms
from outrider.sampling.probs import Probs, draw, full
from outrider.sampling.rules import BLOCK, REJECTION, Rule, prob_at

_ALWAYS = -1.0  # a uniform number that accepts any token


def _verify_by(accept: Callable[[Tensor, Draft, RoundUniforms], Tensor]) -> Callable[..., Verdict]:
    """Verify with other accept numbers. [B, K]"""

    def verify(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
        numbers = accept(target_probs, draft, noise).expand_as(noise.accept)
        return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, numbers, noise.next))

    return verify


def _all_or_nothing(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Tensor:
    """Accept all K unless the first is rejected."""
    is_first_kept = REJECTION.verify(target_probs, draft, noise).num_accepted[:, None] > 0
    return torch.where(is_first_kept, _ALWAYS, noise.accept)


def _replace_last(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Let the bonus replace the last accepted token instead of following it."""
    verdict = REJECTION.verify(target_probs, draft, noise)
    is_full = (verdict.num_accepted == draft.num_drafted) & (draft.num_drafted > 0)
    return dataclasses.replace(verdict, num_accepted=verdict.num_accepted - is_full.long())


def _draw_filtered(draft_rows: Probs, uniform: Tensor) -> Tensor:
    """Draft from the top two tokens, but report the unfiltered row as q."""
    rows = full(draft_rows)
    second = rows.topk(2, dim=-1).values[:, -1:]
    return draw(torch.where(rows >= second, rows, 0.0), uniform)


def _make_position_noise(seeds: Tensor, round_starts: Tensor, k: int, vocab_size: int) -> RoundUniforms:
    """Key the noise by seed and position alone, so that the next round reuses the numbers of rejected tokens."""
    by_offset = [round_uniforms(seeds, round_starts + offset, 1) for offset in range(max(k, 1))]
    draft, accept = (torch.cat([getattr(one, name) for one in by_offset], dim=1) for name in ("draft", "accept"))
    return RoundUniforms.of(draft[:, :k], accept[:, :k], by_offset[0].next)


def _reused(numbers: RoundUniforms) -> Any:
    """Noise whose every second round reuses the numbers of the previous one."""
    last: Tensor | None = None

    def select(rows: Tensor, k: int) -> RoundUniforms:
        nonlocal last
        before, last = last, rows
        if before is None or len(before) != len(rows):
            return numbers.select(rows, k)
        last = None
        return numbers.select(before, k)

    return SimpleNamespace(select=select)


def _neighbours(numbers: RoundUniforms) -> Any:
    """Noise whose every second slot reuses the numbers of the previous slot."""
    select = numbers.select
    return SimpleNamespace(select=lambda rows, k: select(rows[::2].repeat_interleave(2)[: len(rows)], k))


def drop_unlikely(inner: Drafter, least_prob: float) -> Drafter:
    """Truncate a draft before its first token of low q, so that whether a token is verified depends on the token."""

    def alter(rows: Rows, k: int, draft: Draft) -> Draft:
        if draft.probs is None:
            return draft
        q_x = prob_at(draft.probs, draft.ids)
        num_likely = (q_x >= least_prob).long().cumprod(dim=1).sum(dim=1)
        return dataclasses.replace(draft, num_drafted=torch.minimum(draft.num_drafted, num_likely))

    return altered_drafter(inner, "drop-unlikely", alter)


class OffByOneRollback:
    """Execution whose cache keeps one entry too many after a rejection: the rejected token, in the place of the
    correction. All later tokens then attend to a token that is not in the sequence."""

    def __init__(self, inner: Execution) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, step: Callable[..., Any], lm: Any, **arguments: Any) -> Any:
        if not isinstance(step, VerifyStep):  # the states are advanced
            return self.inner.run(step, lm, **arguments)
        cache, lengths = arguments["cache"], arguments["lengths"]
        rows, last = torch.arange(len(lengths), device=lengths.device), lengths - 1
        kept = [(store, (rows.to(store.device), at.to(store.device))) for store, at in cache.kept_of(last)]
        stale = [store[place] for store, place in kept]  # rejected
        results = self.inner.run(step, lm, **arguments)
        for (store, place), old in zip(kept, stale, strict=True):
            was_written = (old != 0).flatten(1).any(dim=1).view(-1, *[1] * (old.ndim - 1))
            store[place] = torch.where(was_written, old, store[place])
        return results


def _keep_rejected(target: LM) -> LM:
    wrong = copy.copy(target)
    wrong.execution = cast(Execution, OffByOneRollback(target.execution))
    return wrong


def _wrong(name: str, **changes: Any) -> Rule:
    return dataclasses.replace(REJECTION, name=name, **changes)


def _noise_of(noise: Callable[[RoundUniforms], Any]) -> Callable[[Tensor, Tensor, int, int], Any]:
    return lambda seeds, starts, k, _: noise(round_uniforms(seeds, starts, k))


ALL_OR_NOTHING = _wrong("all-or-nothing", verify=_verify_by(_all_or_nothing))
ACCEPT_ALL = _wrong("accept-all", verify=_verify_by(lambda p, draft, noise: torch.full_like(noise.accept, _ALWAYS)))
# Reseeding inside the acceptance loop: all accept decisions, and the draw, use the same number.
RESEEDED = _wrong("reseeded", verify=_verify_by(lambda p, draft, noise: noise.next[:, None]))
REPLACE_LAST = _wrong("replace-last", verify=_replace_last)
ARGMAX_DRAFTS = _wrong("argmax-drafts", draw=lambda rows, uniform: full(rows).argmax(dim=-1))  # q is the softmax
FILTERED_DRAFTS = _wrong("filtered-drafts", draw=_draw_filtered)
BLOCK_BY_POSITION = dataclasses.replace(BLOCK, name="block-by-position", make_noise=_make_position_noise)
REUSED = _wrong("reused", make_noise=_noise_of(_reused))
NEIGHBOUR = _wrong("neighbour", make_noise=_noise_of(_neighbours))
WRONG_RULES = {
    rule.name: rule
    for rule in (ALL_OR_NOTHING, ACCEPT_ALL, RESEEDED, REPLACE_LAST, ARGMAX_DRAFTS, FILTERED_DRAFTS, BLOCK_BY_POSITION)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """A deliberate mistake, injected into the real loop."""

    name: str
    about: str  # short description for tables
    rule: Rule = REJECTION
    wrap_target: Callable[[LM], LM] = lambda target: target
    wrap_drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    needs_probs: bool = False  # ineffective if q is one-hot
    needs_cache: bool = False  # ineffective in a model without a KV cache
    is_wrong_greedily: bool = False  # also effective at temperature 0
    least_k: int = 1  # ineffective for a smaller K
    least_rows: int = 1  # ineffective for a smaller batch
    keeps_seeds: bool = False  # each slot keeps the seed of its first sequence
    most_rows: int | None = None  # largest batch to run


CONTROLS = (
    Control("keep-all", "all accepted unless the first fails", ALL_OR_NOTHING, is_wrong_greedily=True, least_k=2),
    Control("accept-all", "every draft accepted", ACCEPT_ALL, is_wrong_greedily=True),
    Control("reseeded", "one uniform number for all decisions", RESEEDED),
    Control("replace-last", "bonus replaces the last token", REPLACE_LAST, is_wrong_greedily=True),
    Control(
        "drop-unlikely", "drafts of q < 0.1 dropped", wrap_drafter=lambda d: drop_unlikely(d, 0.1), needs_probs=True
    ),
    Control("argmax-drafts", "argmax drafts, softmax q", ARGMAX_DRAFTS, needs_probs=True),
    Control("filtered-drafts", "top-2 drafts, unfiltered q", FILTERED_DRAFTS, needs_probs=True),
    Control(
        "rollback", "cache keeps a rejected token", REJECTION, _keep_rejected, needs_cache=True, is_wrong_greedily=True
    ),
    Control("reused", "random numbers reused in the next round", REUSED),
    Control("neighbour", "random numbers of the slot above", NEIGHBOUR, least_rows=2),
    Control("kept-seed", "a slot keeps its seed", keeps_seeds=True, most_rows=8),
)
