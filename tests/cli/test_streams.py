"""Standard streams that are closed, full, or not read: no command ends in silence with 0 or 1."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider

PROGRAM = (sys.executable, "-m", "outrider")
CLOSED = "error: cannot write to standard output: it is closed (> /dev/null discards it)\n"
FULL = Path("/dev/full")
NO_SPACE = "error: cannot write to standard output: No space left on device"
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


def ended(*arguments: object, closed: tuple[int, ...] = (), **streams: Any) -> subprocess.CompletedProcess[str]:
    """The program, some of whose descriptors are closed."""

    def close() -> None:
        for descriptor in closed:
            os.close(descriptor)

    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.run([*PROGRAM, *map(str, arguments)], text=True, check=False, preexec_fn=close, **streams)


def without_reader() -> int:
    reading, writing = os.pipe()
    os.close(reading)
    return writing


def test_closed_output_is_told() -> None:
    result = ended("--version", closed=(1,))
    assert result.returncode == 2 and result.stderr.endswith(CLOSED)


def test_output_whose_reader_has_left() -> None:
    """The code of SIGPIPE, and nothing else: under ``| head`` it is no mistake."""
    result = ended("--help", stdout=without_reader())
    assert (result.returncode, result.stderr) == (141, "")


def test_lost_messages_change_nothing() -> None:
    """Neither an end that is good, nor one that is not. Closed input is empty."""
    result = ended("--version", stderr=without_reader())
    assert result.returncode == 0 and result.stdout.startswith("outrider ")
    assert ended("--nonsense", closed=(2,)).returncode == 2
    result = ended("generate", closed=(0,))
    assert result.returncode == 2 and result.stderr.startswith("error: the prompt is empty")


@needs_full
def test_a_full_disk_is_told_in_one_line() -> None:
    with FULL.open("w") as full:
        result = ended("--help", stdout=full)
    assert result.returncode == 2 and result.stderr.splitlines()[-1] == NO_SPACE
    assert "Exception" not in result.stderr


@pytest.mark.slow
def test_files_are_written_when_nobody_reads(tmp_path: Path) -> None:
    """Work of hours must not be lost with a table. With all streams closed, no file takes the place of one of them."""
    path = tmp_path / "models.json"
    for code, streams in ((141, {"stdout": without_reader()}), (2, {"closed": (0, 1, 2)})):
        assert ended("models", "--json", path, **streams).returncode == code
        assert json.loads(path.read_text())["schema"] == "outrider/models/1"
        path.unlink()


class Lost(io.StringIO):
    """Takes some writes, and then has no reader."""

    def __init__(self, num_writes: int) -> None:
        super().__init__()
        self._num_writes = num_writes

    def write(self, text: str) -> int:
        self._num_writes -= 1
        return super().write(text)

    def writable(self) -> bool:
        return self._num_writes > 0


@pytest.fixture
def losing(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def run(num_writes: int, *arguments: object) -> Any:
        monkeypatch.setattr(sys, "stdout", Lost(num_writes))
        return outrider(*arguments)

    return run


def test_text_that_nobody_reads_is_not_continued(losing: Callable[..., Any], prompts: Path, tmp_path: Path) -> None:
    """As after Ctrl-C: the document has what was generated, and says so. Nor are rows of a file."""
    document = tmp_path / "out.json"
    result = losing(2, "generate", "Once", "-n", 900, "--ignore-eos", "--seed", 1, "--json", document)
    (row,) = json.loads(document.read_text())["completions"]
    assert 1 <= len(row["token_ids"]) < 20
    assert result.err.startswith(f"{len(row['token_ids'])} tokens, ") and result.err.endswith(", interrupted\n")
    result = losing(1, "generate", "--prompts", prompts, "-n", 2, "--seed", 1)
    assert result.err.startswith("0 tokens") and result.err.endswith(", interrupted\n")


@needs_full
def test_a_text_that_finds_the_disk_full(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "__stdout__", full)
        result = outrider("generate", "-n", 2, "-k", 4, "Once")
    summary, message = result.err.splitlines()
    assert summary.endswith(", interrupted") and (result.code, message) == (2, NO_SPACE)
