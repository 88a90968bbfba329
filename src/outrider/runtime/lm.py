"""LM: a causal language model as a function from tokens at positions to logits.

    logits = lm.forward(ids, positions, cache, view_len)

The model is Hugging Face's own modelling code, or a stand-in for it (stand_in.py). This module adds the mask
(attention_mask.py), the vocabulary size, and, for models with recurrent states, the forward from the anchors of the
cache to the new tokens. Its execution decides how steps are run (eager, native, captured). It does not know sampling,
drafts or text, nor where a model comes from.
"""

from __future__ import annotations

import copy
import threading
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.errors import OptionError
from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW, LayerShape
from outrider.runtime.execution import EagerExecution
from outrider.runtime.modules import cache_argument, find_mixers, recorded_states, token_by_token, with_finite_numbers
from outrider.runtime.stand_in import StandIn
from outrider.runtime.vocabulary import UNKNOWN, spread
from outrider.runtime.weight_tensors import is_shared, tp_size_of
from outrider.system.ranks import any_process, check_equal, in_all_processes, together

PREFILL_TOKENS = 1024
"""Maximum prompt tokens in one forward, all rows together. Matrix products on the CPU are fastest at this size; more
would only take more memory (docs/internals/log/2026.md)."""


class LM:
    """A model with what the decoding loop needs to know of it.

    Attributes:
        weights: module with its parameters and its ``config``: the model, or a stand-in.
        name: the name in messages.
        vocab_size: V; logits beyond it (padding of the embedding matrix) are cut off, so they are never sampled.
        unknown_ids: tokens of the vocabulary that the model does not know; their logits are -10,000.
        token_ids: the tokens that its LM head has rows for, ascending, D numbers; None for all. Others get -10,000.
        own_ids: where the vocabulary is another one than the model's, the model's id of each token, -1 if it has none.
        context_len: maximum sequence length.
        device: the device of the first layer.
        dtype: the type of activations.
        num_shares: processes that share the model (tensor parallel); the others follow the first (system/ranks.py).
        execution: runs its steps.
        lock: held while the model runs in Python or is captured.
        least_columns: minimum width of a forward of a model with states: 2 if a single token gets other logits than
            the same token among several.
        is_stepped: call layers with states token by token, since they can continue from a state by one token only.
        native: runs the forwards in place of the model's own code (native/engine.py); None for the model.
    """

    twin_key: int | None = None
    TOLD = ("vocab_size", "unknown_ids", "own_ids", "token_ids", "context_len", "least_columns", "is_stepped")

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        vocab_size: int,
        context_len: int,
        unknown_ids: tuple[int, ...] = (),
        layer_shapes: Sequence[LayerShape] | None = None,
    ) -> None:
        """Take the cache shapes of each layer; None to find them by running the model. A head, which is no model by
        itself, states them."""
        self.weights: Any = model
        self.name = name
        self.vocab_size = vocab_size
        self.unknown_ids = unknown_ids
        self.own_ids: tuple[int, ...] = ()
        self.token_ids: Tensor | None = None
        self.context_len = context_len
        self.execution = EagerExecution()
        self.lock = threading.RLock()
        self.device = next(model.parameters()).device
        # Masks match the type of the activations: quantized weights are integers.
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.num_shares = tp_size_of(model)
        if layer_shapes is not None:
            self.layer_shapes = tuple(layer_shapes)
        self.least_columns = 1
        self.is_stepped = False
        self.native: Any | None = None

    @property
    def model(self) -> Any:
        """The model in its own code, built when first asked for if there is a stand-in."""
        return self.weights.original if isinstance(self.weights, StandIn) else self.weights

    @cached_property
    def visibility(self) -> Visibility:
        return Visibility.of(self.model)

    @cached_property
    def _cache_name(self) -> str:
        return cache_argument(self.model)

    def _with(self, **changes: Any) -> LM:
        """This model with other values of attributes. Weights and what was learned about it are shared."""
        lm = copy.copy(self)
        vars(lm).update(changes)
        return lm

    def with_execution(self, execution: EagerExecution) -> LM:
        return self._with(execution=execution)

    def with_name(self, name: str) -> LM:
        return self._with(name=name)

    def with_context(self, context_len: int) -> LM:
        """This model for sequences of at most ``context_len`` tokens."""
        return self._with(context_len=min(self.context_len, context_len))

    def with_vocabulary(self, vocab_size: int, unknown_ids: tuple[int, ...]) -> LM:
        """This model as the draft of a target with slightly different tokens. Ids that it does not know are fed as
        whatever it has there, the last one beyond its embedding: they change its q, and no output."""
        lm = self._with(vocab_size=vocab_size, unknown_ids=unknown_ids)
        vars(lm).pop("_unknown", None)
        return lm

    def with_tokens(self, own_ids: tuple[int, ...]) -> LM:
        """This model as the draft of a target with other tokens. Logits are those of the target's tokens; the ones that
        it lacks get -10,000. It is fed with these tokens, too, or with its own: V + i is its token i."""
        return self._with(vocab_size=len(own_ids), own_ids=own_ids)

    def uncaptured(self) -> LM:
        return self.with_execution(EagerExecution()) if self.execution.is_prepared else self

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        from outrider.runtime.cache_layers import layer_shapes  # which imports Transformers

        return layer_shapes(self.model, self.device)

    @cached_property
    def _unknown(self) -> Tensor:
        return torch.tensor(self.unknown_ids, device=self.device)

    @cached_property
    def _own(self) -> Tensor:
        """[V]"""
        return torch.tensor(self.own_ids, device=self.device)

    @cached_property
    def _fed(self) -> Tensor:
        """The model's ids of the tokens that it is fed with (``with_tokens``). [V + its own]"""
        num_own = len(self.weights.get_input_embeddings().weight)
        return torch.cat((self._own.clamp_min(0), torch.arange(num_own, device=self.device)))

    @cached_property
    def has_states(self) -> bool:
        """Whether layers have states from whose anchor tokens are fed again."""
        return any(state.is_fed_again for shape in self.layer_shapes for state in shape.states)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether layers have states that mix all earlier tokens, and so cannot be taken back."""
        return any(not state.width for shape in self.layer_shapes for state in shape.states)

    @cached_property
    def mixers(self) -> tuple[nn.Module, ...]:
        """Modules that update the states kept at an anchor."""
        if not self.has_states:
            return ()
        whole = copy.copy(self)
        whole.is_stepped = False
        cache = SlotCache.empty(self.layer_shapes, 1, 2)
        columns = torch.arange(2, device=self.device)[None]
        with self.lock, torch.inference_mode(), find_mixers(self.model, cache.state_layers) as found:
            whole._feed(torch.zeros_like(columns), columns, cache, 2)
        return tuple(found)

    def check_rollback(self, k: int) -> None:
        """Raises OptionError: k tokens cannot be rolled back."""
        states = [state for shape in self.layer_shapes for state in shape.states]
        is_replayed = any(state.kind == "replayed" for state in states)
        most = WINDOW - max((state.width for state in states), default=0) - (STRIDE if is_replayed else 0)
        if any(state.width for state in states) and k > most:
            remedy = f"{self.name} has layers whose inputs are kept for some tokens only: at most {most}"
            raise OptionError("num_draft_tokens", k, remedy)

    @in_all_processes
    def uncached(self, ids: Tensor, num_logits: int = 0) -> Tensor:
        """Logits of one forward of the model's own code without a cache. [B, T] -> [B, N, V], padding of V included

        Args:
            num_logits: N, the last ones; 0 for all.
        """
        logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=num_logits).logits
        return logits

    def new_cache(self, num_rows: int, capacity: int, *, is_sparse: bool = False) -> SlotCache:
        """Cache for ``num_rows`` sequences of at most ``capacity`` tokens (rounded up). Raises DeviceError: there is
        not enough memory.

        Args:
            is_sparse: little of it will be used (see ``SlotCache.empty``).
        """
        if self.num_shares > 1:
            check_equal(_fingerprint, self)
        return self._new_cache(num_rows, self.execution.round_length(capacity), is_sparse)

    @in_all_processes
    def _new_cache(self, num_rows: int, capacity: int, is_sparse: bool) -> SlotCache:
        if is_sparse:
            return SlotCache.empty(self.layer_shapes, num_rows, capacity, is_sparse=True)
        return together(lambda: self.execution.new_cache(self.layer_shapes, num_rows, capacity))

    def view_len(self, length: int, cache: SlotCache) -> int:
        """Places of a cache to view for sequences of ``length`` tokens: few distinct values, none beyond the context,
        since a model may hold tables of that length."""
        return min(self.execution.round_length(length), cache.capacity, self.context_len)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        num_logits: int = 0,
        keeps_finite: bool = False,
        spreads: bool = True,
    ) -> Tensor:
        """Logits after each token. Call without gradients: the cache is written in place.

        Args:
            ids: [B, T]
            positions: the positions of the tokens, -1 for padding (whose logits are meaningless). [B, T]
            cache: holds all tokens of lower position; this forward adds its own.
            view_len: above every position.
            num_logits: return the logits of the last ``num_logits`` columns only; 0 for all.
            spreads: else logits of ``token_ids`` only, if there are any.
            keeps_finite: for tokens that may be rejected. Keys, values and inputs of states are zeroed where they are
                not finite, so that they spoil neither earlier tokens nor those that replace them; the logits after such
                a token, and after all later ones, are NaN.

        A model with recurrent states starts from the anchors of its cache and feeds the tokens since then again. The
        anchors stay unless ``SlotCache.settle`` follows.

        Returns:
            [B, T, V]
        """
        given = ids, positions, cache, view_len, ()
        logits, _ = self.forward_with_features(
            *given, num_logits=num_logits, keeps_finite=keeps_finite, spreads=spreads
        )
        return logits

    @in_all_processes
    def forward_with_features(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        features: Sequence[int],
        *,
        num_logits: int = 0,
        keeps_finite: bool = False,
        spreads: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Logits as of ``forward`` [B, T, V], with the inputs of the layers ``features``, concatenated [B, T, F], None
        if none are wanted: 0 is the embedding, the number of layers the last output (before the final norm)."""
        device = ids.device
        ids, positions = ids.to(self.device), positions.to(self.device)
        columns = None
        if cache.has_states:
            cache.remember(ids, positions)
            width = cache.num_columns(positions, self.least_columns)
            columns = (positions - cache.anchors[:, None]).clamp_min(0)
            ids, positions = cache.from_anchors(positions.amax(dim=1), width)
        logits, states = self._feed(ids, positions, cache, view_len, features, columns, num_logits, keeps_finite)
        if columns is not None:
            states = {i: _take(state, columns) for i, state in states.items()}
        found = torch.cat([states[i].to(device) for i in features], dim=-1) if features else None
        if spreads and self.token_ids is not None:
            logits = spread(logits, self.token_ids, self.vocab_size)
        return logits.to(device), found

    def _feed(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        features: Sequence[int] = (),
        columns: Tensor | None = None,
        num_logits: int = 1,
        keeps_finite: bool = False,
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits of the last ``num_logits`` (0 for all) of ``columns`` (None for all, [B, T]); and hidden states of all
        columns, by the index of the feature."""
        if self.unknown_ids:
            ids = ids.clamp_max(len(self.weights.get_input_embeddings().weight) - 1)
        if self.own_ids:
            ids = self._fed[ids]
        if self.native is not None:
            with self.lock:
                given, number = (ids, positions, cache, view_len), num_logits or None
                results = self.native(*given, num_logits=number, features=features, keeps_finite=keeps_finite)
            parts = () if results.features is None else results.features.chunk(len(features), dim=-1)
            has_broken = results.broken is not None and bool(results.broken.any())
            cache.note_broken(results.broken if has_broken else None)
            logits = self._finished(results.logits, results.broken if has_broken else None, None)
            return logits, dict(zip(features, parts, strict=True))
        model = self.model
        wanted = None if columns is None else columns[:, -num_logits:]
        is_single = self.is_stepped or positions.shape[1] == 1
        cache.at(positions, view_len, is_single=is_single, keeps_finite=keeps_finite)
        # One forward at a time: hooks and captures change the model for all threads.
        with self.lock, recorded_states(model, features) as states, ExitStack() as stack:
            if self.is_stepped:
                stack.enter_context(token_by_token(self.mixers))
            if keeps_finite:
                stack.enter_context(with_finite_numbers(self.mixers, (len(ids), ids.shape[1]), cache.kept))
            if wanted is not None:
                # The LM head is often the largest product: compute it for the wanted columns only.
                num_logits = 0
                hook = model.get_output_embeddings().register_forward_pre_hook(
                    lambda _, arguments: (_take(arguments[0], wanted), *arguments[1:])
                )
                stack.callback(hook.remove)
            arguments: dict[str, Any] = {self._cache_name: cache.argument}
            kept: int | Tensor = num_logits
            if features and num_logits:  # given a number, Gemma 4 drops other columns before its last layers
                kept = torch.arange(ids.shape[1] - num_logits, ids.shape[1], device=ids.device)
            position_ids = positions.clamp_min(0)
            if cache.offsets is not None:
                position_ids = position_ids + cache.offsets[:, None]
            # A model without attention may take a mask for something else.
            has_mask = any(shape.num_heads for shape in self.layer_shapes)
            output = model(
                input_ids=ids,
                attention_mask=self.visibility.masks(positions, view_len, self.dtype) if has_mask else None,
                position_ids=position_ids,
                use_cache=True,
                logits_to_keep=kept,
                **arguments,
            )
        broken = cache.find_broken()
        return self._finished(output.logits, None if broken is None else any_process(broken), wanted), states

    def _finished(self, logits: Tensor, broken: Tensor | None, wanted: Tensor | None) -> Tensor:
        """Logits of the columns ``wanted`` [B, N], of the last ones if None; NaN from a broken token ([B, T]) on.
        [B, N, V]"""
        if self.own_ids and self.token_ids is None:
            own = self._own.to(logits.device)
            logits = logits.index_select(-1, own.clamp_min(0)).masked_fill(own < 0, UNKNOWN)
        if self.token_ids is None:
            logits = logits[..., : self.vocab_size]
        if self.unknown_ids and self.token_ids is None:
            logits = functional.pad(logits, (0, self.vocab_size - logits.shape[-1]))
            logits = logits.index_fill(-1, self._unknown.to(logits.device), UNKNOWN)
        if broken is not None:
            broken = broken.to(logits.device).cumsum(dim=1) > 0
            broken = broken[:, -logits.shape[1] :] if wanted is None else broken.gather(1, wanted)
            logits.masked_fill_(broken[..., None], torch.nan)
        return logits

    @in_all_processes
    @torch.inference_mode()
    def prefill(
        self,
        ids: Tensor,
        starts: Tensor,
        ends: Tensor,
        cache: SlotCache,
        *,
        latest: int,
        num_columns: int,
        features: Sequence[int] = (),
    ) -> Tensor | None:
        """Prefill: put the tokens starts <= position < ends of each row [B] into the cache, from a buffer whose column
        j holds the token at position j [B, N]. ``latest`` is at least ``starts``, and ``num_columns``, T, at least
        ``ends - starts`` (known on the host, which need not wait for the device).

        Returns:
            hidden states of ``features`` (see ``forward_with_features``; for at most PREFILL_TOKENS tokens), from the
            column ``starts`` on. [B, T, F]
        """
        most = max(1, PREFILL_TOKENS // len(ids))
        assert not features or num_columns <= most
        if cache.has_states:
            positions = starts[:, None] + torch.arange(num_columns, device=ids.device)
            tokens = ids.gather(1, positions.clamp_max(ids.shape[1] - 1))
            positions = torch.where(positions < ends[:, None], positions, -1)
            cache.remember(tokens.to(self.device), positions.to(self.device))
            parts = self._catch_up(cache, ends, most, EagerExecution(), features)
            return _by_position(parts, starts, num_columns) if features else None
        found = None
        for offset in range(0, num_columns, most):
            width = min(most, num_columns - offset)
            positions = starts[:, None] + torch.arange(offset, offset + width, device=ids.device)
            is_there = positions < ends[:, None]
            columns = positions.clamp_max(ids.shape[1] - 1)
            positions = torch.where(is_there, positions, -1)
            view_len = self.view_len(latest + offset + width, cache)
            tokens = ids.gather(1, columns)
            _, found = self.forward_with_features(tokens, positions, cache, view_len, features, num_logits=1)
        return found

    @in_all_processes
    @torch.inference_mode()
    def advance(self, cache: SlotCache, lengths: Tensor) -> None:
        """Before a round of a model with states: advance the states of rows that are STRIDE or more tokens behind the
        committed tokens that the cache has stored [B]; 0 leaves a row as it is. Synchronizes host and device."""
        most = STRIDE if self.execution.is_prepared else PREFILL_TOKENS // len(lengths)
        self._catch_up(cache, lengths, most, self.execution)

    def _catch_up(
        self,
        cache: SlotCache,
        lengths: Tensor,
        most: int,
        execution: EagerExecution,
        features: Sequence[int] = (),
    ) -> list[tuple[Tensor, ...]]:
        """Run forwards from the anchors over multiples of STRIDE, at most as wide as ``most`` or STRIDE, and keep their
        states. With ``features``, return positions and hidden states of the tokens fed, forward by forward; then the
        last tokens are fed, too, without keeping their states."""
        lengths = lengths.to(self.device)
        found: list[tuple[Tensor, ...]] = []
        while True:
            behind = [(at, n - at) for at, n in zip(cache.anchors.tolist(), lengths.tolist(), strict=True)]
            late = [(at, num) for at, num in behind if num >= STRIDE]
            if not late:
                break
            # As many as the nearest of these rows can keep, so that none is padded.
            width = max(1, min(most, min(num for _, num in late)) // STRIDE) * STRIDE
            view_len = self.view_len(max(at for at, _ in late) + width, cache)
            step = AdvanceStep(width, view_len, tuple(features), is_kept=True)
            found.append(execution.run(step, self, cache=cache, lengths=lengths))
        furthest = max(num for _, num in behind)
        cache.bound = STRIDE - 1 if furthest > 0 else 0  # few distinct values
        if features and furthest > 0:
            view_len = self.view_len(max(at for at, _ in behind) + furthest, cache)
            step = AdvanceStep(max(furthest, self.least_columns), view_len, tuple(features), is_kept=False)
            found.append(execution.run(step, self, cache=cache, lengths=lengths))
        return found


def _fingerprint(lm: LM) -> int:
    """Checksum of weights that all processes have whole: norms."""
    whole = [one.tolist() for one in lm.model.parameters() if one.ndim == 1 and not is_shared(one)]
    return zlib.crc32(repr((torch.__version__, whole)).encode())


@dataclass(frozen=True, slots=True)
class AdvanceStep:
    """Feed tokens from the anchors on; if ``is_kept``, only rows at least ``width`` tokens behind, whose states are
    kept. Returns the positions of the tokens fed, -1 for padding [B, W], and any hidden states [B, W, F]."""

    width: int
    view_len: int
    features: tuple[int, ...]
    is_kept: bool

    def __call__(self, lm: LM, cache: SlotCache, lengths: Tensor) -> tuple[Tensor, ...]:
        lasts = torch.minimum(cache.anchors + self.width, lengths) - 1
        if self.is_kept:
            lasts = torch.where(lengths - cache.anchors >= self.width, lasts, -1)
        ids, positions = cache.from_anchors(lasts, self.width)
        _, states = lm._feed(ids, positions, cache, self.view_len, self.features)
        if self.is_kept:
            cache.settle(lengths)
        if not self.features:
            return (positions,)
        return positions, torch.cat([states[i].to(ids.device) for i in self.features], dim=-1)


def _by_position(found: Sequence[tuple[Tensor, ...]], starts: Tensor, num_columns: int) -> Tensor | None:
    """Hidden states of the tokens from the column ``starts`` on, of several forwards with positions [B, W] and states
    [B, W, F]. [B, num_columns, F]; None if nothing was fed."""
    if not found:
        return None
    results = found[0][1].new_zeros(len(starts), num_columns + 1, found[0][1].shape[-1])
    for positions, states in found:
        columns = positions - starts[:, None].to(positions.device)
        columns = torch.where((columns >= 0) & (columns < num_columns), columns, num_columns)
        results.scatter_(1, columns[..., None].expand_as(states), states)
    return results[:, :num_columns].to(starts.device)


def _take(values: Tensor, columns: Tensor) -> Tensor:
    """Gather columns of each row: [B, W, D], [B, T] -> [B, T, D]"""
    return values.gather(1, columns[..., None].expand(-1, -1, values.shape[-1]).to(values.device))
