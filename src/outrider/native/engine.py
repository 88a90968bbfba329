"""The native forward of a model: a call of the C++ library with the structure of its plan.

The weights are those of a module of Transformers, as they are stored (kernels/narrow_weight.py). The module keeps them
alive, and may run beside.
"""

from __future__ import annotations

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
from outrider.native.families import plan_of
from outrider.native.model_structure import cache_shapes, model_structure
from outrider.native.plan import NotPlanned, Plan
from outrider.native.team import Team
from outrider.native.weights import Weights
from outrider.runtime.cache import SlotCache
from outrider.runtime.execution import NativeResults
from outrider.runtime.stand_in import StandIn
from outrider.system.resources import memory_errors

_KEPT = {torch.float32, torch.bfloat16}  # types of keys and values
_FEW_TOKENS, _SIMILAR_PLACES = 64, 512  # forwards whose times are compared


class NativeForward:
    """Forwards of one model on the CPU.

    Attributes:
        vocab_size: V, rows of the head.
        width: the width of hidden states.
        layer_shapes: the shapes of a cache's layers.
    """

    @memory_errors()
    def __init__(self, model: Any, plan: Plan | None = None) -> None:
        """Take a module of Transformers, in float32, a stand-in for one, or a head with its plan. Raises NotPlanned:
        its family, its configuration or the form of its weights is not known here."""
        kernels = library()
        if kernels is None:
            raise NotPlanned("the native library cannot be compiled here")
        self._run = kernels.outrider_forward
        is_head = plan is not None
        if plan is None:
            plan = model.plan if isinstance(model, StandIn) else plan_of(model.config)
        weights = Weights(model.state_dict(keep_vars=True))
        self._weights = weights  # which keeps them alive
        self._model = model_structure(plan, weights)
        weights.check("layers." if is_head else "")  # other parameters of a head run elsewhere
        self.vocab_size = int(self._model.head.num_channels)
        self.width = int(self._model.hidden)
        scratch_bytes = c_int64()
        kernels.outrider_forward_bytes(byref(self._model), torch.get_num_threads(), byref(scratch_bytes))
        first, *others = cache_shapes(plan)
        self.layer_shapes = replace(first, scratch_bytes=scratch_bytes.value), *others
        self._team = Team()
        self._stores: WeakKeyDictionary[SlotCache, Any] = WeakKeyDictionary()

    @memory_errors()
    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> NativeResults:
        """Run a forward; other arguments are those of ``LM.forward_with_features``. Results of padding are zeros.
        ``num_logits`` are the last columns N whose logits are wanted, None for all; ``features`` the layers whose
        inputs are wanted, the number of layers for the last output, one more for its norm; ``states`` those of the
        target's tokens, for a head that reads them [B, T, H]. Raises IndexError: an id or a place is not there; or
        DeviceError: there is not enough memory."""
        (num_rows, num_columns), num_wanted = ids.shape, ids.shape[1] if num_logits is None else num_logits
        ids, places = ids.contiguous(), places.contiguous()
        check(ids.dtype == places.dtype == torch.long and ids.shape == places.shape, "ids and places [B, T], int64")
        check(num_wanted <= num_columns, "no more logits than columns")
        check((states is None) == (not self._model.joint.is_there), "states for a head, and for nothing else")
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
        size = self._team.size(num_threads)
        begin_s = time.perf_counter()
        if not self._run(byref(self._model), byref(batch), size):
            raise IndexError("a token id or a position is out of range")
        if ids.numel() <= _FEW_TOKENS:
            kind = ids.numel(), num_wanted, view_len // _SIMILAR_PLACES
            self._team.learn(kind, size, num_threads, time.perf_counter() - begin_s)
        return NativeResults(logits, found, broken)

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
            num_kept = 2 * sum(shape.num_heads > 0 for shape in self.layer_shapes)
            kept, states = cache.storage[:num_kept], cache.storage[cache.num_token_stores :]
            rows = len(cache.storage[0]) if cache.storage else 0
            owners = [shape for shape in self.layer_shapes if shape.num_heads]
            sizes: list[tuple[int, ...]] = [
                (cache.capacity + 1, one.num_heads, one.key_dim) for one in owners for _ in range(2)
            ]
            sizes += [state.size for shape in self.layer_shapes for state in shape.states]
            found_sizes = [tuple(store.shape) for store in (*kept, *states[: len(sizes) - num_kept])]
            check(found_sizes == [(rows, *size) for size in sizes], "a cache of the model's own shapes")
            check(all(store.is_contiguous() for store in (*kept, *states)), "a contiguous cache")
            check({one.dtype for one in kept} <= {kept[0].dtype} & _KEPT if kept else True, "float32 or bfloat16")
            addresses = (c_void_p * (num_kept + len(states)))(*(store.data_ptr() for store in (*kept, *states)))
            bits = 8 * kept[0].itemsize if kept else 32
            found = self._stores[cache] = addresses, bits, cache.capacity + 1, rows
        return found
