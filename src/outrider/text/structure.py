"""Structured output: text that must be JSON of a schema, or match a regular expression or a grammar.

The work is done by llguidance (https://github.com/guidance-ai/llguidance), which knows after each token, by the bytes
that tokens stand for, which may come next. Its names: a matcher is a grammar with a place in a text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import MissingExtra, OptionError
from outrider.options import CONSTRAINTS, Sampling

# Between the parts of JSON. llguidance itself allows any amount, with which small models fill the text to its limit.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,24})"}
_MOST_CHARACTERS = 200  # of its messages, which may quote the grammar


class Structure:
    """What one text has to match, and how far it has come (see ``outrider.records.Constraint``).

    Args:
        sampling: with a constraint.
        tokenizer: of Hugging Face, one of its fast ones.
        eos_ids: tokens that end the text; they may come when it is complete.

    Raises:
        OptionError: llguidance does not accept the constraint; no text matches it; or there is no such tokenizer, or
            no end token.
        MissingExtra: it is not installed.
    """

    def __init__(self, sampling: Sampling, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> None:
        name, value = _given(sampling)
        if not eos_ids:
            raise OptionError(name, value, "this model has no end token, so that no text would be complete")
        grammar = _grammar(name, value)
        try:
            tokens = _tokens(tokenizer, vocab_size, eos_ids)
        except ValueError as error:
            raise OptionError(name, value, f"the tokenizer cannot be used: {_line(error)}") from None
        self._matcher = _at_the_beginning(tokens, grammar).deep_copy()
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            raise _refusal(name, value, "no text matches it" if reason.startswith("NoExtension") else reason)
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._num_beyond = 0  # tokens from the end token on, which the matcher does not see

    @property
    def error(self) -> str | None:
        """A limit of llguidance, on the size of its states."""
        return _line(self._matcher.get_error()) if self._matcher.is_error() else None

    def allowed(self) -> NDArray[np.bool_] | None:
        if self._num_beyond or self._matcher.is_error():
            return None
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            return None
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        return flags[: self._vocab_size].astype(np.bool_)

    def push(self, token_id: int) -> bool:
        if self._num_beyond or (token_id in self._eos_ids and self._matcher.is_accepting()):
            self._num_beyond += 1
            return True
        if self._matcher.validate_tokens([token_id]) == 0:
            return False
        return bool(self._matcher.consume_token(token_id))

    def pop(self, num_tokens: int) -> None:
        num_beyond = min(num_tokens, self._num_beyond)
        self._num_beyond -= num_beyond
        if num_tokens > num_beyond:
            self._matcher.rollback(num_tokens - num_beyond)


def check_structure(sampling: Sampling) -> None:
    """Whether llguidance accepts the constraint, before there is a tokenizer. Raises OptionError, MissingExtra."""
    name, value = _given(sampling)
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(_grammar(name, value))
    if is_error:
        raise _refusal(name, value, messages[0])


def _given(sampling: Sampling) -> tuple[str, Any]:
    return next((name, value) for name in CONSTRAINTS if (value := getattr(sampling, name)) is not None)


def _grammar(name: str, value: str | Mapping[str, Any]) -> str:
    """In llguidance's own form."""
    llguidance = _llguidance()
    try:
        if isinstance(value, Mapping):
            return str(llguidance.LLMatcher.grammar_from_json_schema(dict(value), defaults=_JSON_OPTIONS))
        return str(llguidance.grammar_from(name, value))
    except ValueError as error:
        raise _refusal(name, value, str(error)) from None


@lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """The tokens as llguidance sees them, which takes a second for a large vocabulary. Raises ValueError."""
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))


@lru_cache(maxsize=8)
def _at_the_beginning(tokens: Any, grammar: str) -> Any:
    """A matcher to be copied, since a request may ask for several texts of one grammar, and the next one for more. Its
    first mask may take long; made here, it holds up no other text."""
    matcher = _llguidance().LLMatcher(tokens, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise MissingExtra("llguidance", "structured", "structured output") from None
    return llguidance


def _refusal(name: str, value: Any, message: str) -> OptionError:
    reason = re.search(r"^error: (.+)$", message, re.MULTILINE) if name == "regex" else None
    return OptionError(name, value, reason[1] if reason else _line(message))


def _line(message: object) -> str:
    text, _, _ = str(message).partition("<state>")  # what follows is for llguidance's own developers
    text = re.split(r"\n +\d+ \|", text)[0]  # a line of the grammar, with a caret below it
    return " ".join(text.split())[:_MOST_CHARACTERS]
