"""Structured output: constrained to JSON of a schema, a regular expression or a grammar.

llguidance (https://github.com/guidance-ai/llguidance) does the work: after each token it knows which tokens may follow,
by their bytes. In its terms, a matcher is a grammar with a position in a text.

A few hundred bytes can keep llguidance busy for hours: it decides whether a string can match all patterns of a schema
by expanding them, and none of its limits (``LLParserLimits``) counts that work. Nor can it be interrupted. So a process
with limited processor time and memory reads each constraint first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.errors import ConstraintNotRead, MissingExtra, OptionError
from outrider.options import CONSTRAINTS, Sampling
from outrider.text.fast_tokenizer import FastTokenizer

# Between the parts of JSON. llguidance's default allows any amount; small models fill the text with it to the limit.
_JSON_OPTIONS = {"whitespace_pattern": r"( |\n {0,24})"}

# Items of the parser in one mask; llguidance allows ten times as many. `a: a a | /[a-z ]/ | ""` needs more with every
# token, and reaches this limit after 44 tokens: 0.05 s for the last mask, with a vocabulary of 8,000, and 0.7 s in all.
# 300 optional properties of an object need fewer, and so do 1,000 choices.
_MOST_ITEMS = 5000
_MOST_BYTES = 2**18  # of a constraint; 5,000 choices have 170 KB and are read in 0.2 s
_MOST_PATTERNS = 1000  # of a schema; if each is for another string, they are read in 0.1 s
# Operators `&` of a grammar. The work doubles with each: 5 take 2 ms, 29 never finish, under any limit of llguidance.
# Patterns of a schema that must match together are refused when it is checked: see `_can_be_read`.
_MOST_INTERSECTIONS = 5
_FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
_DATA = frozenset(["const", "default", "enum", "examples"])  # keys of a schema whose values are not schemas
# Attributes of rules: llguidance cannot roll back the first two, and leaves the last one to its caller.
_ATTRIBUTES = re.compile(r"[\[,]\s*(max_tokens|stop|temperature)\s*=")
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\])+/', re.DOTALL)  # and comments

_MOST_CPU_S = 2  # ordinary constraints take 0.1, most of it for the start of Python
_MOST_MEMORY = 2**30
_MOST_CHECK_S = 60.0  # for a machine so busy that the process gets no processor time

# Imports nothing of this package, which would take longer than all the rest, and is nice to other requests. The hard
# limit on time is above the soft one, since it ends the process by the same signal as others do. Windows has no such
# limits, and macOS none of memory: there the caller's limit of time remains.
_PROGRAM = """
import contextlib, os, sys
with contextlib.suppress(AttributeError, OSError):
    os.nice(10)
import llguidance
grammar = sys.stdin.buffer.read().decode()
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
print("limited", flush=True)
llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
"""
# Exit codes at a limit: of time, of memory (in llguidance or in Python), of the stack.
_ENDS_BY_LIMITS = (-24, -6, 1, -11)  # SIGXCPU, SIGABRT, an error of Python, SIGSEGV: Windows knows only the third


def grammar_of(sampling: Sampling) -> str | None:
    """The constraint of these options in llguidance's own format, if any. Errors: see ``Structure``."""
    return _grammar(*_given(sampling)) if sampling.is_constrained else None


