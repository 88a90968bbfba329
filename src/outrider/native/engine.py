"""The native forward of a model: a call of the C++ library with the structure of its plan.

The weights are those of a planned model, or of a module of Transformers, which may run beside; as they are stored
(kernels/narrow_weight.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.kernels.library import check, library
from outrider.kernels.structures import native
from outrider.native.model_structure import cache_shapes, model_structure
from outrider.native.plan import NotPlanned, Plan
from outrider.native.planned_model import PlannedModel
from outrider.native.team import Team
from outrider.native.weights import Weights
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import LayerShape
from outrider.runtime.forward import Results
from outrider.system.resources import memory_errors

_KEPT = {torch.float32, torch.bfloat16}  # types of keys and values
_FEW_TOKENS, _SIMILAR_PLACES = 64, 512  # forwards whose times are compared


class NativeForward:
    """Forwards of one model on the CPU. Attributes as of ``Forward``; ``width`` is that of hidden states."""

    device, dtype, num_shares = torch.device("cpu"), torch.float32, 1
    is_stepped, is_batch_invariant = False, True

    @memory_errors()
    def __init__(self, model: Any, plan: Plan, *, is_part: bool = False) -> None:
        """Take a planned model, or a module of Transformers in float32, and its plan; with ``is_part`` the plan is that
        of a head's layers, and its other parameters run elsewhere. Raises NotPlanned: the form of its weights is not
        known here."""
        kernels = library()
        if kernels is None:
            raise NotPlanned("the native library cannot be compiled here")
        self._run = kernels.outrider_forward
        weights = Weights(model.state_dict(keep_vars=True))
        self.weights, self._kept = model, weights  # which keeps them alive
        self.lock = threading.RLock()
        self._model = model_structure(plan, weights)
        weights.check("layers." if is_part else "")
        self.vocab_size, self.num_embedded = (
            int(one.num_channels) for one in (self._model.lm_head, self._model.embedding)
        )
        self.width = int(self._model.hidden)
        scratch_bytes = c_int64()
        kernels.outrider_forward_bytes(byref(self._model), torch.get_num_threads(), byref(scratch_bytes))
        first, *others = cache_shapes(plan)
        self._shapes = replace(first, scratch_bytes=scratch_bytes.value), *others
        self.layer_shapes: tuple[LayerShape, ...] = self._shapes  # those of a head have more
        self._team = Team()
        self._stores: WeakKeyDictionary[SlotCache, Any] = WeakKeyDictionary()

    @property
    def model(self) -> Any:
        return self.weights.module if isinstance(self.weights, PlannedModel) else self.weights

    @memory_errors()
    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        columns: Tensor | None = None,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> Results:
        """Run a forward, as ``Forward`` has it. Results of padding are zeros. Raises IndexError: an id or a position is
        not there; or DeviceError: there is not enough memory."""
        check(columns is None, "no columns, since no state is fed again")
        (num_rows, num_columns), num_wanted = ids.shape, ids.shape[1] if num_logits is None else num_logits
        ids, places = ids.contiguous(), positions.contiguous()
        check(ids.dtype == places.dtype == torch.long and ids.shape == places.shape, "ids and places [B, T], int64")
        check(num_wanted <= num_columns, "no more logits than columns")
        check((states is None) == (not self._model.draft_input.is_there), "states for a head, and for nothing else")
        if states is not None:
            states = states.contiguous()
            check(
                states.dtype == torch.float32 and states.shape == (*ids.shape, self.width), "states [B, T, H], float32"
            )
        stores, bits, row_places, most_rows = self._stores_of(cache)
        check(num_rows <= most_rows, "no more rows than the cache has")
        offsets, anchors = cache.offsets, cache.anchors if cache.has_anchors else None
        logits = torch.empty(num_rows, num_wanted, self.vocab_size)
        found = torch.empty(num_rows, num_columns, len(features) * self.width) if features else None
        broken = torch.empty(num_rows, num_columns, dtype=torch.bool) if keeps_finite else None
        layers = (c_int64 * len(features))(*features)
        batch = native().Batch(
            *(num_rows, num_columns, ids.data_ptr(), places.data_ptr()),
            *(None if one is None else one.data_ptr() for one in (states, offsets)),
            *(addressof(stores), None if anchors is None else anchors.data_ptr(), cache.is_ahead, not keeps_finite),
            *(bits, row_places),
            *(num_wanted, logits.data_ptr(), len(features), addressof(layers)),
            *(None if found is None else found.data_ptr(), None if broken is None else broken.data_ptr()),
        )
        num_threads = torch.get_num_threads()
        with self.lock:
            size = self._team.size(num_threads)
            begin_s = time.perf_counter()
            if not self._run(byref(self._model), byref(batch), size):
                raise IndexError("a token id or a position is out of range")
            if ids.numel() <= _FEW_TOKENS:
                kind = ids.numel(), num_wanted, view_len // _SIMILAR_PLACES
                self._team.learn(kind, size, num_threads, time.perf_counter() - begin_s)
        broken = broken if broken is not None and bool(broken.any()) else None
        cache.broken = broken
        return Results(logits, () if found is None else found.chunk(len(features), dim=-1), broken)

    @contextmanager
    def without_rounding(self) -> Iterator[None]:
        """Multiply rows of float32 with blocks for a while."""
        num_digits = self._model.num_digits
        try:
            self._model.num_digits = 0
            yield
        finally:
            self._model.num_digits = num_digits

    def _stores_of(self, cache: SlotCache) -> Any:
        found = self._stores.get(cache)
        if found is None:
            num_kept = 2 * sum(shape.num_heads > 0 for shape in self._shapes)
            kept, states = cache.storage[:num_kept], cache.storage[cache.num_token_stores :]
            rows = len(cache.storage[0]) if cache.storage else 0
            owners = [shape for shape in self._shapes if shape.num_heads]
            sizes: list[tuple[int, ...]] = [
                (cache.capacity + 1, one.num_heads, one.key_dim) for one in owners for _ in range(2)
            ]
            sizes += [state.size for shape in self._shapes for state in shape.states]
            found_sizes = [tuple(store.shape) for store in (*kept, *states[: len(sizes) - num_kept])]
            check(found_sizes == [(rows, *size) for size in sizes], "a cache of the model's own shapes")
            check(all(store.is_contiguous() for store in (*kept, *states)), "a contiguous cache")
            check({one.dtype for one in kept} <= {kept[0].dtype} & _KEPT if kept else True, "float32 or bfloat16")
            addresses = (c_void_p * (num_kept + len(states)))(*(store.data_ptr() for store in (*kept, *states)))
            bits = 8 * kept[0].itemsize if kept else 32
            found = self._stores[cache] = addresses, bits, cache.capacity + 1, rows
        return found
