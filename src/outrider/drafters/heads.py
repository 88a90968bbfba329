"""The drafters of heads, which draft from the target's hidden states (see ``models/heads/base.py``).

*Entry by entry*: EAGLE-3 heads and MTP layers. Entry i of a sequence is its token i + 1 with the target's state of
token i, and predicts token i + 2. So a sequence of L tokens has L - 1 entries, and the output of the last one gives the
first draft. Drafted tokens are fed with the head's own output in place of the state; their entries are replaced once
the target's states are there. The states have places in a cache of their own, beside the head's keys and values.

*All at once*: block heads. The cache of the head holds the keys and values of the target's hidden states, which are
written once, when a token is committed. A block writes its own keys and values at the places of the last token and of
those to come; they are replaced when these tokens are committed. All slots of a block are fed, also where fewer tokens
are wanted. So q depends neither on K nor on other rows. Tokens are drawn one after the other from the outputs of that
forward: some heads correct q by the token before, and predict whether the next one will be accepted.

So all that a session knows is a function of the committed tokens: prefixes are shared, rows move, and rounds without
drafts only leave entries to be fed later.

Sources: Li et al. 2401.15077, 2503.01840; DeepSeek-V3 2412.19437; DFlash (2602.06036), DFlash 2; DSpark (2607.05147,
appendix A for where a draft may end). Some of these draft greedily or in trees; here drafts are drawn from q.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import CommittedTokens, Drafter, Prefill, Rows, Session, empty_draft
from outrider.drafters.draft_options import NO_OPTIONS, DraftOptions
from outrider.drafters.drawing import LogitsAt, draft_step, draw_draft, owed
from outrider.errors import OptionError
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.sampling.rules import Rule

_LARGE = 8  # K; executions favour some up to half of it


def head_drafter(head: LM, options: DraftOptions = NO_OPTIONS) -> Drafter:
    """Draft with a head.

    Args:
        head: its module is a ``Head``.
        options: greedy, and a least probability; or for blocks a least confidence, if the head predicts acceptance.

    Raises:
        OptionError
    """
    module: Any = head.model
    name = options.full_name(head.name)
    if module.shared_layers:
        options.check_taken(head.name, "is_greedy", "min_prob")
        return Drafter(
            name,
            lambda models, num_slots, capacity, *_: SharingSession(models[0], options, num_slots, capacity),
            (head,),
            is_one_hot=options.is_greedy,
            features=module.features,
            shared_layers=module.shared_layers,
        )
    if not module.block_size:
        options.check_taken(head.name, "is_greedy", "min_prob")
        return Drafter(
            name,
            lambda models, *sizes: ChainSession(models[0], options, *sizes),
            (head,),
            is_one_hot=options.is_greedy,
            features=module.features,
        )
    least, most = options.min_confidence, module.most_drafted
    if least > 0 and module.confidence_head is None:
        raise OptionError("min_confidence", least, f"{head.name} does not predict acceptance: leave it out")
    options.check_taken(head.name, "min_confidence")
    return Drafter(
        name,
        lambda models, num_slots, capacity, *_: BlockSession(models[0], options, num_slots, capacity),
        (head,),
        most_drafted=most,
        # The whole block, which costs one forward in any case, and half of a large one, to verify less.
        favoured_k=(most // 2, most) if most > _LARGE else (most,),
        features=module.features,
    )


# Entry by entry


def keep_states(head: LM, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
    """Store the states of tokens at their places.

    Args:
        features: [B, T, F]
        positions: -1 for padding. [B, T]
    """
    module: Any = head.model
    states = module.fuse(features.to(head.device, head.dtype))[:, None]  # [B, 1, T, H]
    cache.at(positions, cache.capacity, is_single=False, keeps_finite=True)
    cache.argument.layers[-1].update(states, states[..., :0])


def stored_states(cache: SlotCache, positions: Tensor) -> Tensor:
    """The stored states of tokens: [B, T] -> [B, T, H]"""
    layer: Any = cache.argument.layers[-1]
    store: Tensor = layer.keys[:, :, 0]
    return store.gather(1, positions.clamp_min(0)[..., None].expand(-1, -1, store.shape[-1]))


def feed_entries(
    head: LM,
    view_len: int,
    num_logits: int,
    cache: SlotCache,
    ids: Tensor,
    states: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
    """Feed entries.

    Returns:
        logits after the last N = ``num_logits`` columns [B, N, D]; the states to be fed with the drafted tokens
        [B, T, H]
    """
    module: Any = head.model
    if head.native is not None:
        fed_back = len(module.layers) + module.norm_output
        with head.lock:
            given = ids, positions, cache, view_len
            results = head.native(*given, num_logits=num_logits, features=(fed_back,), keeps_finite=True, states=states)
        assert results.features is not None
        logits, outputs = results.logits, results.features
    else:
        cache.at(positions, view_len, is_single=False, keeps_finite=True)
        mask = head.visibility.masks(positions, view_len, head.dtype)
        with head.lock:
            normed, outputs = module(ids, states, positions.clamp_min(0), mask, cache.argument)
            logits = module.lm_head(normed[:, normed.shape[1] - num_logits :])
    return _of_tokens(head, logits), outputs


def _of_tokens(head: LM, logits: Tensor) -> Tensor:
    """Logits of a head's tokens, without padding. [..., D]"""
    return logits[..., : head.vocab_size] if head.token_ids is None else logits


