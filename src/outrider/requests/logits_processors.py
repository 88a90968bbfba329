"""Logits processors of Transformers as options of a row, and as its constraint; and its stopping criteria.

Those at the ends of the list that ``Sampling`` has as well become options. The others run on the host, on the
would-be prefix of each token, for p and q alike; so they must depend on the ids and the logits alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import generation as hf
from transformers.generation import logits_process

from outrider.errors import NumericsError, OptionError

Processor = Callable[[Tensor, Tensor], Tensor]

# In our order, with the name that attribute and option share.
_FILTERS = {
    hf.TemperatureLogitsWarper: "temperature",
    hf.TopKLogitsWarper: "top_k",
    hf.TopPLogitsWarper: "top_p",
    hf.MinPLogitsWarper: "min_p",
}
_ENDS_LATER = (hf.MinLengthLogitsProcessor, hf.MinNewTokensLengthLogitsProcessor)
# With a state, a model, or the inputs of the whole batch.
_REFUSED = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.ClassifierFreeGuidanceLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.WhisperTimeStampLogitsProcessor,
    logits_process.WhisperNoSpeechDetection,
    logits_process.AlternatingCodebooksLogitsProcessor,
    logits_process.BarkEosPrioritizerLogitsProcessor,
)
_TAKES_TURNS = "it changes itself when called, and rows take turns: make it a function of its arguments"


def of_row(processor: Any, row: int) -> Processor:
    """A processor as it acts on one row of the batch. Raises OptionError: it has a state, or reads other rows."""
    if isinstance(processor, _REFUSED) or type(processor).__name__.startswith("Dia"):
        name = type(processor).__name__
        raise OptionError("logits_processor", name, "it needs more than a row's ids and logits: leave it out")
    if isinstance(processor, hf.PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        own: Processor = hf.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
        return own
    if type(processor) is hf.RepetitionPenaltyLogitsProcessor and isinstance(
        lengths := processor.prompt_ignore_length, Tensor
    ):
        own = hf.RepetitionPenaltyLogitsProcessor(processor.penalty, lengths[row : row + 1])
        return own
    remedy = "also for drafted tokens that are rejected: make it a function of its arguments"
    watched = Watched(processor, "logits_processor", f"it changes itself when called, {remedy}")
    return processor if _is_transformers(processor) else watched


def _is_transformers(given: Any) -> bool:
    return type(given).__module__.partition(".")[0] == "transformers"


class Watched:
    """A caller's function, as long as it does not change from call to call."""

    def __init__(self, inner: Callable[..., Any], option: str, remedy: str) -> None:
        """The option and the remedy are for the error's message."""
        self.inner, self._option, self._remedy = inner, option, remedy
        self._num_calls = 0

    def __call__(self, *args: Any) -> Any:
        """Raises OptionError: the function has changed."""
        before = _state(self.inner)
        result = self.inner(*args)
        self._num_calls += 1
        if self._num_calls > 1 and _state(self.inner) != before:  # the first call may prepare something
            raise OptionError(self._option, type(self.inner).__name__, self._remedy)
        return result


def _state(processor: Any) -> list[tuple[Any, ...]]:
    return [
        (name, id(value), getattr(value, "_version", None), len(value) if isinstance(value, (list, dict, set)) else 0)
        for name, value in getattr(processor, "__dict__", {}).items()
    ]


def as_options(
    processors: Sequence[Processor], row_ids: Sequence[int], num_padding: int
) -> tuple[dict[str, Any], list[Processor]]:
    """Fields of ``Sampling`` for the processors that have one, and the others, which act before the temperature. The
    ids of the row have its padding."""
    rest, options = list(processors), dict[str, Any]()
    if rest and type(rest[-1]) is hf.LogitNormalization:  # changes scores, and no probability
        rest.pop()
    kinds, before = list(_FILTERS), len(_FILTERS)
    # Some values and settings are Transformers' alone.
    own = {"filter_value": -torch.inf, "min_tokens_to_keep": 1}
    while rest and type(rest[-1]) in kinds[:before] and getattr(rest[-1], "top_p", 1.0) > 0:
        if any(getattr(rest[-1], name, value) != value for name, value in own.items()):
            break
        before = kinds.index(type(rest[-1]))
        name = _FILTERS[kinds[before]]
        options[name] = getattr(rest.pop(), name)
    if rest and type(rest[0]) is hf.RepetitionPenaltyLogitsProcessor:
        one: Any = rest[0]
        ignored = one.prompt_ignore_length
        # Our penalty sees the whole prompt, but no padding.
        if (ignored.tolist() if isinstance(ignored, Tensor) else [ignored or 0]) == [num_padding]:
            options["repetition_penalty"] = one.penalty
            rest.pop(0)
    if rest and all(type(one) in _ENDS_LATER for one in rest):
        late: list[Any] = rest
        ends = {tuple(one.eos_token_id.flatten().tolist()) for one in late}
        given = len(row_ids)
        nums = [
            one.min_length - given
            if type(one) is hf.MinLengthLogitsProcessor
            else one.min_new_tokens + one.prompt_length_to_skip - given
            for one in late
        ]
        if len(ends) == 1:
            return options | {"min_tokens": max(0, *nums), "stop_token_ids": ends.pop()}, []
    return options, rest


