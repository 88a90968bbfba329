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

from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import CommittedTokens, Drafter, Prefill, Rows, Session, empty_draft
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import LogitsAt, draft_step, draw_draft
from outrider.errors import OptionError
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.vocabulary import spread
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


def _feed(
    head: LM, view_len: int, k: int, cache: SlotCache, last_ids: Tensor, lengths: Tensor, num_wanted: Tensor
) -> tuple[Tensor, ...]:
    """Feed the blocks.

    Args:
        last_ids: [B, 2]
        lengths: [B]
        num_wanted: rows with 0 are not fed. [B]

    Returns:
        logits of the drafts [B, K, D]; outputs of their slots [B, K, H]; the state of the head's correction [B, R]
    """
    module: Any = head.model
    size, first = module.block_size, module.num_before
    last = last_ids[:, 1:]
    ids = torch.cat((last, last.new_full((1, 1), module.mask_id).expand(len(last), size - 1)), dim=1)
    positions = lengths[:, None] - 1 + torch.arange(size, device=lengths.device)
    positions = torch.where((num_wanted > 0)[:, None], positions, -1)
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
    state = outputs[:, 0, :0] if correction is None else correction.start(outputs[:, :first], last[:, 0])
    return logits, outputs[:, first : first + k], state


def _at_once(
    run: Any,
    head: LM,
    k: int,
    view_len: int,
    min_confidence: float,
    num_wanted: Tensor,
    cache: SlotCache,
    last_ids: Tensor,
    lengths: Tensor,
) -> LogitsAt:
    """A forward for all tokens, whose logits may be corrected by the token before each one."""
    module: Any = head.model
    logits, outputs, state = run(_feed, (view_len, k), cache, last_ids, lengths, num_wanted)

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor | None]:
        nonlocal state
        is_cut = module.confidence(outputs[:, i], ids) < min_confidence if min_confidence > 0 else None
        here = logits[:, i]
        if module.correction is not None:
            here, state = module.correction(here, outputs[:, i], ids, state)
        return spread(here, module.token_ids, head.vocab_size), is_cut

    return logits_at


class BlockSession(Session):
    """The head's cache over the slots of an engine."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        module: Any = head.model
        self._head, self._module, self._options = head, module, options
        self._draft = head.bind(draft_step)
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
        static = _at_once, (view_len, self._options.min_confidence), rule, self._options, k, False
        own = cache, rows.last_ids, rows.lengths
        call = static, rows.last_ids, num_wanted, rows.settings, rows.history, own
        return draw_draft(self._draft, head, rows.masks, call, noise)
