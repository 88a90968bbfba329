"""Constraints are read in a process of their own first."""

import llguidance
import pytest

from outrider.text import rehearsal

READ = rehearsal.can_be_read.__wrapped__  # not from its cache
GRAMMAR = llguidance.grammar_from("regex", "a+b")


@pytest.mark.parametrize(
    "system",
    ["sys.modules['resource'] = None", "import resource; resource.setrlimit = lambda *_: int('current limit')"],
)
def test_a_system_without_limits(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has none, and macOS refuses that of memory. Grammars can be read all the same."""
    monkeypatch.setattr(rehearsal, "_PROGRAM", f"import sys\n{system}\n{rehearsal._PROGRAM}")
    assert READ(GRAMMAR)


def test_what_cannot_be_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "_MOST_S", 0.0)
    assert not READ(GRAMMAR)
