"""Drawing drafts from logits: shared by the drafters that have a q."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Rows
from outrider.sampling.history import History
from outrider.sampling.masks import Masked, Masks, mask
from outrider.sampling.probs import Settings, only_ids, rows_of
from outrider.sampling.rules import Rule

NextToken = Callable[[int, Tensor, Tensor, History, Masked, Any], tuple[Tensor, ...]]


def draw_next(
    rule: Rule,
    logits: Tensor,
    settings: Settings,
    history: History,
    allowed: Masked,
    noise: Any,
    *,
    is_greedy: bool,
) -> tuple[Tensor, Any, Tensor]:
    """Draw a token for each row.

    Args:
        logits: [B, V]
        settings: sampling options, made by ``Settings.greedy`` if ``is_greedy``.
        history: before the token.
        allowed: the effects of constraints. [B, 1, V]
        noise: the noise of this token.
        is_greedy: take the most probable token instead.

    Returns:
        ids [B]; q, from which they were drawn, as ``Probs`` [B, V]; whether the logits are finite [B]
    """
    here = history.map(lambda values: values[:, None])
    rows, finite = rows_of(logits[:, None], settings, here, allowed)
    q = rows[:, 0]
    return only_ids(q) if is_greedy else rule.draw(q, noise), q, finite[:, 0]


def draw_all(
    rule: Rule, logits: Tensor, settings: Settings, history: History, noise: Any, *, is_greedy: bool
) -> tuple[Tensor, Any, Tensor]:
    """Draw K tokens for each row, whose logits do not depend on each other. Arguments: see ``draw_next``.

    Args:
        logits: [B, K, V]
        noise: the noise of all tokens.

    Returns:
        ids [B, K]; q [B, K, V]; whether the logits are finite [B, K]
    """
    num_tokens = logits.shape[1]
    if not any(True for _ in history.tensors):  # all rows of q at once: most of the time is spent in calls
        q, finite = rows_of(logits, settings)
        drawn = [only_ids(q[:, i]) if is_greedy else rule.draw(q[:, i], noise.at(i)) for i in range(num_tokens)]
        return torch.stack(drawn, dim=1), q, finite
    steps: list[tuple[Tensor, ...]] = []
    for i in range(num_tokens):
        steps.append(draw_next(rule, logits[:, i], settings, history, None, noise.at(i), is_greedy=is_greedy))
        history = history.then(steps[-1][0])
    ids, q, finite = (torch.stack(parts, dim=1) for parts in zip(*steps, strict=True))
    return ids, q, finite


def is_unsure(logits: Tensor, min_prob: float, allowed: Masked = None) -> Tensor:
    """Whether the draft's most probable token has a probability below ``min_prob``, by its logits before any option: a
    reason to end a draft before that token. It may depend on the tokens before it alone. A cut that looked at the drawn
    token would bias the output, since the tokens that remain would not be drawn from q.

    Args:
        logits: [..., V]; with an effect of constraints [B, V]
        allowed: the effects of constraints. [B, 1, V]

    Returns:
        [...]; False where the logits are not finite.
    """
    x = logits if logits.dtype == torch.float64 else logits.to(torch.float32)
    if allowed is not None:
        x = mask(x[:, None], allowed)[:, 0]
    return x.amax(dim=-1) - x.logsumexp(dim=-1) < math.log(min_prob)


def end_before(num_drafted: Tensor, offset: int, is_cut: Tensor) -> Tensor:
    """The numbers of drafted tokens if some drafts end before the token at this offset. [B], [B] -> [B]"""
    return torch.where(is_cut, num_drafted.clamp_max(offset), num_drafted)


def one_by_one(rows: Rows, masks: Masks, k: int, noise: Any, draft: NextToken) -> tuple[Tensor, list[Tensor]]:
    """Draft each token in a step of its own: the host must read a token to mask the next one.

    Args:
        draft: (i, rows that want token i [B], lengths with the tokens drafted so far [B], history, effects of
            constraints [B, 1, V], noise from this token on) -> whether the draft ends before it [B], its id, and other
            results [B, 1, ...].

    Returns:
        The number of drafted tokens [B], and the results of all steps, [B, K, ...] each.
    """
    num_drafted, lengths, history = rows.num_wanted, rows.lengths, rows.history
    steps: list[tuple[Tensor, ...]] = []
    for i in range(k):
        is_wanted = (num_drafted - i).clamp(0, 1)
        is_cut, *results = draft(i, is_wanted, lengths, history, masks.here(), noise.token(i))
        # Copied, since a prepared step overwrites its results.
        num_drafted = end_before(num_drafted, i, is_cut)
        steps.append(tuple(part.clone() for part in results))
        ids = steps[-1][0][:, 0]
        lengths, history = lengths + 1, history.then(ids)
        masks.push(ids, is_wanted)
    return num_drafted, [torch.cat(parts, dim=1) for parts in zip(*steps, strict=True)]
