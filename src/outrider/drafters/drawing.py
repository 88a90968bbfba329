"""The loop in which drafts are drawn: token by token from logits, for every drafter that has a q.

A drafter gives a ``Source``, which computes the logits: in one forward for each token (models, chain heads) or in one
for all of them (PARD, block heads). Whether a draft ends before a token is a function of the tokens before it alone. A
cut that looked at the drawn token would bias the output, since the tokens that remain would not be drawn from q.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows
from outrider.drafters.draft_options import DraftOptions
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread
from outrider.sampling.history import History
from outrider.sampling.masks import Masked, Masks, mask
from outrider.sampling.probs import Settings, only_ids, rows_of, stack_places
from outrider.sampling.rules import Rule

LogitsAt = Callable[[int, Tensor, Tensor], Tensor]
"""(offset of a token, ids of the token before [B], numbers of drafted tokens so far [B]) -> logits of the model's
``token_ids``, or of all tokens [B, D]"""

Source = Callable[..., LogitsAt]
"""(run, model, k, *static, most tokens to draft [B], *tensors) -> logits. ``run`` is ``LM.run`` or calls a step."""


def draft_step(
    lm: LM,
    source: Source,
    static: tuple[Any, ...],
    rule: Rule,
    options: DraftOptions,
    k: int,
    stops_early: bool,
    last_ids: Tensor,
    num_wanted: Tensor,
    settings: Settings,
    history: History,
    own: tuple[Any, ...],
    noise: Any,
    *,
    masks: Masks | None = None,
) -> tuple[Tensor, ...]:
    """Draft K tokens of each row, one after the other.

    Args:
        static, own: the source's own arguments: hashable values, and tensors.
        stops_early: draft fewer than K tokens if no row has more, which needs reading on the host.
        last_ids: [B, 2]
        num_wanted: the most tokens to draft. [B]
        masks: effects of constraints. The host reads each token to mask the next one: only the source's forwards are
            run by the model's execution then, and the rest eagerly.

    Returns:
        ids [B, K], whether q is finite [B, K], the number of drafted tokens [B], and q [B, K, V] unless it is one-hot
    """
    logits_at = source(partial(_call, lm) if masks is None else lm.run, lm, k, *static, num_wanted, *own)
    if options.is_greedy:
        settings = settings.greedy()
    ids, num_drafted, allowed = last_ids[:, -1], num_wanted, None
    drawn: list[tuple[Tensor, ...]] = []
    for i in range(k):
        if drawn:
            history = history.then(ids)
        logits = logits_at(i, ids, num_drafted)
        token_ids = lm.token_ids
        if masks is not None:
            allowed = masks.here()
            logits, token_ids = spread(logits, token_ids, lm.vocab_size), None
        if options.min_prob > 0:
            is_cut = is_unsure(logits, options.min_prob, allowed)
            num_drafted = torch.where(is_cut, num_drafted.clamp_max(i), num_drafted)
        here = history.map(lambda values: values[:, None])
        rows, is_finite = rows_of(logits[:, None], settings, here, allowed, token_ids, lm.vocab_size)
        q: Any = rows[:, 0]
        ids = only_ids(q) if options.is_greedy else rule.draw(q, noise.at(i))
        if masks is not None:
            masks.push(ids, num_drafted > i)
        drawn.append((ids, is_finite[:, 0], q))
        if stops_early and not bool((num_drafted > i + 1).any()):
            drawn = drawn[: max(1, int(num_drafted.amax()))]
            break
    found, is_good, probs = (stack_places(parts) for parts in zip(*drawn, strict=True))
    return (found, is_good, num_drafted) if options.is_greedy else (found, is_good, num_drafted, probs)


def owed(num_wanted: Tensor, num_fed: int, cached: Tensor, lengths: Tensor) -> Tensor:
    """Positions of the tokens to feed before the first draft; -1 for those in the cache, but for the last one, and in
    rows without drafts.

    Args:
        num_wanted: the most tokens to draft. [B]
        num_fed: T, the last tokens of each sequence.
        cached: tokens in the cache. [B]
        lengths: [B]

    Returns:
        [B, T]
    """
    positions = lengths[:, None] - num_fed + torch.arange(num_fed, device=lengths.device)
    is_owed = (positions >= torch.minimum(cached, lengths - 1)[:, None]) & (num_wanted > 0)[:, None]
    return torch.where(is_owed, positions, -1)


def _call(lm: LM, step: Callable[..., tuple[Tensor, ...]], static: tuple[Any, ...], *arguments: Any) -> Any:
    return step(lm, *static, *arguments)


def draw_draft(
    lm: LM,
    rows: Rows,
    k: int,
    rule: Rule,
    options: DraftOptions,
    noise: Any,
    num_wanted: Tensor,
    source: Source,
    static: tuple[Any, ...],
    *own: Any,
    stops_early: bool = False,
) -> Draft:
    """A draft by ``draft_step``, which has the arguments."""
    both: Any = source, static, rule, options, k, stops_early
    arguments = rows.last_ids, num_wanted, rows.settings, rows.history, own, noise
    if rows.masks is None:
        found = lm.run(draft_step, both, *arguments)
    else:
        step: Any = draft_step
        found = step(lm, *both, *arguments, masks=rows.masks)
    ids, is_finite, num_drafted, *probs = found
    return Draft(ids, probs[0] if probs else None, num_drafted, is_finite)


def is_unsure(logits: Tensor, min_prob: float, allowed: Masked = None) -> Tensor:
    """Whether the draft's most probable token has a probability below ``min_prob``, by its logits before any option: a
    reason to end a draft before that token.

    Args:
        logits: [B, D]; of all tokens if there are constraints.
        allowed: the effects of constraints. [B, 1, V]

    Returns:
        [B]; False where the logits are not finite.
    """
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if allowed is not None:
        x = mask(x[:, None], allowed)[:, 0]
    return x.amax(dim=-1) - x.logsumexp(dim=-1) < math.log(min_prob)
