"""Predict a model's memory from its configuration alone: nothing is loaded.

The model is built of fake tensors, which have shapes and types but no data. The loop's own steps run on them: a chunk
of prefill, and a verify. The peak beyond weights and cache is what a step needs. Memory inside kernels and that of the
process itself are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outrider.decoding.verify import verify_step
from outrider.errors import OptionError
from outrider.models.cpu_weights import narrow_weights
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.loading import context_len
from outrider.models.memory import skeleton, weights_bytes
from outrider.models.reading import read_config
from outrider.models.registry import ModelSpec
from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM, PREFILL_TOKENS
from outrider.runtime.shape_buckets import eager_length, prepared_length
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.probs import Settings, to_probs
from outrider.sampling.rules import RULES


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload to predict memory for.

    Attributes:
        context: tokens per row, prompt and output together.
        num_rows: batch size.
        k: drafted tokens.
        is_prepared: captured, which rounds the cache length to a power of two.
    """

    context: int
    num_rows: int
    k: int
    is_prepared: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on each device, or in each process of tensor parallelism.

    Attributes:
        weights: with buffers and, if quantized, scales.
        cache: keys and values of all rows, and states.
        prefill: peak of a prefill forward, of at most PREFILL_TOKENS tokens in one row or several.
        verify: peak of a verify: activations, logits, and probabilities of K + 1 tokens in each row. (A CUDA graph
            takes the same once more, in a pool shared by all graphs.) Both are None for models whose forward depends
            on data, such as some mixtures of experts, and for heads, whose steps take less than their target's.
    """

    weights: int
    cache: int
    prefill: int | None
    verify: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache + max(self.prefill or 0, self.verify or 0)


class Predictor:
    """Predicts the memory of one model and workload, for any quantization and tensor parallelism.

    Args:
        config: Hugging Face configuration.
        dtype: of the arithmetic.
        kept: storage type of large matrices, if narrower (see ``kept_type``).

    Raises:
        OptionError: the context is longer than the model's.
    """

    def __init__(
        self,
        config: Any,
        work: Workload,
        dtype: torch.dtype,
        kept: torch.dtype | None = None,
    ) -> None:
        longest = context_len(config)
        if work.context > longest:
            raise OptionError("context", work.context, f"this model accepts {longest} tokens")
        with FakeTensorMode(), torch.inference_mode():
            self._plain = self._kept = skeleton(config, dtype)
            if kept is not None:
                self._kept = skeleton(config, dtype)
                narrow_weights(self._kept, kept)
            width = config.get_text_config(decoder=True).vocab_size
            lm = LM(self._kept, name=config.model_type, vocab_size=width, context_len=longest)
            length = prepared_length(work.context) if work.is_prepared else eager_length(work.context)
            cache = SlotCache.empty(lm.layer_shapes, work.num_rows, length)
            self._cache = sum(store.nbytes for store in cache.storage)
            # Shapes follow from bounds, as in captured steps, since there is no data.
            # One long prompt has the most activations, many short ones attend to the most keys.
            shapes = {1, min(work.num_rows, PREFILL_TOKENS)}
            needed = [_most_at_a_time(_prefill(lm, cache.on(cache.storage), n, work.context)) for n in shapes]
            self._prefill = max((most for most in needed if most is not None), default=None)
            self._verify = _most_at_a_time(_verify(lm, cache.on(cache.storage), work))

    def memory(self, quantization: str = "none", parallel: int = 1) -> Memory:
        """Predict for one quantization and degree of parallelism.

        Args:
            quantization: "none", or one of QUANTIZATIONS.
            parallel: tensor-parallel processes; the result is for one of them. Its steps are predicted as if it
                worked alone, since the largest tensors of a step are not sharded.
        """
        model = self._kept if quantization in ("none", "int4") and parallel == 1 else self._plain
        weights = weights_bytes(model, quantization, parallel)
        return Memory(weights, self._cache // parallel, self._prefill, self._verify)


def head_memory(
    spec: ModelSpec | None, target: ModelSpec, work: Workload, dtype: torch.dtype, *, allow_pickle: bool = False
) -> Memory:
    """Predict the memory of a head beside its target: weights of its own, and its cache. Its checkpoint is read; the
    target is a skeleton, so that an embedding in the checkpoint counts even if it is the target's.

    Args:
        spec: of the head; None for the MTP layer of the target's checkpoint.
        dtype: of the target.

    Raises:
        ModelError: it does not fit the target.
    """
    config = read_config(target)
    with torch.device("meta"):
        bare = skeleton(config, dtype)
    width = config.get_text_config(decoder=True).vocab_size
    lm = LM(bare, name=target.name, vocab_size=width, context_len=context_len(config))
    load = load_mtp_of if spec is None else partial(load_head, spec)
    head = load(lm, allow_pickle=allow_pickle)
    borrowed = {id(tensor) for tensor in _tensors(bare)}
    weights = {id(tensor): tensor.nbytes for tensor in _tensors(head.model) if id(tensor) not in borrowed}
    module: Any = head.model
    num_beyond: int = module.block_size
    capacity = work.context + num_beyond
    length = prepared_length(capacity) if work.is_prepared else eager_length(capacity)
    cache = SlotCache.empty(head.layer_shapes, work.num_rows, length)
    return Memory(sum(weights.values()), sum(store.nbytes for store in cache.storage), None, None)


def _tensors(model: torch.nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _prefill(lm: LM, cache: SlotCache, num_rows: int, context: int) -> Callable[[], Any]:
    """Forward of the last chunk of prompts."""
    width = min(PREFILL_TOKENS // num_rows, context)
    positions = torch.arange(context - width, context).expand(num_rows, -1)
    ids = torch.zeros_like(positions)
    rows, view_len = cache.rows(0, num_rows), lm.view_len(context, cache)
    return lambda: lm.forward(ids, positions, rows, view_len, num_logits=1)


def _verify(lm: LM, cache: SlotCache, work: Workload) -> Callable[[], Any]:
    rows, k = work.num_rows, work.k
    rule = RULES["block"]
    ids = torch.zeros(rows, dtype=torch.long)
    lengths, k_of_rows = ids + work.context - k - 1, ids + k
    settings = Settings.neutral(rows, ids.device)
    q = to_probs(torch.zeros(rows, k, lm.vocab_size, dtype=lm.dtype), settings)
    draft = Draft(torch.zeros(rows, k, dtype=torch.long), q, k_of_rows)
    noise = rule.make_noise(ids, lengths, k, lm.vocab_size)
    view_len = lm.view_len(work.context, cache)
    arguments = (cache, ids[:, None].expand(-1, 2), lengths, lengths + k + 1, draft, settings, NO_HISTORY, None, noise)
    return lambda: verify_step(lm, rule, view_len, (), *arguments)


def _most_at_a_time(step: Callable[[], Any]) -> int | None:
    """Peak bytes of the tensors that the step allocates; None if its shapes depend on data."""
    try:
        allocations = _Allocations()
        with allocations:
            step()
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None
    return allocations.most


class _Allocations(TorchDispatchMode):
    """Tracks the peak of the memory alive after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:  # neither a view nor in place
                storage = leaf.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: item for key, item in self._alive.items() if not item[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._alive.values()))
        return result
