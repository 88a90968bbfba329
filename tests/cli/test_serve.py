"""``outrider serve`` where it does not come to serving. (tests/serve has the rest.)"""

import logging
import re
import socket
from pathlib import Path

import pytest

from commands import Outrider
from outrider.cli.commands.serve import _log_on_stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "without --api-key only loopback is allowed"),
        (["--slots", 0], r"'--slots': (Input should be greater|-?\d+ is not in the range)"),
        (["--context", 1], r"'--context': (Input|-?\d+ is not in the range)"),
        (["--max-queue", -1], r"'--max-queue': (Input|-?\d+ is not in the range)"),
        (["--max-per-client", 0], r"'--max-per-client': (Input|-?\d+ is not in the range)"),
        (["--max-connections", 1], r"'--max-connections': (Input|-?\d+ is not in the range)"),
        (["--shutdown-timeout", -1], r"'--shutdown-timeout': (Input|-1.0 is not in the range)"),
        (["--port", 70_000], "choose another address or port"),
        (["-k", "1,2"], "this command takes one number, or auto"),
    ],
)
@pytest.mark.usefixtures("unloaded")
def test_bad_options(
    outrider: Outrider, monkeypatch: pytest.MonkeyPatch, arguments: list[object], message: str
) -> None:
    """An empty key is none."""
    monkeypatch.setenv("OUTRIDER_API_KEY", "")
    assert re.search(message, outrider("serve", *arguments).error)


@pytest.mark.usefixtures("unloaded")
def test_an_empty_shared_prompt(outrider: Outrider, tmp_path: Path) -> None:
    (file := tmp_path / "system.txt").write_text("\n")
    assert re.search(
        r"--shared-prompt.*system\.txt.*the file is empty", outrider("serve", "--shared-prompt", file).error
    )


def test_a_port_that_is_taken(outrider: Outrider) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in outrider("serve", "--port", port).error


def test_the_log_tells_that_kernels_are_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the form of all its lines, once each."""
    monkeypatch.setattr(logging.getLogger("outrider.kernels"), "handlers", [])  # of other commands
    with _log_on_stderr():
        logging.getLogger("outrider.kernels.library").info("1 of 6 files are compiled")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(" INFO outrider.kernels.library: 1 of 6 files are compiled")
