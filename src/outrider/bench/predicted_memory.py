"""Predict a model's memory from its configuration alone: nothing is loaded. Weights, and the cache of a workload."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch

from outrider.errors import OptionError
from outrider.models.cpu_weights import narrow_weights
from outrider.models.loading import context_len
from outrider.models.memory import skeleton, weights_bytes
from outrider.native.families import plan_of
from outrider.native.model_structure import cache_shapes
from outrider.native.plan import NotPlanned
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.shape_buckets import eager_length


class Memory(NamedTuple):
    """Bytes on each device, or in each process of tensor parallelism.

    Attributes:
        weights: with buffers and, if quantized, scales.
        cache: keys and values of all rows, and states.
    """

    weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.weights + self.cache


class Predictor:
    """Predicts the memory of one model and workload, for any quantization and tensor parallelism.

    Args:
        config: Hugging Face configuration.
        context: tokens per row, prompt and output together.
        num_rows: batch size.
        dtype: of the arithmetic.
        kept: storage type of large matrices, if narrower (see ``kept_type``).
        is_native: the native engine runs the models that it knows; its states have other shapes.

    Raises:
        OptionError: the context is longer than the model's.
    """

    def __init__(
        self,
        config: Any,
        context: int,
        num_rows: int,
        dtype: torch.dtype,
        kept: torch.dtype | None = None,
        *,
        is_native: bool = False,
    ) -> None:
        longest = context_len(config)
        if context > longest:
            raise OptionError("context", context, f"this model accepts {longest} tokens")
        with torch.device("meta"):
            self._plain = self._kept = skeleton(config, dtype)
            if kept is not None:
                self._kept = skeleton(config, dtype)
                narrow_weights(self._kept, kept)
        width = config.get_text_config(decoder=True).vocab_size
        lm = LM(self._kept, name=config.model_type, vocab_size=width, context_len=longest)
        shapes = lm.layer_shapes
        if is_native:
            with suppress(NotPlanned):
                shapes = cache_shapes(plan_of(config))
        cache = SlotCache.empty(shapes, num_rows, eager_length(context))
        self._cache = sum(store.nbytes for store in cache.storage)

    def memory(self, quantization: str = "none", parallel: int = 1) -> Memory:
        """Predict for one quantization and degree of parallelism.

        Args:
            quantization: "none", or one of QUANTIZATIONS.
            parallel: tensor-parallel processes; the result is for one of them.
        """
        model = self._kept if quantization in ("none", "int4") and parallel == 1 else self._plain
        return Memory(weights_bytes(model, quantization, parallel), self._cache // parallel)
