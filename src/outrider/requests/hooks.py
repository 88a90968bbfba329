"""Hooks: functions of the token ids so far that forbid or favour the next token (``Sampling.processor``, and those that
``Sampling.bad_words`` stand for). They are constraints like a grammar, and a row may have both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.errors import OptionError, PromptError
from outrider.options import MAX_BIAS, Sampling
from outrider.records import Constraint
from outrider.sampling.masks import as_biases
from outrider.text.structure import Structure, grammar_of
from outrider.text.thinking import Thinking, Thoughts, thinking_of
from outrider.text.tokenizer import encode

Hook = Callable[[list[int]], Any]


class ReadOptions(NamedTuple):
    """Options that are read once for any number of sequences: the grammar, and ``bad_words`` as token ids with their
    hook."""

    sampling: Sampling
    grammar: str | None
    words: Sequence[Sequence[int]]
    forbidding: Hook | None

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: Any, vocab_size: int) -> ReadOptions:
        """Raises OptionError, MissingExtra, ConstraintNotRead."""
        words = _word_ids(sampling.bad_words, tokenizer, vocab_size)
        return cls(sampling, grammar_of(sampling), words, _forbidding(words, vocab_size) if words else None)


def constraint_of(
    options: ReadOptions,
    tokenizer: Any,
    vocab_size: int,
    eos_ids: frozenset[int],
    prompt_ids: Sequence[int],
    thinking: Thinking | None = None,
    begun: str | None = None,
) -> Constraint | None:
    """The constraint of a new sequence with these options, if any. A schema, an expression or a grammar begins after
    its thoughts; without their markers the tokenizer is asked if the thoughts have a budget. ``begun`` is the text that
    the output of a chat continues; None if the prompt is no chat. Errors: see ``Structure``."""
    sampling = options.sampling
    structure: Constraint | None = None
    if sampling.is_constrained:
        structure = Structure(sampling, tokenizer, vocab_size, eos_ids, options.grammar)
    budget = sampling.thinking_budget
    if budget is not None:
        thinking = thinking or (None if tokenizer is None else thinking_of(tokenizer, "auto"))
        if thinking is None:
            raise OptionError("thinking_budget", budget, "this model has no known markers of thoughts: leave it out")
        if (sampling.logit_bias or {}).get(thinking.end_id) == -math.inf:
            raise OptionError("logit_bias", -math.inf, f"it forbids {thinking.end}, which thinking_budget may force")
        if sampling.min_tokens and thinking.end_id in sampling.stop_token_ids:
            remedy = f"with {thinking.end} as a stop token it may forbid what thinking_budget forces"
            raise OptionError("min_tokens", sampling.min_tokens, remedy)
    if thinking is not None and (structure is not None or budget is not None):
        stage, head = thinking.stage_of(tokenizer, prompt_ids, begun), thinking.head_of(prompt_ids)

        def is_blank(token_id: int) -> bool:
            return not tokenizer.decode([token_id]).strip()

        structure = Thoughts(structure, thinking, stage, vocab_size, eos_ids, budget, is_blank, head)
    hooks: dict[str, Hook] = {}
    if options.forbidding is not None:
        if budget is not None and thinking is not None and [thinking.end_id] in options.words:
            raise OptionError("bad_words", thinking.end, "thinking_budget may force this token: leave it out")
        hooks["bad_words"] = options.forbidding
    if sampling.processor is not None:
        name = getattr(sampling.processor, "__qualname__", type(sampling.processor).__name__)
        hooks[f"processor {name}"] = sampling.processor
    if not hooks:
        return structure
    ends = frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_ids)
    return Hooked(hooks, structure, prompt_ids, vocab_size, ends, _always_forbidden(sampling, vocab_size, eos_ids))


class Hooked:
    """Constraint of one sequence by hooks, and its state (see ``outrider.records.Constraint``).

    A hook that raises, or whose result cannot be used, ends the sequence, but only when it reaches that place:
    after a drafted token that is then rejected, it does not matter. After an end token no hook is called.
    """

    def __init__(
        self,
        hooks: Mapping[str, Hook],
        inner: Constraint | None,
        prompt_ids: Sequence[int],
        vocab_size: int,
        ends: frozenset[int],
        forbidden: Callable[[int], NDArray[np.bool_] | None],
    ) -> None:
        """Take hooks, by name, and another constraint, at its beginning; ``forbidden`` maps the number of tokens in the
        output to the next tokens that other options forbid [V]."""
        self._hooks, self._inner, self._vocab_size = hooks, inner, vocab_size
        self._ends, self._forbidden = ends, forbidden
        self._ids = list(prompt_ids)
        self._num_given = len(self._ids)
        self._passed: list[int] = []  # output tokens that were found to be allowed, drafts included
        self._here: NDArray[Any] | str | None = None  # effect or error at the end of the ids, once it is known

    @property
    def error(self) -> str | None:
        """Why the next token has no distribution, if that is known; else None."""
        return self._here if isinstance(self._here, str) else self._inner.error if self._inner is not None else None

    def effect(self) -> NDArray[Any] | None:
        found = None if self._has_ended else self._found()
        return None if isinstance(found, str) else found

    @property
    def _has_ended(self) -> bool:
        return not self._ends.isdisjoint(self._ids[self._num_given :])

    def push(self, token_id: int) -> bool:
        place = len(self._ids) - self._num_given
        if not self._has_ended and self._passed[place : place + 1] != [token_id]:
            found = self._found()
            if isinstance(found, str) or not _is_allowed(found)[token_id]:
                return False
            self._passed[place:] = [token_id]
        if self._inner is not None and not self._inner.push(token_id):
            return False
        self._ids.append(token_id)
        self._here = None
        return True

    def pop(self, num_tokens: int) -> None:
        if num_tokens:
            del self._ids[-num_tokens:]
            self._here = None
        if self._inner is not None:
            self._inner.pop(num_tokens)

    def _found(self) -> NDArray[Any] | str:
        if self._here is None:
            try:
                self._here = self._evaluated()
            except _UnusableResult as error:
                self._here = str(error)
        return self._here

    def _evaluated(self) -> NDArray[Any]:
        inner = None if self._inner is None else self._inner.effect()
        assert inner is None or isinstance(inner, np.ndarray)
        effect: NDArray[Any] = np.ones(self._vocab_size, np.bool_) if inner is None else inner
        for name, hook in self._hooks.items():
            try:
                given = hook(list(self._ids))
            except Exception as error:
                raise _UnusableResult(f"{name} raised {type(error).__name__}: {error}") from error
            own = _checked(name, given, self._vocab_size)
            if own is not None:
                is_mask = effect.dtype == own.dtype == np.bool_
                effect = effect & own if is_mask else as_biases(effect) + as_biases(own)
        forbidden = self._forbidden(len(self._ids) - self._num_given)
        is_left = _is_allowed(effect)
        if not (is_left if forbidden is None else is_left & ~forbidden).any():
            raise _UnusableResult(f"{' and '.join(self._hooks)} leaves no token at position {len(self._ids)}")
        return effect


class _UnusableResult(Exception): ...


def _checked(name: str, given: Any, vocab_size: int) -> NDArray[Any] | None:
    """The result of a hook as a mask or biases [V]. Raises _UnusableResult."""
    if given is None:
        return None
    if isinstance(given, torch.Tensor):
        given = given.detach().cpu()
        given = given.float() if given.dtype == torch.bfloat16 else given
    try:
        values = np.asarray(given)
    except (TypeError, ValueError):  # ragged lists; numbers that NumPy does not have
        values = np.asarray(None)
    if values.shape != (vocab_size,) or values.dtype.kind not in "bf":  # integers may be meant as either
        shape, kind = list(getattr(given, "shape", values.shape)), getattr(given, "dtype", values.dtype)
        remedy = f"give a mask or biases of shape [{vocab_size}], as bools or floats"
        raise _UnusableResult(f"{name} gave {kind} of shape {shape}: {remedy}")
    if values.dtype.kind == "b":
        return values
    values = values.astype(np.float64 if values.dtype == np.float64 else np.float32)  # the bound is beyond float16
    if not ((np.abs(values) <= MAX_BIAS) | (values == -np.inf)).all():
        raise _UnusableResult(f"{name} gave NaN, or numbers beyond {MAX_BIAS:g}: each bias is a number, or -inf")
    return values


def _is_allowed(effect: NDArray[Any]) -> NDArray[np.bool_]:
    return effect if effect.dtype == np.bool_ else effect > -np.inf


def _always_forbidden(
    sampling: Sampling, vocab_size: int, eos_ids: frozenset[int]
) -> Callable[[int], NDArray[np.bool_] | None]:
    """See ``Hooked``: by ``logit_bias`` and, until then, ``min_tokens``."""
    by_bias = [i for i, bias in (sampling.logit_bias or {}).items() if bias == -math.inf]
    ends = [*eos_ids, *sampling.stop_token_ids] if sampling.min_tokens else []
    if not by_bias and not ends:
        return lambda num_generated: None
    late = np.isin(np.arange(vocab_size), by_bias)
    early = late | np.isin(np.arange(vocab_size), ends)
    return lambda num_generated: early if num_generated < sampling.min_tokens else late


def _word_ids(words: Sequence[str | Sequence[int]], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    found: list[list[int]] = []
    for word in words:
        if not isinstance(word, str):
            if max(word) >= vocab_size:
                raise OptionError("bad_words", list(word), f"token ids are below {vocab_size}")
            found.append(list(word))
            continue
        if tokenizer is None:
            raise OptionError("bad_words", word, "texts need a tokenizer: give token ids")
        try:
            found += (encode(tokenizer, text, has_special=False) for text in (word, f" {word.lstrip()}"))
        except PromptError as error:
            raise OptionError("bad_words", word, str(error)) from None
    return found


def _forbidding(sequences: Sequence[Sequence[int]], vocab_size: int) -> Hook:
    always = ~np.isin(np.arange(vocab_size), [one[0] for one in sequences if len(one) == 1])
    longer: dict[int, list[tuple[list[int], int]]] = {}  # by the last token before the forbidden one
    for *head, last in sequences:
        if head:
            longer.setdefault(head[-1], []).append((head, last))

    def mask(ids: list[int]) -> NDArray[np.bool_]:
        allowed = always.copy()
        candidates = longer.get(ids[-1], []) if ids else []
        allowed[[last for head, last in candidates if ids[-len(head) :] == head]] = False
        return allowed

    return mask
