"""The options of each row of a call."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from outrider.errors import OptionError
from outrider.options import Sampling, is_word, nearest

_OPTIONS = [field.name for field in fields(Sampling)]
# Options that are shared by all rows, and where they are given.
_ENGINES = "all rows share it: give it to the call of the decoder, or where the session is opened"
_OF_CALLS = {
    "num_draft_tokens": _ENGINES,
    "num_slots": _ENGINES,
    "acceptance": _ENGINES,
    "is_repeatable": "the calls of a decoder that stream take it, for all rows",
    "reports_drafts": "the calls that stream take it, for all rows",
    "n": "'generate' and 'stream_many' take it, for all prompts",
}
# Options whose value for one row is a list, with the test for its items.
LISTS: dict[str, Callable[[Any], bool]] = {
    "stop": lambda item: isinstance(item, str),
    "stop_token_ids": lambda item: isinstance(item, int),
    "bad_words": is_word,
}


def check_names(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name in _OF_CALLS:
            raise OptionError(name, value, _OF_CALLS[name])
        if name not in _OPTIONS:
            near = nearest(name, (*_OPTIONS, *_OF_CALLS))
            raise OptionError(name, value, f"did you mean {near}?" if near else "there is no such option")


def seed_of(seed: Any, index: int) -> Any:
    """Base seed plus index, for prompt ``index`` of a call. Invalid seeds are left to ``Sampling`` to refuse."""
    is_seed = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    return int(seed) + index if is_seed else seed


def row_options(options: Mapping[str, Any], index: int, num_rows: int, n: int = 1) -> dict[str, Any]:
    """The options of one prompt; the seed is that of the first of its ``n`` completions."""
    row: dict[str, Any] = {}
    for name, value in options.items():
        is_per_row = isinstance(value, (list, tuple))
        if name in LISTS and is_per_row:
            is_per_row = not all(map(LISTS[name], value))
        if is_per_row and len(value) != num_rows:
            raise OptionError(name, value, f"a list needs one value for each of the {num_rows} prompts")
        own = seed_of(value, index * n) if name == "seed" else value
        row[name] = value[index] if is_per_row else own
    return row


def rows_of(
    sampling: Sampling | Sequence[Sampling] | None,
    changes: Mapping[str, Any],
    num_rows: int,
    defaults: Mapping[str, Any],
    n: int = 1,
) -> list[dict[str, Any]]:
    """The options of each completion, ``n`` for each of ``num_rows`` prompts in turn. ``sampling`` are those of all
    rows, with the seed of the first, or of each row; None for ``defaults``. Changes have a value for all rows or a list
    with one for each. Raises OptionError."""
    check_names(changes)
    if sampling is None:
        given = [{**defaults}] * num_rows
    elif isinstance(sampling, Sampling):
        own = fields_of(sampling)
        given = [own | {"seed": seed_of(sampling.seed, index * n)} for index in range(num_rows)]
    elif isinstance(sampling, Sequence) and all(isinstance(one, Sampling) for one in sampling):
        if len(sampling) != num_rows:
            raise OptionError("sampling", f"{len(sampling)} items", f"one for each of the {num_rows} prompts")
        given = [fields_of(one) for one in sampling]
    else:
        remedy = "an outrider.Sampling, or a list with one for each prompt"
        raise OptionError("sampling", type(sampling).__name__, remedy)
    rows = [own | row_options(changes, index, num_rows, n) for index, own in enumerate(given)]
    return [own | {"seed": seed_of(own.get("seed"), copy)} for own in rows for copy in range(n)]


def fields_of(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in _OPTIONS}


def check_tokens(sampling: Sampling, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Check that the vocabulary has the tokens that the options name, and that one may be generated. Raises
    OptionError."""
    bias = sampling.logit_bias or {}
    for name, ids in (("logit_bias", bias), ("stop_token_ids", sampling.stop_token_ids)):
        if max(ids, default=0) >= vocab_size:
            raise OptionError(name, max(ids), f"token ids are below {vocab_size}")
    forbidden = {token_id for token_id, value in bias.items() if value == -math.inf}
    if len(forbidden) == vocab_size:
        raise OptionError("logit_bias", -math.inf, "it forbids every token")
    if sampling.min_tokens and len(forbidden.union(sampling.stop_token_ids, eos_ids)) == vocab_size:
        raise OptionError("min_tokens", sampling.min_tokens, "no token is left that does not end the output")


def check_resume_ids(resume_ids: Any, vocab_size: int) -> None:
    """Raises OptionError."""
    is_list = isinstance(resume_ids, Sequence) and not isinstance(resume_ids, str | bytes)
    if not is_list or not all(isinstance(i, numbers.Integral) for i in resume_ids):
        raise OptionError("resume_ids", resume_ids, "a list of token ids for each prompt")
    if resume_ids and not 0 <= min(resume_ids) <= max(resume_ids) < vocab_size:
        raise OptionError("resume_ids", list(resume_ids)[:8], f"token ids from 0 to {vocab_size - 1}")
