"""LM: a causal language model as a function from tokens at positions to logits.

    logits = lm.forward(ids, positions, cache, view_len)

A ``Forward`` runs the model (forward.py). This module adds the vocabulary, prefill, and, for models with recurrent
states, the forward from the anchors of the cache to the new tokens. Its execution decides how steps are run (directly
or captured). It does not know sampling, drafts or text, nor where a model comes from.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.errors import OptionError
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW, LayerShape
from outrider.runtime.execution import EagerExecution, Execution
from outrider.runtime.forward import Forward
from outrider.runtime.transformers_forward import take_columns
from outrider.runtime.vocabulary import UNKNOWN, spread
from outrider.runtime.weight_tensors import is_shared
from outrider.system.ranks import check_equal, in_all_processes, together

PROMISED = "promised"
OF_IMAGES = "not promised (images)"  # which the model's own code reads
PREFILL_TOKENS = 1024
"""Maximum prompt tokens in one forward, all rows together. Matrix products on the CPU are fastest at this size; more
would only take more memory (docs/internals/log/2026.md)."""


class LM:
    """A model with what the decoding loop needs to know of it."""

    twin_key: int | None = None
    TOLD = ("vocab_size", "unknown_ids", "own_ids", "token_ids", "context_len", "least_columns", "is_stepped")

    def __init__(
        self, backend: Forward, *, name: str, vocab_size: int, context_len: int, unknown_ids: tuple[int, ...] = ()
    ) -> None:
        self.backend = backend
        self.name = name  # in messages
        # V; logits beyond it (padding of the embedding matrix) are cut off, so they are never sampled.
        self.vocab_size = vocab_size
        self.unknown_ids = unknown_ids  # tokens that the model does not know; their logits are -10,000
        # Where the vocabulary is another one than the model's, the model's id of each token, -1 if it has none.
        self.own_ids: tuple[int, ...] = ()
        # The tokens that its LM head has rows for, ascending, D numbers; None for all. Others get -10,000.
        self.token_ids: Tensor | None = None
        self.context_len = context_len  # maximum sequence length
        self.execution: Execution = EagerExecution()  # runs its steps
        # The device of the first layer, the type of activations, and the number of processes that share the model
        # (tensor parallel): the others follow the first (system/ranks.py).
        self.device, self.dtype, self.num_shares = backend.device, backend.dtype, backend.num_shares
        # Minimum width of a forward of a model with states: 2 if a single token gets other logits than among several.
        self.least_columns = 1

    @property
    def model(self) -> Any:
        """The model in Transformers' code, built when first asked for if another backend runs it."""
        return self.backend.model

    @property
    def weights(self) -> Any:
        return self.backend.weights

    @property
    def lock(self) -> Any:
        return self.backend.lock

    @property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        return self.backend.layer_shapes

    @property
    def same_bytes(self) -> str:
        """PROMISED, or the reason why not. For text; see OF_IMAGES."""
        return promise(self.execution.name, self.backend.is_batch_invariant)

    @property
    def is_stepped(self) -> bool:
        return self.backend.is_stepped

    @is_stepped.setter
    def is_stepped(self, value: bool) -> None:
        self.backend.is_stepped = value

    def _with(self, **changes: Any) -> LM:
        """This model with other values of attributes. Weights and what was learned about it are shared."""
        lm = copy.copy(self)
        for name in ("has_states", "is_recurrent"):  # of the shapes of another backend, perhaps
            vars(lm).pop(name, None)
        vars(lm).update(changes)
        return lm

    def with_backend(self, backend: Forward) -> LM:
        return self._with(backend=backend)

    def with_execution(self, execution: Execution) -> LM:
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
    def _unknown(self) -> Tensor:
        return torch.tensor(self.unknown_ids, device=self.device)

    @cached_property
    def _own(self) -> Tensor:
        """[V]"""
        return torch.tensor(self.own_ids, device=self.device)

    @cached_property
    def _fed(self) -> Tensor:
        """The model's ids of the tokens that it is fed with (``with_tokens``). [V + its own]"""
        return torch.cat((self._own.clamp_min(0), torch.arange(self.backend.num_embedded, device=self.device)))

    @cached_property
    def has_states(self) -> bool:
        """Whether layers have states from whose anchor tokens are fed again."""
        return any(state.is_fed_again for shape in self.layer_shapes for state in shape.states)

    @cached_property
    def is_recurrent(self) -> bool:
        """Whether layers have states that mix all earlier tokens, and so cannot be taken back."""
        return any(not state.width for shape in self.layer_shapes for state in shape.states)

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
        """Logits of one forward of the model's own code without a cache, the last ``num_logits``; 0 for all.
        [B, T] -> [B, N, V], padding of V included"""
        logits: Tensor = self.model(input_ids=ids, use_cache=False, logits_to_keep=num_logits).logits
        return logits

    def new_cache(self, num_rows: int, capacity: int, *, is_sparse: bool = False) -> SlotCache:
        """Cache for ``num_rows`` sequences of at most ``capacity`` tokens (rounded up), of which little will be used if
        ``is_sparse`` (see ``SlotCache.empty``). Raises DeviceError: there is not enough memory."""
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
            states = tuple(take_columns(state, columns) for state in states)
        found = torch.cat([state.to(device) for state in states], dim=-1) if features else None
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
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits of the last ``num_logits`` (0 for all) of ``columns`` (None for all, [B, T]); and hidden states of all
        columns, of each feature."""
        if self.unknown_ids:
            ids = ids.clamp_max(self.backend.num_embedded - 1)
        if self.own_ids:
            ids = self._fed[ids]
        results = self.backend(
            *(ids, positions, cache, view_len),
            columns=columns,
            num_logits=num_logits or None,
            features=features,
            keeps_finite=keeps_finite,
        )
        wanted = None if columns is None else columns[:, -num_logits:]
        return self._finished(results.logits, results.broken, wanted), results.features

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
        ``ends - starts`` (known on the host, which need not wait for the device). Returns the hidden states of
        ``features`` (see ``forward_with_features``; for at most PREFILL_TOKENS tokens), from the column ``starts`` on.
        [B, T, F]"""
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
        self, cache: SlotCache, lengths: Tensor, most: int, execution: Execution, features: Sequence[int] = ()
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


def promise(execution: str, is_batch_invariant: bool) -> str:
    """Whether the same bytes are promised: PROMISED, or the reason why not."""
    return PROMISED if is_batch_invariant else f"not promised ({execution})"


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
        return positions, torch.cat([state.to(ids.device) for state in states], dim=-1)


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
