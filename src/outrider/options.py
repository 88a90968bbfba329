"""The options of a generation, and their checks.

This module knows no model and no tensor. It does not import torch.
"""

from __future__ import annotations

import copy
import difflib
import math
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict

from outrider.errors import OptionError

DEFAULT_ACCEPTANCE = "block"
DEFAULT_NUM_DRAFT_TOKENS = 4
MAX_NUM_DRAFT_TOKENS = 1024
DEFAULT_NUM_SLOTS = 8
DEFAULT_NUM_SESSION_SLOTS = 4
LOOKUPS = ("ngram", "suffix")
"""Drafts without a model."""
AUTO = "auto"
"""The draft that a target's checkpoint brings, or a known one on this machine, or ``suffix``."""
HYBRID = "suffix+"
"""Before the name of a draft: ``suffix`` where its score is high, else that draft."""

NumDraftTokens = int | Literal["auto"]
"""K, or ``auto``: chosen each round for the most tokens per second (see outrider.decoding.schedule)."""

CONSTRAINTS = ("json_schema", "regex", "grammar")
"""The fields of ``Sampling`` that constrain the output."""
MASKS = (*CONSTRAINTS, "thinking_budget", "bad_words", "processor")
"""The fields of ``Sampling`` that forbid tokens by the ones before them."""

