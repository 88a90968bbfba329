"""Faulty rules, drafters and caches that look correct. Each is known from public code, or is an easy slip.

The tests of the output distribution must detect all of them, and so must a valid certificate (``CONTROLS``).
Most accept more drafts than a correct rule can, which looks like success. Only tests and certificates may import this.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from outrider.decoding.verify import verify_step
from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.records import Draft, Verdict
from outrider.runtime.execution import EagerExecution, Step
from outrider.runtime.lm import LM
from outrider.sampling.noise import RoundUniforms, round_uniforms
from outrider.sampling.probs import Probs, draw, full
from outrider.sampling.rules import BLOCK, REJECTION, Rule, prob_at

_ALWAYS = -1.0  # a uniform number that accepts any token


def _all_or_nothing(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Accept all K unless the first is rejected."""
    is_first_kept = REJECTION.verify(target_probs, draft, noise).num_accepted[:, None] > 0
    accept = torch.where(is_first_kept, _ALWAYS, noise.accept)
    return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, accept, noise.next))


def _accept_all(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Accept every drafted token, and add a bonus."""
    accept = torch.full_like(noise.accept, _ALWAYS)
    return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, accept, noise.next))


def _reseed(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Reseed inside the acceptance loop: all accept decisions, and the draw, use the same number."""
    accept = noise.next[:, None].expand_as(noise.accept)
    return REJECTION.verify(target_probs, draft, RoundUniforms.of(noise.draft, accept, noise.next))


def _replace_last(target_probs: Tensor, draft: Draft, noise: RoundUniforms) -> Verdict:
    """Let the bonus replace the last accepted token instead of following it."""
    verdict = REJECTION.verify(target_probs, draft, noise)
    is_full = (verdict.num_accepted == draft.num_drafted) & (draft.num_drafted > 0)
    return dataclasses.replace(verdict, num_accepted=verdict.num_accepted - is_full.long())


def _draw_argmax(draft_rows: Probs, uniform: Tensor) -> Tensor:
    """Draft the argmax, but report the softmax as q."""
    return full(draft_rows).argmax(dim=-1)


def _draw_filtered(draft_rows: Probs, uniform: Tensor) -> Tensor:
    """Draft from the top two tokens, but report the unfiltered row as q."""
    rows = full(draft_rows)
    second = rows.topk(2, dim=-1).values[:, -1:]
    return draw(torch.where(rows >= second, rows, 0.0), uniform)


def _make_position_noise(seeds: Tensor, round_starts: Tensor, k: int, vocab_size: int) -> RoundUniforms:
    """Key the noise by seed and position alone, so that the next round reuses the numbers of rejected tokens."""
    by_offset = [round_uniforms(seeds, round_starts + offset, 1) for offset in range(max(k, 1))]
    draft = torch.cat([uniforms.draft for uniforms in by_offset], dim=1)
    accept = torch.cat([uniforms.accept for uniforms in by_offset], dim=1)
    return RoundUniforms.of(draft[:, :k], accept[:, :k], by_offset[0].next)


@dataclasses.dataclass(slots=True)
class _Reused:
    """Noise whose every second round reuses the numbers of the previous one."""

    numbers: RoundUniforms
    last: Tensor | None = None

    def select(self, rows: Tensor, k: int) -> RoundUniforms:
        last, self.last = self.last, rows
        if last is None or len(last) != len(rows):
            return self.numbers.select(rows, k)
        self.last = None
        return self.numbers.select(last, k)


@dataclasses.dataclass(frozen=True, slots=True)
class _Neighbours:
    """Noise whose every second slot reuses the numbers of the previous slot."""

    numbers: RoundUniforms

    def select(self, rows: Tensor, k: int) -> RoundUniforms:
        return self.numbers.select(rows[::2].repeat_interleave(2)[: len(rows)], k)


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

    def __init__(self, inner: EagerExecution) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def run(self, step: Step, lm: Any, static: tuple[Any, ...], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if step is not verify_step:  # the states are advanced
            return self.inner.run(step, lm, static, arguments)
        cache, _, lengths, *_ = arguments
        rows, last = torch.arange(len(lengths), device=lengths.device), lengths - 1
        kept = [(store, (rows.to(store.device), at.to(store.device))) for store, at in cache.kept_of(last)]
        stale = [store[place] for store, place in kept]  # rejected
        results = self.inner.run(step, lm, static, arguments)
        for (store, place), old in zip(kept, stale, strict=True):
            was_written = (old != 0).flatten(1).any(dim=1).view(-1, *[1] * (old.ndim - 1))
            store[place] = torch.where(was_written, old, store[place])
        return results


def _with_off_by_one_rollback(target: LM) -> LM:
    wrong = copy.copy(target)
    wrong.execution = cast(EagerExecution, OffByOneRollback(target.execution))
    return wrong


ALL_OR_NOTHING = Rule("all-or-nothing", REJECTION.make_noise, REJECTION.draw, _all_or_nothing)
ACCEPT_ALL = Rule("accept-all", REJECTION.make_noise, REJECTION.draw, _accept_all)
RESEEDED = Rule("reseeded", REJECTION.make_noise, REJECTION.draw, _reseed)
REPLACE_LAST = Rule("replace-last", REJECTION.make_noise, REJECTION.draw, _replace_last)
ARGMAX_DRAFTS = Rule("argmax-drafts", REJECTION.make_noise, _draw_argmax, REJECTION.verify)
FILTERED_DRAFTS = Rule("filtered-drafts", REJECTION.make_noise, _draw_filtered, REJECTION.verify)
BLOCK_BY_POSITION = Rule("block-by-position", _make_position_noise, BLOCK.draw, BLOCK.verify)
REUSED = Rule(
    "reused", lambda seeds, starts, k, _: _Reused(round_uniforms(seeds, starts, k)), REJECTION.draw, REJECTION.verify
)
NEIGHBOUR = Rule(
    "neighbour",
    lambda seeds, starts, k, _: _Neighbours(round_uniforms(seeds, starts, k)),
    REJECTION.draw,
    REJECTION.verify,
)
WRONG_RULES = {
    rule.name: rule
    for rule in (ALL_OR_NOTHING, ACCEPT_ALL, RESEEDED, REPLACE_LAST, ARGMAX_DRAFTS, FILTERED_DRAFTS, BLOCK_BY_POSITION)
}

_LEAST_PROB = 0.1  # of a token that ``drop-unlikely`` keeps in a certificate's control


@dataclasses.dataclass(frozen=True, slots=True)
class Control:
    """A deliberate mistake, injected into the real loop.

    Attributes:
        about: short description for tables.
        wrap_target, wrap_drafter: inject the mistake.
        needs_probs: ineffective if q is one-hot.
        needs_cache: ineffective in a model without a KV cache.
        is_wrong_greedily: also effective at temperature 0.
        least_k: ineffective for a smaller K.
        least_rows: ineffective for a smaller batch.
        keeps_seeds: each slot keeps the seed of its first sequence.
        most_rows: largest batch to run.
    """

    name: str
    about: str
    rule: Rule = REJECTION
    wrap_target: Callable[[LM], LM] = lambda target: target
    wrap_drafter: Callable[[Drafter], Drafter] = lambda drafter: drafter
    needs_probs: bool = False
    needs_cache: bool = False
    is_wrong_greedily: bool = False
    least_k: int = 1
    least_rows: int = 1
    keeps_seeds: bool = False
    most_rows: int | None = None

    def excuse(self, *, k: int, num_rows: int, has_probs: bool, has_cache: bool, is_greedy: bool) -> str | None:
        """Reason why it is ineffective here; None if it is effective."""
        if num_rows < self.least_rows:
            return f"correct for batches of fewer than {self.least_rows} sequences"
        if k < self.least_k:
            return f"correct for fewer than {self.least_k} drafted tokens"
        if self.needs_probs and not has_probs:
            return "correct for a draft without probabilities"
        if self.needs_cache and not has_cache:
            return "the target has no cache"
        if is_greedy and not self.is_wrong_greedily:
            return "correct at temperature 0"
        return None


CONTROLS = (
    Control("keep-all", "all accepted unless the first fails", ALL_OR_NOTHING, is_wrong_greedily=True, least_k=2),
    Control("accept-all", "every draft accepted", ACCEPT_ALL, is_wrong_greedily=True),
    Control("reseeded", "one uniform number for all decisions", RESEEDED),
    Control("replace-last", "bonus replaces the last token", REPLACE_LAST, is_wrong_greedily=True),
    Control(
        "drop-unlikely",
        "drafts of q < 0.1 dropped",
        wrap_drafter=lambda d: drop_unlikely(d, _LEAST_PROB),
        needs_probs=True,
    ),
    Control("argmax-drafts", "argmax drafts, softmax q", ARGMAX_DRAFTS, needs_probs=True),
    Control("filtered-drafts", "top-2 drafts, unfiltered q", FILTERED_DRAFTS, needs_probs=True),
    Control(
        "rollback",
        "cache keeps a rejected token",
        wrap_target=_with_off_by_one_rollback,
        needs_cache=True,
        is_wrong_greedily=True,
    ),
    Control("reused", "random numbers reused in the next round", REUSED),
    Control("neighbour", "random numbers of the slot above", NEIGHBOUR, least_rows=2),
    Control("kept-seed", "a slot keeps its seed", keeps_seeds=True, most_rows=8),
)
