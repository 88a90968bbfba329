"""Long jobs: the order of prompts, and parts of a file."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import Outrider, only_document, rows_of
from outrider.offline.prompt_file import by_length

NUM_PROMPTS = 12
OPTIONS = ("--seed", 20, "--dtype", "float64", "--batch-size", 2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Prompts of 1 to 9 words, with 1 to 4 new tokens."""
    path = tmp_path / "prompts.jsonl"
    rows = []
    for i in range(NUM_PROMPTS):
        rows.append({"prompt": " ".join(["Once"] * (1 + 4 * i % 9)), "max_new_tokens": 1 + 3 * i % 4})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@given(st.lists(st.integers(0, 50), max_size=500), st.integers(2, 3))
def test_windows_are_sorted_by_length(lengths: list[int], num_slots: int) -> None:
    """The longest first; those of one length as they were; each once, and none far from its place."""
    order = list(by_length(iter(range(len(lengths))), lengths, num_slots))
    size = 64 * num_slots
    for start in range(0, len(lengths), size):
        window = range(start, min(start + size, len(lengths)))
        assert order[start : start + size] == sorted(window, key=lambda index: (-lengths[index], index))
    taken: list[int] = []
    unending = by_length((taken.append(i) or i for i in range(10**6)), range(10**6), 2)
    for _ in range(129):
        next(unending)
    assert len(taken) == 256  # a window is all that is held


def test_shards_are_the_whole(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Each line as it is without shards, whatever their number. Their files, put together, are the file of the whole,
    and the whole run finds nothing left to do."""
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "joined.jsonl"
    arguments = ("generate", "--prompts", prompts, *OPTIONS)
    assert outrider(*arguments, "--output", whole).code == 0
    outputs = [tmp_path / f"{number}.jsonl" for number in range(1, 4)]
    for number, output in enumerate(outputs, start=1):
        document = tmp_path / f"{number}.json"
        ended = outrider(*arguments, "--shard", f"{number}/3", "--output", output, "--json", document)
        assert ended.code == 0, ended.err
        assert only_document(document.read_text(), "generate")["options"]["shard"] == f"{number}/3"
    joined.write_bytes(b"".join(output.read_bytes() for output in outputs))
    assert rows_of(joined.read_text()) == rows_of(whole.read_text())
    assert outrider(*arguments, "--output", joined).err.startswith("0 tokens")
    # A shard does not continue the file of another, which is left as it is; its own goes on, and so may the whole run.
    second, text = (*arguments, "--output", outputs[1], "--shard"), outputs[1].read_bytes()
    for other in ("1/3", "1/2"):
        message = outrider(*second, other).error
        assert message.startswith(f"{outputs[1]}, line ") and "is of another shard (prompt " in message
        assert outputs[1].read_bytes() == text
    outputs[1].write_bytes(b"".join(text.splitlines(keepends=True)[:3]))
    assert outrider(*second, "2/3").code == 0
    assert sorted(outputs[1].read_bytes().splitlines()) == sorted(text.splitlines())
    assert outrider(*second[:-1]).code == 0
    assert rows_of(outputs[1].read_text()) == rows_of(whole.read_text())