class Structure:
    """Constraint of one sequence and its state (see ``outrider.records.Constraint``). Tokens that end the sequence are
    allowed when it is complete. A grammar may have been read before (``grammar_of``). Raises OptionError: llguidance
    does not accept the constraint, no text matches it, the tokenizer is no fast one, or there is no end token;
    ConstraintNotRead: the machine is too busy to read it in time; MissingExtra."""

    def __init__(
        self, sampling: Sampling, tokenizer: Any, vocab_size: int, eos_ids: frozenset[int], grammar: str | None = None
    ) -> None:
        name, value = _given(sampling)
        if not eos_ids:
            raise OptionError(name, value, "this model has no end token, so no output would be complete")
        grammar = grammar or _grammar(name, value)
        try:
            tokens = _tokens(tokenizer, vocab_size, eos_ids)
        except ValueError as error:
            raise OptionError(name, value, f"the tokenizer cannot be used: {_line(error)}") from None
        self._beginning = _at_the_beginning(tokens, grammar)
        self._matcher = self._beginning.deep_copy()
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            raise _refusal(name, value, "no text matches it" if reason.startswith("NoExtension") else reason)
        self._vocab_size, self._eos_ids = vocab_size, eos_ids
        self._ids: list[int] = []
        self._num_beyond = 0  # tokens from the end token on, unknown to the matcher
        self._broken: tuple[list[int], str] | None = None  # the tokens after which the matcher failed last; why

    @property
    def error(self) -> str | None:
        """Message of llguidance if its states reach a size limit after these tokens; else None."""
        return self._broken[1] if self._broken is not None and self._broken[0] == self._ids else None

    def effect(self) -> NDArray[np.bool_] | None:
        if self._num_beyond or self.error is not None:
            return None
        bits = self._matcher.compute_bitmask()
        if self._has_failed():
            return None
        flags = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        return flags[: self._vocab_size].astype(np.bool_)

    def push(self, token_id: int) -> bool:
        if self.error is not None:
            return False
        if self._num_beyond or (token_id in self._eos_ids and self._matcher.is_accepting()):
            self._num_beyond += 1
        elif self._matcher.validate_tokens([token_id]) == 0:
            self._has_failed()
            return False
        else:
            self._matcher.consume_token(token_id)
        self._ids.append(token_id)
        self._has_failed()
        return True

    def pop(self, num_tokens: int) -> None:
        if num_tokens == 0:
            return
        del self._ids[-num_tokens:]
        num_beyond = min(num_tokens, self._num_beyond)
        self._num_beyond -= num_beyond
        if self._matcher.is_error():  # which a matcher keeps: a new one reads the tokens
            self._matcher = self._beginning.deep_copy()
            for token_id in self._ids:
                self._matcher.consume_token(token_id)
        elif num_tokens > num_beyond:
            self._matcher.rollback(num_tokens - num_beyond)

    def _has_failed(self) -> bool:
        """Whether the matcher has failed; if so, note where. A draft that is then rejected leaves no trace."""
        if self._matcher.is_error():
            self._broken = list(self._ids), _line(self._matcher.get_error())
        return bool(self._matcher.is_error())


def check_structure(sampling: Sampling) -> None:
    """Check that llguidance accepts the constraint, before there is a tokenizer. Raises OptionError, MissingExtra,
    ConstraintNotRead."""
    name, value = _given(sampling)
    is_error, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(_grammar(name, value))
    if is_error:
        raise _refusal(name, value, messages[0])


def _given(sampling: Sampling) -> tuple[str, Any]:
    return next((name, value) for name in CONSTRAINTS if (value := getattr(sampling, name)) is not None)


def _grammar(name: str, value: str | Mapping[str, Any]) -> str:
    """Constraint in llguidance's own format. Raises OptionError, MissingExtra, ConstraintNotRead."""
    llguidance = _llguidance()
    try:
        given = json.dumps(_without_unknown_formats(dict(value))) if isinstance(value, Mapping) else value
        if (num_bytes := len(given.encode())) > _MOST_BYTES:
            raise OptionError(name, value, f"it has {num_bytes} bytes, the limit is {_MOST_BYTES}")
        if name == "json_schema":
            if (num_patterns := _num_patterns(value)) > _MOST_PATTERNS:
                raise OptionError(name, value, f"it has {num_patterns} patterns, the limit is {_MOST_PATTERNS}")
            grammar = str(llguidance.LLMatcher.grammar_from_json_schema(given, defaults=_JSON_OPTIONS))
        else:
            grammar = str(llguidance.grammar_from(name, given))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(name, value, str(error)) from None
    if name == "grammar":
        symbols = _LITERALS.sub("", grammar)
        if symbols.count("&") > _MOST_INTERSECTIONS:
            raise OptionError(name, value, f"it has more than {_MOST_INTERSECTIONS} operators &")
        if (found := _ATTRIBUTES.search(symbols)) is not None:
            remedy = "limit rules by regular expressions, and give it beside them"
            raise OptionError(name, value, f"{found[1]} of a rule is not supported: {remedy}")
    if not _can_be_read(grammar):
        raise OptionError(name, value, "it takes too much time or memory to read: make it simpler")
    return grammar


