"""The command line, run in this process: what it writes, and its exit code."""

import io
import logging
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import typer.main

import outrider.api
from commands import Ended, Outrider, check_written
from outrider.cli.app import main
from outrider.models.loading import load_checkpoint

# Every model is read once; the commands of a session share what is read, not what is made of it. The commands and their
# options are made from the functions' signatures once; that takes longer than parsing.
_checkpoints, _parsers = cache(load_checkpoint), cache(typer.main.get_command)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network, no files of the one who runs the tests, and all as it was at the end."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        monkeypatch.setenv(name, "error")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist's processes have it
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(outrider.api, "load_checkpoint", _checkpoints)
    monkeypatch.setattr(typer.main, "get_command", _parsers)
    monkeypatch.setattr("outrider.cli.shared.progress.FIRST_S", 1e6)  # what is told of slow work depends on the machine
    monkeypatch.setattr("outrider.cli.commands.chat._SMALL_CHAT", "qwen3-8b")  # it may be installed, or not
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)
    logging.getLogger("outrider.decoding").setLevel(logging.NOTSET)  # commands tell of it on standard error


@pytest.fixture(name="outrider")
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Outrider:
    """Run a command with these arguments. If it succeeds, what it wrote is held against examples."""

    def ended(*arguments: object, stdin: bytes | io.StringIO = b"") -> Ended:
        monkeypatch.setattr(sys, "argv", ["outrider", *map(str, arguments)])
        stream = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8") if isinstance(stdin, bytes) else stdin
        monkeypatch.setattr(sys, "stdin", stream)
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        if stop.value.code in (0, None):
            check_written([*map(str, arguments)], captured.out)
        return Ended(int(stop.value.code or 0), captured.out, captured.err)

    return ended


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outrider.api, "load_checkpoint", lambda *_, **__: pytest.fail("a model was read"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("The king\nThe fox and the hen\n")
    return path
