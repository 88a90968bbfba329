"""Damaged numbers: which there are, and files that differ in these alone."""

import faulthandler
import math
import os
from pathlib import Path

import gguf
import pytest

from gguf_models import CASES, write_case
from scripts import script

fuzz = script("benchmarks/fuzz_files.py")


def test_each_number_has_a_place() -> None:
    document = {"a": 1, "b": {"c": 2.0, "d": "x"}, "e": [3, 4], "f": [[5]], "g": None, "h": ["x"]}
    places = [("a",), ("b", "c"), ("e", 0), ("e",), ("f", 0, 0), ("f", 0), ("f",)]
    assert [*fuzz._places(document)] == places
    subject = fuzz.Subject("model, plain", document, None)
    case = fuzz.Case(subject, ((("e", 0), -1), (("b", "c"), 9)))
    assert case.document == document | {"b": {"c": 9, "d": "x"}, "e": [-1, 4]} and document["e"] == [3, 4]
    assert str(case) == "model, plain: e.0 = -1, b.c = 9"


@pytest.mark.parametrize("value", [-1, 5, 2**32 - 1, 2**40, math.inf])
def test_a_file_with_another_number(value: float, tmp_path: Path) -> None:
    subject = fuzz._gguf_subject("lfm2", write_case(tmp_path / "model.gguf", CASES["lfm2"]), ("", "ngram"))
    changes = ((("lfm2.block_count",), value), (("lfm2.attention.head_count_kv", 0), value))
    file, _ = subject.write(fuzz.Case(subject, changes).document, tmp_path)
    before, after = (gguf.GGUFReader(one) for one in (tmp_path / "model.gguf", file))
    changed = {key for key, one in after.fields.items() if one.contents() != before.fields[key].contents()}
    assert changed == {"lfm2.block_count", "lfm2.attention.head_count_kv"}
    assert after.fields["lfm2.block_count"].contents() == value
    assert after.fields["lfm2.attention.head_count_kv"].contents()[0] == value
    assert [one.name for one in after.tensors] == [one.name for one in before.tensors]


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
