"""Constraints are read first by a process with limits: its verdicts, and how it ends."""

import json
import subprocess
import threading
from typing import Any

import pytest
from llguidance import LLMatcher, grammar_from

from outrider.errors import ConstraintNotRead
from outrider.text import constraint_check
from outrider.text.constraint_check import Reading

LONG_S = 600  # beyond any test
SLOW = LLMatcher.grammar_from_json_schema(
    json.dumps({"type": "string", "allOf": [{"pattern": f".*a{i}.*b{i}.*"} for i in range(30)]})
)
QUICK = grammar_from("regex", "\u00e9")


@pytest.fixture(autouse=True)
def _nothing_is_known() -> None:
    constraint_check._verdict.cache_clear()


def test_each_limit_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the verdict is remembered, as is that on a grammar within the limits."""
    monkeypatch.setattr(constraint_check, "_MOST_S", LONG_S)
    assert Reading().can_be_read(QUICK)
    for name, limit, other in (("_MOST_CPU_S", 1, "_MOST_MEMORY"), ("_MOST_MEMORY", 2**26, "_MOST_CPU_S")):
        constraint_check._verdict(SLOW).clear()
        with monkeypatch.context() as patch:
            patch.setattr(constraint_check, name, limit)
            patch.setattr(constraint_check, other, 2**40)
            assert not Reading().can_be_read(SLOW)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert Reading().can_be_read(QUICK) and not Reading().can_be_read(SLOW)


def _begins_nothing(*arguments: object, **more: object) -> None:
    raise OSError(24, "Too many open files")


def test_the_fault_of_the_machine_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, name, value in (
        (constraint_check, "_MOST_S", 0.0),  # as where the processor time does not pass
        (constraint_check, "_PROGRAM", "import nothing_of_this_name"),
        # As by a lack of memory.
        (constraint_check, "_PROGRAM", "import os; print(1, flush=True); os.kill(os.getpid(), 9)"),
        (subprocess, "Popen", _begins_nothing),
    ):
        with monkeypatch.context() as patch, pytest.raises(ConstraintNotRead):
            patch.setattr(place, name, value)
            Reading().can_be_read(QUICK)
    assert Reading().can_be_read(QUICK)


def test_a_reading_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it begins, and while its process runs."""
    monkeypatch.setattr(constraint_check, "_MOST_S", LONG_S)
    monkeypatch.setattr(constraint_check, "_MOST_CPU_S", LONG_S)
    has_begun, processes = threading.Event(), []

    class Noted(subprocess.Popen):
        def communicate(self, *arguments: Any, **more: Any) -> Any:
            processes.append(self)
            has_begun.set()
            return super().communicate(*arguments, **more)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    reading = Reading()

    def stop() -> None:
        has_begun.wait()
        reading.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(ConstraintNotRead):
        reading.can_be_read(SLOW)
    stopping.join()
    with pytest.raises(ConstraintNotRead):
        reading.can_be_read(SLOW)
    assert len(processes) == 1 and processes[0].returncode is not None
    assert not constraint_check._verdict(SLOW)


@pytest.mark.parametrize(
    "system",
    ["sys.modules['resource'] = None", "import resource; resource.setrlimit = lambda *_: int('current limit')"],
)
def test_a_system_without_limits(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and macOS refuses that of memory. Grammars can be read all the same, whatever the encoding of
    the terminal."""
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setattr(constraint_check, "_PROGRAM", f"import sys\n{system}\n{constraint_check._PROGRAM}")
    assert Reading().can_be_read(QUICK)