MAX_BIAS = 1e9  # beyond any logit, and finite in every dtype of logits


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling options of one row. Order and meaning are those of Hugging Face's processors: logit_bias,
    repetition_penalty, temperature, top_k, top_p, min_p. After the repetition penalty come the penalties of OpenAI's
    API, ``logit - frequency_penalty * count - presence_penalty * (count > 0)``, and then min_tokens, as in vLLM.

    Attributes:
        temperature: 0 is greedy (ties go to the lowest id); 1 is the model's own distribution.
        top_k: keep the k most probable tokens (and ties with the k-th); 0 keeps all.
        top_p: keep the smallest set of tokens whose mass reaches top_p; 1.0 keeps all.
        min_p: keep tokens with at least min_p times the probability of the most probable; 0.0 keeps all.
        repetition_penalty: above 1.0 lowers the logits of tokens that occur in prompt or output (Keskar et al. 2019).
        presence_penalty: subtracted from the logits of tokens that occur in the output, -2 to 2.
        frequency_penalty: subtracted once for each occurrence.
        logit_bias: token id -> number added to its logit (-inf forbids it).
        min_tokens: minimum tokens; until then no end tokens are generated (the model's, also under ``ignore_eos``, and
            ``stop_token_ids``), and stop strings are ignored. The limits still apply.
        seed: from 0 to ``2**63 - 1``; None draws one from the operating system; the completion reports it.
        stop: strings that end the output; they are not part of it.
        json_schema, regex, grammar: at most one of them: the output is JSON of this schema, matches this regular
            expression, or this grammar (Lark or GBNF). Each token is drawn from its distribution masked to the allowed
            tokens; an end token is allowed, or forced, when the output is complete.
        thinking_budget: the most tokens of thoughts, counted from their first marker; then the marker that ends them
            is forced. A constraint of the output begins after it. The tokenizer must have such markers (``<think>``,
            for instance). None: thoughts are not told apart.
        bad_words: texts or lists of token ids that are not generated: after all tokens of one but the last, in prompt
            and output, the last is forbidden. A text stands for its tokens, at the beginning of a text and after a
            space; spelled by other tokens it is not seen.
        processor: a function of the token ids so far, prompt included (a list), that gives biases of the next token's
            logits, -inf to forbid it [V]; or a mask, True for allowed tokens [V]; or None. It is called for each
            drafted token, too, with the drafted tokens before it, and must depend on the ids alone. It comes where
            constraints do, between the penalties and the temperature.
        stop_token_ids: tokens that end the output, beside the model's end tokens. They have no text.
        max_new_tokens: the most tokens to generate.
        ignore_eos: treat end tokens like any other token.
        logprobs: None for none; N >= 0 for the log-probability of each token under the target's raw logits
            (before any processor), and of the N most probable tokens beside it.

    Raises:
        OptionError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    max_new_tokens: int = 128
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    json_schema: Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    thinking_budget: int | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    processor: Callable[[list[int]], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 1e6, "a number >= 0, at most 1e6; 0 is greedy")
        _check_integer("top_k", self.top_k, 0, "a whole number >= 0; 0 keeps all tokens")
        _check_number("top_p", self.top_p, 0.0, 1.0, "0 < top_p <= 1; 1.0 keeps all tokens", is_low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0, "0 <= min_p <= 1; 0.0 keeps all tokens")
        remedy = "a number from 1e-6 to 1e6; 1.0 is none"
        _check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, remedy)
        for name in ("presence_penalty", "frequency_penalty"):  # as in OpenAI's API
            _check_number(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2; 0.0 is none")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise OptionError("logit_bias", self.logit_bias, "a mapping from token ids to numbers")
            # It may name the whole vocabulary: what is certainly a token id or a bias is passed over first.
            for token_id in [i for i in self.logit_bias if type(i) is not int or i < 0]:
                _check_integer("logit_bias", token_id, 0, "its keys are token ids")
            for bias in [x for x in self.logit_bias.values() if type(x) is not float or not _is_bias(x)]:
                if not isinstance(bias, numbers.Real) or not _is_bias(bias):
                    raise OptionError("logit_bias", bias, f"each value is a finite number up to {MAX_BIAS:g}, or -inf")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, "a whole number, 0 <= seed < 2**63", most=2**63 - 1)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.stop, Sequence):
            raise OptionError("stop", self.stop, "a string, or several")
        for string in self.stop:
            if not isinstance(string, str) or not string:
                raise OptionError("stop", string, "stop strings are not empty")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence):
            raise OptionError("stop_token_ids", self.stop_token_ids, "a list of token ids")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, "a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _check_integer("min_tokens", self.min_tokens, 0, "a whole number >= 0; 0 is none")
        _check_integer("max_new_tokens", self.max_new_tokens, 1, "a whole number >= 1")
        for name in ("logprobs", "thinking_budget"):
            if (number := getattr(self, name)) is not None:
                _check_integer(name, number, 0, "None, or a whole number >= 0")
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))
        if self.processor is not None and not callable(self.processor):
            raise OptionError("processor", self.processor, "a function of token ids, or None")
        self._check_constraint()

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if not given:
            return
        name, value = given[0], getattr(self, given[0])
        if name == "json_schema" and not isinstance(value, Mapping):
            raise OptionError(name, value, "a JSON schema, which is an object")
        if name != "json_schema" and not (isinstance(value, str) and value):
            raise OptionError(name, value, "a string that is not empty")
        if len(given) > 1:
            raise OptionError(given[1], getattr(self, given[1]), f"give it or {name}, not both")
        # Together with a constraint these may leave no token at all.
        if self.ignore_eos or self.min_tokens:
            other = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise OptionError(other, getattr(self, other), f"with {name} the output ends when it is complete")
        if -math.inf in (self.logit_bias or {}).values():
            raise OptionError("logit_bias", -math.inf, f"it may forbid what {name} requires: use a finite number")
        if self.bad_words:
            raise OptionError("bad_words", self.bad_words, f"they may forbid what {name} requires: leave them out")

    @property
    def is_constrained(self) -> bool:
        """Whether a schema, a regular expression or a grammar constrains the output."""
        return any(getattr(self, name) is not None for name in CONSTRAINTS)

    @property
    def masked_by(self) -> str | None:
        """The first of ``MASKS`` that is given, if any."""
        return next((name for name in MASKS if getattr(self, name) not in (None, ())), None)

    def without_masks(self) -> Sampling:
        """These options without ``MASKS``."""
        defaults: dict[str, Any] = {one.name: one.default for one in fields(self) if one.name in MASKS}
        return replace(self, **defaults)

    def with_ends(self, eos_ids: Collection[int]) -> Sampling:
        """Add the model's end tokens to ``stop_token_ids`` if the probabilities depend on them."""
        if not self.min_tokens:
            return self
        return with_checked(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *eos_ids})))


def with_checked(sampling: Sampling, **values: Any) -> Sampling:
    """Options with other values that are known to be right: all would be checked again, for each row of a request."""
    other = copy.copy(sampling)
    for name, value in values.items():
        object.__setattr__(other, name, value)
    return other