@lru_cache(maxsize=64)
def _can_be_read(grammar: str) -> bool:
    """Whether llguidance can validate a grammar, in its own format, within the limits of a process. Raises
    ConstraintNotRead: the machine is too busy. (This is not remembered.)"""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(_MOST_CPU_S), str(_MOST_MEMORY)]
    try:
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        done = subprocess.run(command, input=grammar.encode(), stdout=pipe, stderr=null, timeout=_MOST_CHECK_S)
    except OSError as error:
        raise ConstraintNotRead(f"no process can be started to read the constraint ({error.strerror})") from None
    except subprocess.TimeoutExpired:
        raise ConstraintNotRead(f"the constraint was not read within {_MOST_CHECK_S:g} seconds: try again") from None
    if done.returncode == 0:
        return True
    if done.stdout and done.returncode in _ENDS_BY_LIMITS:
        return False
    raise ConstraintNotRead(f"the process that reads constraints has ended (status {done.returncode}): try again")


def lark_json(schema: Mapping[str, Any]) -> str:
    """JSON of a schema, as a part of a Lark grammar."""
    return f"%json {json.dumps({**_without_unknown_formats(schema), 'x-guidance': _JSON_OPTIONS})}"


def _without_unknown_formats(schema: Any) -> Any:
    """Schema without the formats that llguidance would refuse. In the JSON Schema standard these restrict nothing."""
    if not isinstance(schema, Mapping):
        return [*map(_without_unknown_formats, schema)] if isinstance(schema, list) else schema
    return {
        key: part if key in _DATA else _without_unknown_formats(part)
        for key, part in schema.items()
        if not (key == "format" and isinstance(part, str) and part not in _FORMATS)
    }


def _num_patterns(schema: Any) -> int:
    if not isinstance(schema, Mapping):
        return sum(map(_num_patterns, schema)) if isinstance(schema, list) else 0
    by_name = schema.get("patternProperties")
    num_own = isinstance(schema.get("pattern"), str) + (len(by_name) if isinstance(by_name, Mapping) else 0)
    return num_own + sum(_num_patterns(part) for key, part in schema.items() if key not in _DATA)


@lru_cache(maxsize=4)
def _tokens(tokenizer: Any, vocab_size: int, eos_ids: frozenset[int]) -> Any:
    """Tokens in llguidance's format; takes a second for a large vocabulary. Raises ValueError."""
    if isinstance(tokenizer, FastTokenizer):
        from llguidance import LLTokenizer

        return LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=vocab_size, eos_token=sorted(eos_ids))
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_ids))


@lru_cache(maxsize=8)
def _at_the_beginning(tokens: Any, grammar: str) -> Any:
    """Matcher to be copied: a request may ask for several sequences of one grammar, and the next request for more. Its
    first mask may take long; computed here, it delays no other sequence."""
    llguidance = _llguidance()
    limits = llguidance.LLParserLimits(step_max_items=_MOST_ITEMS)
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
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
    text, _, _ = str(message).partition("<state>")  # the rest is for llguidance's developers
    text = re.split(r"\n +\d+ \|", text)[0]  # a line of the grammar, with a caret below it
    return " ".join(text.split())[:200]  # which may quote the grammar
