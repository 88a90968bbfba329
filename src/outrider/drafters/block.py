"""The drafter of block heads: it drafts all tokens of a round in one forward of a block head.

The cache of the head holds the keys and values of the target's hidden states: all that the session knows, a function of
each token's place. They are written once, when a token is committed. A block writes its own keys and values at the
places of the last token and of those to come; they are replaced when these tokens are committed.

All slots of a block are fed, also where fewer tokens are wanted. So q depends neither on K nor on other rows.

Tokens are drawn one after the other from the outputs of that forward. Some heads correct q by the token before, and
predict whether the next one will be accepted. A draft may end there: before a token is drawn, by a function of those
before it. (To look at the token itself would bias the output.)

Sources: DFlash (2602.06036), DFlash 2; DSpark (2607.05147, appendix A for where a draft may end).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import CommittedTokens, Drafter, Prefill, Rows, Session, empty_draft
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import draw_next, end_before, one_by_one
from outrider.errors import OptionError
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread
from outrider.sampling.history import History
from outrider.sampling.masks import Masked
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule

_LARGE = 8  # K; executions favour some up to half of it


def block_drafter(head: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with a block head.

    Args:
        head: its module is a ``BlockHead``.
        options: a least confidence, for heads that predict acceptance.

    Raises:
        OptionError
    """
    module: Any = head.model
    least, most = options.min_confidence, module.most_drafted
    if least > 0 and module.confidence_head is None:
        raise OptionError("min_confidence", least, f"{head.name} does not predict acceptance: leave it out")
    options.check_taken(head.name, "min_confidence")
    return Drafter(
        options.full_name(head.name),
        lambda models, num_slots, capacity, *_: BlockSession(models[0], options, num_slots, capacity),
        (head,),
        most_drafted=most,
        # The whole block, which costs one forward in any case, and half of a large one, to verify less.
        favoured_k=(most // 2, most) if most > _LARGE else (most,),
        features=module.features,
    )


def _block_step(
    head: LM, view_len: int, k: int, cache: SlotCache, last_ids: Tensor, lengths: Tensor, num_drafted: Tensor
) -> tuple[Tensor, ...]:
    """Feed the blocks.

    Args:
        last_ids: [B, 1]
        lengths: [B]
        num_drafted: rows with 0 are not fed. [B]

    Returns:
        logits of the drafts [B, K, D]; outputs of their slots [B, K, H]; the state of the head's correction [B, R]
    """
    module: Any = head.model
    size, first = module.block_size, module.num_before
    ids = torch.cat((last_ids, last_ids.new_full((1, 1), module.mask_id).expand(len(last_ids), size - 1)), dim=1)
    positions = lengths[:, None] - 1 + torch.arange(size, device=lengths.device)
    positions = torch.where((num_drafted > 0)[:, None], positions, -1)
    with head.lock:
        if head.native is not None:
            given, wanted = (ids, positions, cache, view_len), (len(module.layers) + 1,)
            outputs = head.native(*given, num_logits=0, features=wanted, keeps_finite=True).features
            assert outputs is not None
        else:
            cache.at(positions, view_len, is_single=False, keeps_finite=True)
            outputs = module(ids, positions, module.masks(positions, view_len, head.dtype), cache.argument)
        logits = module.logits(outputs[:, first : first + k])
    correction = module.correction
    state = outputs[:, 0, :0] if correction is None else correction.start(outputs[:, :first], last_ids[:, 0])
    return logits, outputs[:, first : first + k], state


def _draw(
    head: LM,
    rule: Rule,
    options: DraftOptions,
    logits: Tensor,
    output: Tensor,
    ids: Tensor,
    state: Tensor,
    settings: Settings,
    history: History,
    allowed: Masked,
    noise: Any,
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Draw a token for each row.

    Args:
        logits: [B, D]
        output: the head's output at the slot. [B, H]
        ids: the token before. [B]
        state: [B, R]

    Returns:
        (ids [B], whether q is finite [B], q [B, V]); whether the draft ends before the token [B]; the next state [B, R]
    """
    module: Any = head.model
    is_cut = torch.zeros_like(ids, dtype=torch.bool)
    if options.min_confidence > 0:
        is_cut = module.confidence(output, ids) < options.min_confidence
    if module.correction is not None:
        logits, state = module.correction(logits, output, ids, state)
    logits = spread(logits, module.token_ids, head.vocab_size)
    ids, q, is_good = draw_next(rule, logits, settings, history, allowed, noise, is_greedy=False)
    return (ids, is_good, q), is_cut, state


def _draft_step(
    head: LM,
    rule: Rule,
    options: DraftOptions,
    view_len: int,
    k: int,
    cache: SlotCache,
    last_ids: Tensor,
    lengths: Tensor,
    num_drafted: Tensor,
    settings: Settings,
    history: History,
    noise: Any,
) -> tuple[Tensor, ...]:
    """Feed the blocks and draw K tokens of each row.

    Returns:
        ids [B, K]; whether q is finite [B, K]; q [B, K, V]; and the number of drafted tokens [B]
    """
    logits, outputs, state = _block_step(head, view_len, k, cache, last_ids, lengths, num_drafted)
    drawn, ids = list[tuple[Tensor, ...]](), last_ids[:, 0]
    for i in range(k):
        if drawn:
            history = history.then(ids)
        given = logits[:, i], outputs[:, i], ids, state, settings, history, None, noise.at(i)
        one, is_cut, state = _draw(head, rule, options, *given)
        num_drafted, ids = end_before(num_drafted, i, is_cut), one[0]
        drawn.append(one)
    return *(torch.stack(parts, dim=1) for parts in zip(*drawn, strict=True)), num_drafted


class BlockSession(Session):
    """The head's cache over the slots of an engine."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        module: Any = head.model
        self._head, self._module, self._options = head, module, options
        self._cache = head.new_cache(num_slots, capacity + module.block_size)  # a block goes beyond the sequence

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        if source is None:
            self._cache.erase(slot, num_tokens)
        else:
            self._cache.copy(source, slot, num_tokens)

    def prefill(self, chunk: Prefill) -> None:
        if chunk.features is not None:
            cache = self._cache.rows(chunk.first_slot, chunk.first_slot + len(chunk.ends))
            self._keep(cache, chunk.features, chunk.feature_positions)

    def observe(self, committed: CommittedTokens) -> None:
        assert committed.features is not None
        self._keep(self._cache.first(len(committed.ids)), committed.features, committed.feature_positions)

    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        """Write the context of tokens: [B, T, F], and their positions, -1 for padding [B, T]."""
        states = self._module.fuse(features.to(self._head.device, self._head.dtype))
        cache.at(positions, cache.capacity, is_single=False, keeps_finite=True)
        self._module.keep(states, positions, cache.argument)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        k = min(k, self._module.most_drafted)
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, cache = self._head, self._cache.first(len(rows))
        num_wanted = rows.num_wanted.clamp_max(k)
        # Beyond the context of the target, too: a block ends there.
        view_len = min(head.execution.round_length(rows.longest + self._module.block_size - 1), cache.capacity)
        blocks = cache, rows.last_ids[:, 1:], rows.lengths, num_wanted
        static = view_len, k
        if rows.masks is None:
            arguments = *blocks, rows.settings, rows.history, noise
            *results, num_drafted = head.run(_draft_step, (rule, self._options, *static), *arguments)
        else:
            fed = head.run(_block_step, static, *blocks)
            (logits, outputs, state), ids = fed, rows.last_ids[:, 1]

            def draft(
                i: int, is_wanted: Tensor, lengths: Tensor, history: History, allowed: Masked, noise: Any
            ) -> tuple[Tensor, ...]:
                nonlocal ids, state
                given = logits[:, i], outputs[:, i], ids, state, rows.settings, history, allowed, noise.at(0)
                drawn, is_cut, state = _draw(head, rule, self._options, *given)
                ids = drawn[0]
                return is_cut, *(part[:, None] for part in drawn)

            wanted = replace(rows, num_wanted=num_wanted)
            num_drafted, results = one_by_one(wanted, rows.masks, k, noise, draft)
        return Draft(ids=results[0], probs=results[2], num_drafted=num_drafted, is_finite=results[1])
