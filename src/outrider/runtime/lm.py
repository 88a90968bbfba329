"""LM: one causal language model, seen as a function from tokens at positions to logits.

    logits = lm.forward(ids, positions, cache, view_len)

The model itself is Hugging Face's own modelling code. What is added here is the mask (made from positions alone, since
place and position are one in a SlotCache) and the width of the vocabulary. How steps are run (eager, compiled,
captured) is decided by its execution. This module does not know sampling, drafts or text, nor where a model
comes from.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from outrider.errors import CompileError
from outrider.runtime.cache import LayerShape, SlotCache, layer_shapes
from outrider.runtime.captured import Captured
from outrider.runtime.compiled import Compiled
from outrider.runtime.execution import Eager, Execution, Step

PREFILL_COLUMNS = 512  # tokens per row in one forward of a long prompt; bounds the memory of activations and masks


class LM:
    """A model with what the loop needs to know of it.

    Attributes:
        name: for messages.
        vocab_size: V; logits beyond it (padding of the embedding matrix) are cut off, so they are never sampled.
        context_len: most tokens in a sequence.
        device: where its first layer is.
        dtype: of its activations.
        num_shares: processes that share the model (tensor parallel); each runs the same forwards.
        execution: runs its steps.
        lock: held while the model runs in Python, or is traced; compiled programs need it not.
    """

    def __init__(self, model: nn.Module, *, name: str, vocab_size: int, context_len: int) -> None:
        self.model = model
        self.name = name
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.execution: Execution = Eager()
        self.lock = threading.RLock()
        self.device = next(model.parameters()).device
        # Quantized weights are whole numbers; what masks must match is the type of the activations.
        self.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.num_shares: int = getattr(model, "tp_size", None) or 1
        config: Any = model.config
        text_config = config.get_text_config(decoder=True)
        self._window: int | None = getattr(text_config, "sliding_window", None)
        # Models with both kinds of layers take a dict of masks, by kind; the others take one tensor.
        layer_types = set(getattr(text_config, "layer_types", None) or ())
        if not layer_types:
            is_windowed = self._window is not None and _makes_windows(model)
            layer_types = {"sliding_attention" if is_windowed else "full_attention"}
        self._layer_types = tuple(sorted(layer_types))

    def compiled(self) -> LM:
        """The same model, its steps compiled (on a CUDA device: captured) when they are first run. The weights are
        shared.

        Raises:
            CompileError: several processes share the model.
        """
        if self.num_shares > 1 and self.device.type != "cuda":
            raise CompileError(
                f"{self.name} cannot be compiled: it is shared by {self.num_shares} processes, and torch.export cannot "
                "trace the sums over their shares (leave out --compile)"
            )
        lm = copy.copy(self)  # with what was found out about the model
        lm.execution = Captured() if self.device.type == "cuda" else Compiled()
        return lm

    def eager(self) -> LM:
        """The same model, its steps run as they are written. The weights are shared."""
        lm = copy.copy(self)
        lm.execution = Eager()
        return lm

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """What each layer keeps of a token."""
        return layer_shapes(self.model, self.device)

    def new_cache(self, num_rows: int, capacity: int) -> SlotCache:
        """A cache for ``num_rows`` sequences of at most ``capacity`` tokens (rounded up).

        Raises:
            DeviceError: there is no room for it.
        """
        return self.execution.new_cache(self.layer_shapes, num_rows, self.execution.round_length(capacity))

    def view_len(self, length: int, cache: SlotCache) -> int:
        """How many places of a cache to view for sequences of ``length`` tokens: few different numbers."""
        return min(self.execution.round_length(length), cache.capacity)

    def run(self, step: Step, static: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, ...]:
        """``step(self, *static, *arguments)``, in the way of this LM's execution (see there)."""
        return self.execution.run(step, self, static, arguments)

    def forward(
        self, ids: Tensor, positions: Tensor, cache: SlotCache, view_len: int, *, num_logits: int = 0
    ) -> Tensor:
        """Logits after each token. To be called without gradients: the cache is written in place.

        Args:
            ids: [B, T]
            positions: of the tokens, -1 for padding (whose logits mean nothing). [B, T]
            cache: holds all tokens of lower position; this forward adds its own.
            view_len: above every position.
            num_logits: give the logits of the last ``num_logits`` columns only; 0 for all.

        Returns:
            [B, T, V]
        """
        return self.forward_with_features(ids, positions, cache, view_len, (), num_logits=num_logits)[0]

    def forward_with_features(
        self,
        ids: Tensor,
        positions: Tensor,
        cache: SlotCache,
        view_len: int,
        features: Sequence[int],
        *,
        num_logits: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """The same, with hidden states of the model.

        Args:
            features: layers whose input is wanted: 0 is the embedding, the number of layers the last output (before
                the final norm).

        Returns:
            logits [B, T, V], and the hidden states of ``features`` side by side [B, T, F], None where none are wanted
        """
        device = ids.device
        ids, positions = ids.to(self.device), positions.to(self.device)
        cache.at(positions, view_len)
        # One forward at a time: hooks, and the tracing of a program, change the model for all threads.
        with self.lock, _hidden_states(self.model, features) as states:
            output = self.model(
                input_ids=ids,
                attention_mask=self._mask(positions, view_len),
                position_ids=positions.clamp_min(0),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=num_logits,
            )
        logits: Tensor = output.logits[..., : self.vocab_size]
        found = torch.cat([states[i].to(device) for i in features], dim=-1) if features else None
        return logits.to(device), found

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
        """Put the tokens starts <= position < ends of each row into the cache.

        Args:
            ids: token buffer; column j holds the token at position j. [B, N]
            starts, ends: [B]
            latest: at least ``starts``.
            num_columns: T, at least ``ends - starts``. (Numbers of the host: it need not wait for the device.)
            features: see ``forward``. They are for at most PREFILL_COLUMNS columns.

        Returns:
            The hidden states of ``features``, from the column ``starts`` on. [B, T, F]
        """
        assert not features or num_columns <= PREFILL_COLUMNS
        found = None
        for offset in range(0, num_columns, PREFILL_COLUMNS):
            width = min(PREFILL_COLUMNS, num_columns - offset)
            positions = starts[:, None] + torch.arange(offset, offset + width, device=ids.device)
            is_there = positions < ends[:, None]
            columns = positions.clamp_max(ids.shape[1] - 1)
            positions = torch.where(is_there, positions, -1)
            view_len = self.view_len(latest + offset + width, cache)
            tokens = ids.gather(1, columns)
            _, found = self.forward_with_features(tokens, positions, cache, view_len, features, num_logits=1)
        return found

    def _mask(self, positions: Tensor, view_len: int) -> Tensor | dict[str, Tensor]:
        """Additive masks: 0 where a query may look, the least number elsewhere. [B, 1, T, view_len]

        Additive, since eager attention adds what it is given; scaled-dot-product attention takes both forms.
        """
        places = torch.arange(view_len, device=positions.device)
        queries = positions[..., None]
        masks = {}
        for layer_type in self._layer_types:
            is_hidden = places > queries  # [B, T, view_len]
            if layer_type == "sliding_attention":
                assert self._window is not None
                is_hidden = is_hidden | (places <= queries - self._window)
            mask = torch.zeros(is_hidden.shape, dtype=self.dtype, device=positions.device)
            masks[layer_type] = mask.masked_fill_(is_hidden, torch.finfo(self.dtype).min)[:, None]
        return masks if len(masks) > 1 else masks[self._layer_types[0]]


@contextmanager
def _hidden_states(model: Any, features: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Fill a dictionary with the inputs of decoder layers while the model runs. The hooks are there for this run only,
    and are traced and recorded with it."""
    states: dict[int, Tensor] = {}
    hooks = []

    def keep(index: int, output: Any) -> None:
        states[index] = output[0] if isinstance(output, tuple) else output

    if features:
        decoder = model.get_decoder()
        for i in set(features):
            if i == 0:
                hook = decoder.layers[0].register_forward_pre_hook(
                    lambda _, args, kwargs: keep(0, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            else:
                hook = decoder.layers[i - 1].register_forward_hook(lambda _, args, output, i=i: keep(i, output))
            hooks.append(hook)
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


def _makes_windows(model: nn.Module) -> bool:
    """Whether the modelling code makes masks with a sliding window. A configuration may state one that it ignores."""
    homes = {type(module).__module__ for module in model.modules()}
    return any("create_sliding_window_causal_mask" in vars(sys.modules[home]) for home in homes)