def process(processors: Sequence[Processor], ids: Tensor, logits: Tensor) -> Tensor:
    """Scores of the next token, in float32 as in ``generate``, after the tokens so far, padding included.
    [1, N], [V] -> [V]"""
    scores = logits[None].to(torch.float32, copy=True)
    for one in processors:
        scores = one(ids, scores)
    return scores[0]


class ProcessedRow:
    """Constraint of one sequence by processors (see ``outrider.records.Constraint``).

    ``errors`` has those of the processors, by position. Processors see drafts that may be rejected, so an error counts
    only if the sequence has a token at its position; that error is the target's, which has replaced the draft's."""

    error: str | None = None

    def __init__(
        self, processors: Sequence[Processor], row_ids: Sequence[int], device: torch.device, ends: frozenset[int]
    ) -> None:
        """The ids of the row have its padding; the processors see ids on this device."""
        self._processors, self._ids, self._device = processors, list(row_ids), device
        self._ends, self._num_given = ends, len(row_ids)
        self.errors: dict[int, Exception] = {}

    def effect(self) -> Callable[[Tensor], Tensor] | None:
        if not self._ends.isdisjoint(self._ids[self._num_given :]):
            return None
        return partial(self._scores, torch.tensor([self._ids], device=self._device))

    def _scores(self, ids: Tensor, logits: Tensor) -> Tensor:
        position = ids.shape[1]
        self.errors.pop(position, None)
        try:
            scores = process(self._processors, ids, logits.to(self._device))
            if scores.shape != logits.shape or not scores.amax().isfinite():
                names = ", ".join(type(getattr(one, "inner", one)).__name__ for one in self._processors)
                raise NumericsError(f"{names} left no distribution for position {position}: NaN, or no token")
        except OptionError:  # of a processor with a state, whose later results are wrong too
            raise
        except Exception as error:
            self.errors[position] = error
            return logits
        return scores.to(logits)

    def push(self, token_id: int) -> bool:
        self._ids.append(token_id)
        return True

    def pop(self, num_tokens: int) -> None:
        del self._ids[len(self._ids) - num_tokens :]


class Criteria:
    """Stopping criteria of a batch, called with one row at a time; their end tokens are in ``ends``."""

    def __init__(self, criteria: Sequence[Callable[..., Any]], num_rows: int) -> None:
        self._num_rows = num_rows
        self._criteria: list[Any] = [
            Watched(one, "stopping_criteria", _TAKES_TURNS) if num_rows > 1 and not _is_transformers(one) else one
            for one in criteria
        ]
        own: list[Tensor] = [one.eos_token_id for one in criteria if isinstance(one, hf.EosTokenCriteria)]
        self.ends = frozenset(int(token) for ids in own for token in ids.tolist())

    def is_met(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> bool:
        """Whether one of them is for the tokens of one row [1, N]; all are called, as in ``generate``. Raises
        OptionError: one has a state, or reads other rows."""
        found = []
        for one in self._criteria:
            met = torch.as_tensor(one(ids, scores))
            # A plain bool is about the whole batch.
            if met.shape != (1,) and (met.numel() != 1 or self._num_rows > 1):
                name, remedy = type(getattr(one, "inner", one)).__name__, "for one row: give shape [1]"
                raise OptionError("stopping_criteria", name, f"it gave shape {list(met.shape)} {remedy}")
            found.append(bool(met))
        return any(found)