def _one_by_one(
    run: Any,
    head: LM,
    k: int,
    view_len: int,
    num_wanted: Tensor,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
) -> LogitsAt:
    """A forward for each token.

    Args:
        fed: the last tokens of the sequences. [B, T]
        cached: entries in the cache, which are not fed again. [B]
        lengths: [B]
    """
    states = torch.empty(0)

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> tuple[Tensor, None]:
        nonlocal states
        if i == 0:
            tokens, positions = fed, _owed(num_wanted, fed, cached, lengths)
            states = stored_states(cache, positions)
        else:
            tokens, positions = ids[:, None], torch.where(i < num_drafted, lengths - 2 + i, -1)[:, None]
        logits, outputs = run(feed_entries, (view_len, 1), cache, tokens, states, positions)
        states = outputs[:, -1:]
        return logits[:, -1], None

    return logits_at


def _owed(num_wanted: Tensor, fed: Tensor, cached: Tensor, lengths: Tensor) -> Tensor:
    """Places of the entries to feed, of which a sequence has one fewer than tokens. See ``owed``."""
    return owed(num_wanted, fed.shape[1], cached, lengths - 1)


def _in_parallel(
    run: Any,
    head: LM,
    k: int,
    view_len: int,
    num_wanted: Tensor,
    cache: SlotCache,
    fed: Tensor,
    cached: Tensor,
    lengths: Tensor,
) -> LogitsAt:
    """P-EAGLE: one forward. Entries of mask tokens follow those of the sequence, and are replaced later. So
    the logits at an offset depend neither on the tokens drafted before it nor on K. Arguments: see ``_one_by_one``."""
    module: Any = head.model
    owed = _owed(num_wanted, fed, cached, lengths)
    offsets = torch.arange(1, k, device=lengths.device)
    beyond = torch.where(offsets < num_wanted[:, None], lengths[:, None] - 2 + offsets, -1)
    ids = torch.cat((fed, fed.new_full(beyond.shape, module.mask_id)), dim=1)
    masked = module.mask_state.expand(*beyond.shape, -1)
    states = torch.cat((stored_states(cache, owed), masked), dim=1)
    logits, _ = run(feed_entries, (view_len, k), cache, ids, states, torch.cat((owed, beyond), dim=1))
    return lambda i, ids, num_drafted: (logits[:, i], None)


