"""``outrider plan --what-if``."""

from pathlib import Path

import pytest

from commands import Outrider, only_document


def test_the_table_and_the_answer(outrider: Outrider) -> None:
    ended = outrider("plan", "--what-if", "alpha=0.8,c=0.05", "-k", "1-8")
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] and line.split()[0].isdigit()]
    assert [row[0] for row in rows] == [str(k) for k in range(1, 9)]
    assert rows[4] == ["5", "3.69", "2.95", "1.69"]
    assert "Best: K = 8, 3.09 times as fast as plain decoding: outrider generate -k 8" in ended.out
    assert "With a draft that takes no time: 4.33 (K = 8); with one that always agrees: 6.43 (K = 8)." in ended.out


def test_the_answer_may_be_none(outrider: Outrider) -> None:
    """A draft that costs as much as it agrees gains nothing, even with a verify for nothing more than a plain step."""
    document = only_document(outrider("plan", "--what-if", "c=0.5, alpha=0.5", "--json", "-").out, "plan")
    assert document["best"] is None
    assert document["limits"]["agreeing"]["k"] == 12
    assert [one["k"] for one in document["predictions"]] == list(range(1, 13))
    assert document["options"]["what_if"] == {"alpha": 0.5, "c": 0.5, "v": 1.0, "c_ops": 0.5}
    ended = outrider("plan", "--what-if", "alpha=0,c=0,v=2")
    assert "Best: none." in ended.out and "--draft none" in ended.out
    assert "With a draft that takes no time: none either" in ended.out


def test_the_plot(outrider: Outrider, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    assert str(path) in outrider("plan", "--what-if", "alpha=0.7,c=0.1", "--plot", path).out
    assert path.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("what_if", "message"),
    [
        ("alpha=1.2,c=0.1", "0 <= alpha <= 1"),
        ("alpha=0.5,c=-1", "c >= 0"),
        ("alpha=0.5,c=0,v=0", "v > 0"),
        ("alpha=0.5", "c must be given"),
        ("alpha=0.5,c=nan", "numbers for alpha, c, v, c_ops"),
        ("alpha=0.5,c=0.1,c=0.2", "each once"),
        ("alfa=0.5", "like alpha=0.8,c=0.05"),
        ("", "like alpha=0.8,c=0.05"),
    ],
)
def test_bad_numbers(outrider: Outrider, what_if: str, message: str) -> None:
    assert message in outrider("plan", "--what-if", what_if).error


def test_bad_k(outrider: Outrider) -> None:
    assert "like 1-8" in outrider("plan", "--what-if", "alpha=0.5,c=0.1", "-k", "auto").error
