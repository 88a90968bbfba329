"""Structured output through the public door: what a text must match, it matches, and a seed gives it again."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from llguidance import LLMatcher, grammar_from

from outrider.api import load
from outrider.errors import ConstraintNotRead, MissingExtra, NumericsError, OptionError
from outrider.text import structure
from outrider.text.structure import _can_be_read
from pairs import embedded, random_llama, word_tokenizer

PROMPT = "Once upon a time there was a"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": ["fox", "hen", "king"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6, "format": "unknown"}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = 'start: " " animal (" and a " animal)?\nanimal: "fox" | "hen" | "king"'
REGEX = r" [a-z]{2,9}( [a-z]{1,9}){0,3}\."
_SLOW_SCHEMA = {"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]}


def test_every_text_matches() -> None:
    decoder = embedded("float64")
    options = {"max_new_tokens": 250, "seed": list(range(4))}
    texts = decoder.generate([PROMPT] * 4, json_schema=SCHEMA, **options)
    for value in (json.loads(one.text) for one in texts):
        assert value.keys() == {"name", "age", "tags"} and value["name"] in ("fox", "hen", "king")
        assert 0 <= value["age"] <= 99 and len(value["tags"]) <= 2 and all(len(tag) <= 6 for tag in value["tags"])
    matched = decoder.generate([PROMPT] * 4, regex=REGEX, **options)
    assert all(re.fullmatch(REGEX, one.text) for one in matched)
    spoken = decoder.generate([PROMPT] * 4, grammar=GRAMMAR, temperature=0.7, **options)
    animal = "(fox|hen|king)"
    assert all(re.fullmatch(f" {animal}( and a {animal})?", one.text) for one in spoken)
    for one in (*texts, *matched, *spoken):
        assert one.finish_reason == "eos" and one.token_ids[-1] in decoder.eos_ids
    assert sum(one.stats.num_accepted_draft_tokens for one in matched) > 0
    assert len({one.text for one in matched}) > 2


def test_constrained_rows_among_others() -> None:
    """Each row is, under ``gumbel``, what plain decoding says alone; also resumed where it was cut."""
    decoder = embedded("float64", "gumbel")
    options: dict[str, list[Any]] = {
        "regex": [REGEX, None, None, " (yes|no)", None],
        "json_schema": [None, None, SCHEMA, None, None],
        "grammar": [None, None, None, None, 'root ::= " a" [b-d]+ "!"'],
        "temperature": [1.0, 0.8, 0.0, 1.0, 0.0],
        "presence_penalty": [0.0, 1.0, 0.0, 0.0, 1.5],
        "max_new_tokens": [24, 12, 40, 10, 12],
        "seed": [1, 2, 3, 4, 5],
    }
    prompts = [PROMPT] * 5
    together = decoder.generate(prompts, **options)
    for row, one in enumerate(together):
        mine = {name: values[row] for name, values in options.items()}
        (plain,) = decoder.plain().generate(PROMPT, **mine)
        assert plain.token_ids == one.token_ids
        ids = one.token_ids[: len(one.token_ids) // 2]
        resumed = [i for chunk in decoder.stream(PROMPT, resume_ids=ids, **mine) for i in chunk.token_ids]
        assert (*ids, *resumed) == one.token_ids
    assert together[3].text in (" yes", " no")
    assert re.fullmatch(" a[b-d]+!?", together[4].text)
    with pytest.raises(OptionError, match="resume_ids = .* the constraint forbids this token"):
        decoder.stream(PROMPT, resume_ids=[11, 12, 13], regex=REGEX)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, r"regex = '\(a' is invalid: .*unclosed group"),
    ({"json_schema": {"type": "foo"}}, "json_schema = .* is invalid: Invalid type: foo"),
    ({"json_schema": {"not": {}}}, "Unimplemented keys"),
    ({"regex": "a[^\\s\\S]"}, "regex = .* is invalid: no text matches it"),
    ({"regex": "a", "grammar": "b"}, "grammar = 'b' is invalid: give it or regex, not both"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos = True is invalid: with regex the output ends when"),
    ({"regex": "a", "min_tokens": 2}, "min_tokens = 2 is invalid: with regex"),
    ({"regex": "a", "logit_bias": {5: -float("inf")}}, "logit_bias = -inf .* it may forbid what regex requires"),
    ({"json_schema": _SLOW_SCHEMA}, "too much time or memory"),
    ({"grammar": "start: T\nT: " + " & ".join(["/a/"] * 30)}, "more than 5 operators &"),
    ({"grammar": "start: a\na[max_tokens=3]: /.*/"}, "max_tokens of a rule is not supported"),
    ({"json_schema": {"anyOf": [{"pattern": "a"}] * 1001}}, "it has 1001 patterns, the limit is 1000"),
    ({"regex": "\ud800"}, "surrogates not allowed"),
]


def test_constraints_that_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in REFUSED:
        with pytest.raises(OptionError, match=message) as caught:
            embedded().generate(PROMPT, **options)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    with pytest.raises(OptionError, match="no end token"):
        load(random_llama(97, eos_token_id=None), tokenizer=None).generate([[1, 2]], regex="a")
    with pytest.raises(OptionError, match="the tokenizer cannot be used"):
        load(random_llama(97), tokenizer=word_tokenizer()).generate("w1 w2", regex="w3")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtra, match=r"structured output needs llguidance: pip install '\.\[structured\]'"):
        embedded().generate(PROMPT, regex="a")


_AMBIGUOUS = 'start: a\na: a a | /[a-z ]/ | ""'
_HEAVY = 'start: "A" | "B" a\na: a a | /[a-z ]/ | ""'


def test_a_drafts_fault_ends_no_text() -> None:  # a rejected draft reaches a limit of the grammar
    prompt = "A\nB" + "the king and the queen went out of the " * 9 + "\n"
    decoder = load("fable", "ngram", num_draft_tokens=400)
    (one,) = decoder.generate(prompt, grammar=_HEAVY, temperature=0.0, max_new_tokens=100)
    (plain,) = decoder.plain().generate(prompt, grammar=_HEAVY, temperature=0.0, max_new_tokens=100)
    assert (one.text, one.token_ids) == ("A", plain.token_ids) and one.stats.num_draft_tokens > 100
    # The target's own ends its text alone.
    sampled = {"max_new_tokens": 100, "seed": 1, "logit_bias": dict.fromkeys(embedded().eos_ids, -1e6)}
    rows = dict(embedded().complete([(PROMPT, {"grammar": _AMBIGUOUS}), PROMPT], **sampled))
    assert isinstance(rows[0], NumericsError) and "Too many items" in str(rows[0]) and "\n" not in str(rows[0])
    assert len(rows[1].token_ids) == 100  # type: ignore[union-attr]


_SLOW = LLMatcher.grammar_from_json_schema(json.dumps(_SLOW_SCHEMA))
_QUICK = grammar_from("regex", "\u00e9")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    _can_be_read.cache_clear()


def test_each_limit_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "_MOST_CHECK_S", 600)  # beyond any test
    assert _can_be_read(_QUICK)
    for name, limit, other in (("_MOST_CPU_S", 1, "_MOST_MEMORY"), ("_MOST_MEMORY", 2**26, "_MOST_CPU_S")):
        _can_be_read.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(structure, name, limit)
            patch.setattr(structure, other, 2**40)
            assert not _can_be_read(_SLOW)
    monkeypatch.setattr(subprocess, "run", None)
    assert not _can_be_read(_SLOW)


def test_the_fault_of_the_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a system has no limits, or refuses that of memory, grammars can be read all the same."""
    for name, value in (
        ("_MOST_CHECK_S", 0.0),  # as where the processor time does not pass
        ("_PROGRAM", "import os; print(1, flush=True); os.kill(os.getpid(), 9)"),  # as by a lack of memory
    ):
        with monkeypatch.context() as patch, pytest.raises(ConstraintNotRead):
            patch.setattr(structure, name, value)
            _can_be_read(_QUICK)
    assert _can_be_read(_QUICK)
    refused = "import resource; resource.setrlimit = lambda *_: int('current limit')"
    for system in ("sys.modules['resource'] = None", refused):
        _can_be_read.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(structure, "_PROGRAM", f"import sys\n{system}\n{structure._PROGRAM}")
            assert _can_be_read(_QUICK)
