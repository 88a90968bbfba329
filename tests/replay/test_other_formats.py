"""Files of the decoding-speculative-decoding project: both forms, round trips, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import FileError
from outrider.replay import other_formats as module
from outrider.replay.other_formats import read_rounds, read_tensors, round_lines, tensor_text


def test_tensors_as_print_writes_them(tmp_path: Path) -> None:
    """Short ones, long ones over several lines, with a device, back to back, of several rows."""
    long = torch.arange(300).view(1, 300)
    path = tmp_path / "log.txt"
    threshold = torch._tensor_str.PRINT_OPTS.threshold
    torch.set_printoptions(threshold=10_000)
    try:
        printed = str(long)
    finally:
        torch.set_printoptions(threshold=threshold)
    assert printed.count("\n") > 5
    on_cuda = printed.removesuffix(")") + ",\n       device='cuda:0')"
    two_rows = str(torch.tensor([[1, 22], [333, 4]]))
    path.write_text(f"{printed}\n{on_cuda}tensor([[5]])tensor([[1, 2]], device='cuda:1')\n\n{two_rows}\n")
    assert read_tensors(path) == [tuple(range(300))] * 2 + [(5,), (1, 2), (1, 22), (333, 4)]


def test_tensors_there_and_back(tmp_path: Path) -> None:
    texts = [(1, 2, 3), (4,), tuple(range(2000))]
    path = tmp_path / "log.txt"
    path.write_text(tensor_text(texts))
    assert read_tensors(path) == texts
    assert tensor_text(texts[:1]) == f"{torch.tensor([texts[0]])}\n"  # what print would have written


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"tensor([[1, 2]])\n\n{torch.arange(5000)[None]}", "line 3: token ids are left out"),
        ("tensor([[1, 2]])\ntensor([[1, 2]", "line 2: expected tensor"),
        ("tensor([[1.5, 2]])", "line 1: '1.5' is not a token id"),
        ("tensor([[1,\n -2]])", "line 2: '-2' is not a token id"),
        ("tensor([[1]], grad_fn=<X>)x", "line 1: expected tensor"),
        ("\n\n", "has no tensors in it"),
        ("tensor([[[1]]])", "line 1: expected tensor"),
        (f"tensor([[1],\n [2,\n\n {'7' * 5000}]])", "line 4: '777777777777777777...' is not a token id"),
    ],
)
def test_what_is_no_target_log(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_tensors(path)


ROUNDS = [[3, 1, 5], [2, 2], [3, 1, 1, 1], [1]]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_rounds_there_and_back(tmp_path: Path, batch_size: int) -> None:
    """The first round of each prompt is among them. Each batch begins lower than the last ended."""
    path = tmp_path / "rounds.txt"
    path.write_text("".join(round_lines(ROUNDS, batch_size)))
    found = read_rounds(path)
    assert [list(rounds) for rounds in found.prompts] == ROUNDS and found.is_guessed
    if batch_size == 2:
        assert path.read_text().splitlines()[:4] == ["[3, 2]", "[4, 4]", "[9, 4]", "[3, 1]"]


def test_where_the_guess_fails_and_the_number_of_tokens_does_not(tmp_path: Path) -> None:
    """A second prompt whose first round commits as much as the first did in all looks like its continuation."""
    path = tmp_path / "rounds.txt"
    path.write_text("".join(round_lines([[1, 2], [4], [2, 2]], 1)))
    assert read_rounds(path).prompts == ((1, 2, 1), (2, 2))
    found = read_rounds(path, tokens_per_prompt=3)
    assert found.prompts == ((1, 2), (4,), (2, 2)) and not found.is_guessed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]\n[x]", "line 2: expected counts"),
        ("[1]\n\n3", "line 3: expected"),
        ("", "no rounds"),
        ("[1]\n[1027]", "line 2: a round of 1026 tokens, but K is at most 1024"),
        (f"[1]\n[{'9' * 5000}]", "line 2: a count has more than 18 digits"),
    ],
)
def test_what_are_no_rounds(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rounds.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_rounds(path)


def test_a_number_of_tokens_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "rounds.txt"
    path.write_text("[2]\n[4]\n[1]\n[5]\n")
    with pytest.raises(FileError, match="line 3: a sequence ended after 4 tokens, not 5"):
        read_rounds(path, tokens_per_prompt=5)
    path.write_text("[2]\n[5]\n[1]\n[4]\n\n")
    with pytest.raises(FileError, match="line 4: a sequence ended after 4 tokens, not 5"):
        read_rounds(path, tokens_per_prompt=5)


def test_lines_are_counted_for_errors_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them for each row would take quadratic time in a long file."""

    class Text(str):
        def count(self, *arguments: Any) -> int:
            raise AssertionError

    monkeypatch.setattr(module, "read_text", lambda _: Text("tensor([[1,\n  2]])\n" * 50))
    assert len(read_tensors(tmp_path)) == 50