class ChainSession(Session):
    """The head's cache over the slots of an engine.

    ``_cached`` counts the entries of each row that hold the target's states; they stay valid. ``_num_late`` is the
    host's bound of those that are missing.
    """

    def __init__(
        self, head: LM, options: DraftOptions, num_slots: int, capacity: int, device: torch.device, max_k: int
    ) -> None:
        self._head, self._options = head, options
        self._draft = partial(head.run, draft_step)
        self._cache = head.new_cache(num_slots, capacity)
        self._cached = torch.zeros(num_slots, dtype=torch.long, device=device)
        self._num_late = [0] * num_slots
        self._width = max_k + 1  # entries that are fed with the drafts
        self._most_fed = max(1, PREFILL_TOKENS // num_slots)  # entries of a row in one forward

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        # The last shared token has a state, and its entry another token.
        num_entries = max(num_tokens - 1, 0)
        if source is None:
            self._cache.erase(slot, num_tokens)
            self._cached[slot].clamp_(max=num_entries)
            return
        self._cache.copy(source, slot, num_tokens)
        # Here alone the host waits for the device: a prompt joins, or a row moves.
        known = min(int(self._cached[source]), num_entries)
        self._cached[slot] = known
        self._num_late[slot] = num_tokens - known

    def prefill(self, chunk: Prefill) -> None:
        """Keep the states of a chunk of prompts, and feed its entries, except each prompt's last."""
        begin, end = chunk.first_slot, chunk.first_slot + len(chunk.ends)
        cache, device = self._cache.rows(begin, end), chunk.ids.device
        if chunk.features is not None:
            keep_states(self._head, cache, chunk.features, chunk.feature_positions)
        ends = [min(to, length - 2) for to, length in zip(chunk.ends, chunk.lengths, strict=True)]
        late = [
            self._num_late[slot] + to - at
            for slot, at, to in zip(range(begin, end), chunk.starts, chunk.ends, strict=True)
        ]
        cached = self._cached[begin:end]
        self._feed_late(cache, chunk.ids, cached, torch.tensor(ends, device=device), max(late), max(chunk.ends))
        self._num_late[begin:end] = [1] * len(chunk.ends)

    def observe(self, committed: CommittedTokens) -> None:
        assert committed.features is not None
        num_rows, width, _ = committed.features.shape
        keep_states(self._head, self._cache.first(num_rows), committed.features, committed.feature_positions)
        self._num_late[:num_rows] = [num + width for num in self._num_late[:num_rows]]

    def catch_up(self, rows: Rows) -> bool:
        """Feed the entries beyond those that are fed with the drafts."""
        num_rows = len(rows)
        late = [n if wanted else 0 for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)]
        if max(late) <= self._width:
            return False
        cached = self._cached[:num_rows]
        ends = torch.where(rows.num_wanted > 0, rows.lengths - 2, cached)
        self._feed_late(self._cache.first(num_rows), rows.ids, cached, ends, max(late), rows.longest)
        self._num_late[:num_rows] = [
            min(n, 1) if wanted else n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)
        ]
        return False

    def _feed_late(self, cache: SlotCache, ids: Tensor, cached: Tensor, ends: Tensor, width: int, longest: int) -> None:
        """Feed the entries cached <= i < ends, and count them.

        Args:
            ids: column j holds the token at position j. [B, N]
            cached: changed in place. [B]
            ends: [B]
            width: at least their largest number in a row.
            longest: above every entry.
        """
        for begin in range(0, width, self._most_fed):
            num_columns = min(width - begin, self._most_fed)
            positions = cached[:, None] + begin + torch.arange(num_columns, device=ids.device)
            positions = torch.where(positions < ends[:, None], positions, -1)
            tokens = ids.gather(1, (positions + 1).clamp(0, ids.shape[1] - 1))
            view_len = self._head.view_len(longest + 1, cache)
            feed_entries(self._head, view_len, 0, cache, tokens, stored_states(cache, positions), positions)
        cached.copy_(torch.maximum(cached, ends))

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, num_rows = self._head, len(rows)
        cache, cached = self._cache.first(num_rows), self._cached[:num_rows]
        num_wanted = torch.where(rows.lengths > 1, rows.num_wanted, 0)  # a single token has no entry
        # Few shapes where they must be prepared, few columns elsewhere.
        late = [n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False) if wanted]
        width = self._width if head.execution.is_prepared else max(1, *late)
        columns = rows.lengths[:, None] - width + torch.arange(width, device=rows.ids.device)
        fed = rows.ids.gather(1, columns.clamp_min(0))
        module: Any = head.model
        source = _one_by_one if module.mask_id is None else _in_parallel
        static = source, (head.view_len(rows.longest + k, cache),), rule, self._options, k, False
        own = cache, fed, cached, rows.lengths
        call = static, rows.last_ids, num_wanted, rows.settings, rows.history, own
        draft = draw_draft(self._draft, head, rows.masks, call, noise)
        cached.copy_(torch.where(num_wanted > 0, rows.lengths - 1, cached))
        self._num_late[:num_rows] = [
            0 if wanted else n for n, wanted in zip(self._num_late, rows.most_wanted, strict=False)
        ]
        return draft


