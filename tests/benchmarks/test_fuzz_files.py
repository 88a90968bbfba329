"""The fuzz of damaged numbers: which there are, and what it calls a finding."""

import faulthandler
import os

import pytest

from scripts import script

fuzz = script("benchmarks/fuzz_files.py")


def test_each_number_has_a_place() -> None:
    document = {"a": 1, "b": {"c": 2.0, "d": "x"}, "e": [3, 4], "f": [[5]], "g": None, "h": ["x"]}
    places = [("a",), ("b", "c"), ("e", 0), ("e",), ("f", 0, 0), ("f", 0), ("f",)]
    assert [*fuzz._places(document)] == places
    case = fuzz.Case(fuzz.Subject("model, plain", document, None), ((("e", 0), -1), (("b", "c"), 9)))
    assert case.document == document | {"b": {"c": 9, "d": "x"}, "e": [-1, 4]} and document["e"] == [3, 4]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="for systems that copy processes")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_findings() -> None:
    """A signal, an exception that is none of ours, and memory."""
    ends = {
        "SIGABRT": lambda document, folder: (faulthandler.disable(), os.abort()),
        "ZeroDivisionError": lambda document, folder: 1 // 0,
        "MemoryError": lambda document, folder: bytearray(2**40),
    }
    for name, write in ends.items():
        outcome = fuzz.Child(fuzz.Case(fuzz.Subject("none", {}, write), ())).end()
        assert outcome.startswith(f"FINDING {name}"), outcome