_StringsOrNone = str | Sequence[str] | None
_IdsOrNone = Sequence[int] | None
_WordsOrNone = Sequence[str | Sequence[int]] | None
_HookOrNone = Callable[[list[int]], Any] | None


class SamplingChanges(TypedDict, total=False):
    """The fields of ``Sampling`` as keywords: one value for all rows, or a list with one for each (``stop``,
    ``stop_token_ids`` and ``bad_words``: a list of lists)."""

    temperature: float | Sequence[float]
    top_k: int | Sequence[int]
    top_p: float | Sequence[float]
    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None
    seed: int | Sequence[int | None] | None
    stop: _StringsOrNone | Sequence[_StringsOrNone]
    max_new_tokens: int | Sequence[int]
    ignore_eos: bool | Sequence[bool]
    logprobs: int | Sequence[int | None] | None
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    min_tokens: int | Sequence[int]
    stop_token_ids: _IdsOrNone | Sequence[_IdsOrNone]
    json_schema: Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
    regex: str | Sequence[str | None] | None
    grammar: str | Sequence[str | None] | None
    thinking_budget: int | Sequence[int | None] | None
    bad_words: _WordsOrNone | Sequence[_WordsOrNone]
    processor: _HookOrNone | Sequence[_HookOrNone]


class CallOptions(SamplingChanges, total=False):
    """Keywords of ``Decoder.stream_many`` and the like: the fields of ``Sampling``, and options of the whole call. (In
    a session the engine is shared: ``reports_drafts`` is the only option of a call there.)

    Attributes:
        num_slots: concurrent prompts. When a row ends, the next prompt takes its slot.
        num_draft_tokens, acceptance: for this call, in place of the decoder's.
        is_repeatable: the output of a row whose seed is given depends on the call alone: under "auto" its K is constant
            if the output depends on K. False lifts this (for measurements; the output distribution is the same if no
            seed is used twice with this decoder).
        reports_drafts: report all drafted tokens in chunks, rejected or not, with p and q.
    """

    num_slots: int
    num_draft_tokens: NumDraftTokens | None
    acceptance: str | None
    is_repeatable: bool
    reports_drafts: bool


def is_word(item: object) -> bool:
    """Whether this may be one of ``bad_words``: a text, or token ids."""
    if isinstance(item, Sequence) and not isinstance(item, str):
        return len(item) > 0 and all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in item)
    return isinstance(item, str)


def _checked_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise OptionError("bad_words", words, "a list of texts, or of lists of token ids")
    for word in words:
        if not word or not is_word(word) or (not isinstance(word, str) and min(word) < 0):
            raise OptionError("bad_words", word, "texts that are not empty, or lists of token ids")
    return tuple(word if isinstance(word, str) else tuple(map(int, word)) for word in words)


def nearest(name: str, known: Collection[str]) -> str | None:
    """The option of which a name may be a misspelling."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def looks_up(draft: object) -> bool:
    """Whether a draft looks up tokens, alone or before another draft."""
    return draft in LOOKUPS or isinstance(draft, str) and draft.startswith(HYBRID)


def reads_corpus(draft: object) -> bool:
    """Whether a draft looks up tokens in a corpus."""
    return looks_up(draft) and draft != "ngram"


def _check_number(name: str, value: object, low: float, high: float, remedy: str, *, is_low_open: bool = False) -> None:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (is_low_open and value == low):  # type: ignore[operator]
        raise OptionError(name, value, remedy)


def _is_bias(number: Any) -> bool:
    return bool(abs(number) <= MAX_BIAS or number == -math.inf)


def _check_integer(name: str, value: object, low: int, remedy: str, most: float = math.inf) -> None:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or not low <= int(value) <= most:
        raise OptionError(name, value, remedy)


def check_num_draft_tokens(k: NumDraftTokens) -> None:
    """Raises OptionError."""
    # An int, which JSON can write: not one of NumPy.
    if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_NUM_DRAFT_TOKENS):
        remedy = f"1 to {MAX_NUM_DRAFT_TOKENS}, or 'auto' (for plain decoding choose the draft 'none')"
        raise OptionError("num_draft_tokens", k, f"a whole number from {remedy}")


def check_count(name: str, number: int) -> None:
    """Raises OptionError."""
    _check_integer(name, number, 1, "a whole number >= 1")