class StatesSession(Session):
    """A head's cache over the slots of an engine, to which the target's states are written as tokens are committed."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        self._head, self._options = head, options
        self._draft = partial(head.run, draft_step)
        self._cache = head.new_cache(num_slots, capacity)

    @abstractmethod
    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        """Write what the head keeps of tokens: [B, T, F], and their positions, -1 for padding [B, T]."""

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


# Token by token, with the target's keys and values


def feed_shared(
    head: LM, view_len: int, shared: SlotCache, ids: Tensor, states: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Feed single tokens. Results are those of ``feed_entries``."""
    module: Any = head.model
    with head.lock:
        outputs, states = module(ids, states, positions, shared, view_len)
        logits = module.lm_head(outputs)
    return _of_tokens(head, logits), states


def _in_place(
    run: Any, head: LM, k: int, view_len: int, num_wanted: Tensor, cache: SlotCache, shared: SlotCache, lengths: Tensor
) -> LogitsAt:
    """A forward for each token, all at the place of the last committed one.

    Args:
        cache: the states.
        shared: keys and values of the target.
        lengths: [B]
    """
    positions = torch.where(num_wanted > 0, lengths - 1, -1)[:, None]
    states = stored_states(cache, positions - 1)

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> tuple[Tensor, None]:
        nonlocal states
        logits, states = run(feed_shared, (view_len,), shared, ids[:, None], states, positions)
        return logits[:, -1], None

    return logits_at


class SharingSession(StatesSession):
    """The states of the target's tokens over the slots of an engine. Keys and values are the target's own."""

    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
        keep_states(self._head, cache, features, positions)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if not any(rows.most_wanted):
            return empty_draft(rows)
        head, cache, shared = self._head, self._cache.first(len(rows)), rows.shared
        assert shared is not None
        num_wanted = torch.where(rows.lengths > 1, rows.num_wanted, 0)  # no state comes before a single token
        static = _in_place, (head.view_len(rows.longest, shared),), rule, self._options, k, False
        own = cache, shared, rows.lengths
        call = static, rows.last_ids, num_wanted, rows.settings, rows.history, own
        return draw_draft(self._draft, head, rows.masks, call, noise)


# All at once


def feed_blocks(
    head: LM, view_len: int, k: int, cache: SlotCache, last_ids: Tensor, lengths: Tensor, num_wanted: Tensor
) -> tuple[Tensor, ...]:
    """Feed the blocks.

    Args:
        last_ids: [B, 2]
        lengths: [B]
        num_wanted: rows with 0 are not fed. [B]

    Returns:
        logits of the drafts [B, K, D]; outputs of their slots [B, K, H]; the state of the head's correction
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
        if module.lilicorr is not None:
            slots = outputs[:, first:]
            logits, anchors = module.logits(slots), stored_states(cache, lengths[:, None] - 2)[:, 0]
            state = module.lilicorr.start(logits, slots, module.embed_tokens, anchors, lengths > 1)
            return logits[:, :k], slots[:, :k], *state
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
    logits, outputs, *state = run(feed_blocks, (view_len, k), cache, last_ids, lengths, num_wanted)

    def logits_at(i: int, ids: Tensor, num_drafted: Tensor) -> tuple[Tensor, Tensor | None]:
        nonlocal state
        is_cut = module.confidence(outputs[:, i], ids) < min_confidence if min_confidence > 0 else None
        here = logits[:, i]
        if module.correction is not None:
            here, *state = module.correction(here, outputs[:, i], ids, *state)
        return here, is_cut

    return logits_at


class BlockSession(StatesSession):
    """The head's cache over the slots of an engine."""

    def __init__(self, head: LM, options: DraftOptions, num_slots: int, capacity: int) -> None:
        module: Any = head.model
        super().__init__(head, options, num_slots, capacity + module.block_size)  # a block goes beyond the sequence
        self._module = module

    def _keep(self, cache: SlotCache, features: Tensor, positions: Tensor) -> None:
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
