"""Constraints are read first by a process with limits: its verdicts, and how it ends."""

import json
import subprocess

import pytest
from llguidance import LLMatcher, grammar_from

from outrider.errors import ConstraintNotRead
from outrider.text import structure
from outrider.text.structure import _can_be_read

LONG_S = 600  # beyond any test
SLOW = LLMatcher.grammar_from_json_schema(
    json.dumps({"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]})
)
QUICK = grammar_from("regex", "\u00e9")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    _can_be_read.cache_clear()


def test_each_limit_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the verdict is remembered, as is that on a grammar within the limits."""
    monkeypatch.setattr(structure, "_MOST_CHECK_S", LONG_S)
    assert _can_be_read(QUICK)
    for name, limit, other in (("_MOST_CPU_S", 1, "_MOST_MEMORY"), ("_MOST_MEMORY", 2**26, "_MOST_CPU_S")):
        _can_be_read.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(structure, name, limit)
            patch.setattr(structure, other, 2**40)
            assert not _can_be_read(SLOW)
    monkeypatch.setattr(subprocess, "run", None)
    assert not _can_be_read(SLOW)


def _begins_nothing(*arguments: object, **more: object) -> None:
    raise OSError(24, "Too many open files")


def test_the_fault_of_the_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name, value in (
        (structure, "_MOST_CHECK_S", 0.0),  # as where the processor time does not pass
        (structure, "_PROGRAM", "import nothing_of_this_name"),
        # As by a lack of memory.
        (structure, "_PROGRAM", "import os; print(1, flush=True); os.kill(os.getpid(), 9)"),
        (subprocess, "run", _begins_nothing),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConstraintNotRead):
            patch.setattr(place, name, value)
            _can_be_read(QUICK)
    assert _can_be_read(QUICK)


@pytest.mark.parametrize(
    "system",
    ["sys.modules['resource'] = None", "import resource; resource.setrlimit = lambda *_: int('current limit')"],
)
def test_a_system_without_limits(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and macOS refuses that of memory. Grammars can be read all the same, whatever the encoding of
    the terminal."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setattr(structure, "_PROGRAM", f"import sys\n{system}\n{structure._PROGRAM}")
    assert _can_be_read(QUICK)
