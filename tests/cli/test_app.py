"""The program as it is started: what takes a process of its own to see. Everything else is tested in this process."""

import json
import logging
import os
import signal
import subprocess
import sys
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Outrider

# The program, and what is looked at when it has ended.
ENDING = """\
import sys
from outrider.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
"""

# The program, which after a while gets a signal from the system, by itself: a test that sent it might be kept waiting,
# on a busy machine, until there was nothing left to interrupt.
INTERRUPTED = """\
import os, runpy, signal
from outrider.decoder import Decoder
stream = Decoder.stream
def interrupted(*arguments, **options):
    for number, chunk in enumerate(stream(*arguments, **options), start=1):
        yield chunk
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
Decoder.stream = interrupted
runpy.run_module("outrider", run_name="__main__")
"""


@pytest.mark.parametrize("arguments", ["generate --help", "models"])
def test_no_torch_before_there_is_work(arguments: str) -> None:
    """Imports are what takes the time of help, and their number, unlike seconds, is the same on every machine: 366
    modules when this was written, in a quarter of a second; with torch there are 2,000."""
    heavy = "{'torch', 'transformers', 'numpy', 'scipy'} & sys.modules.keys()"
    code = f"{ENDING}print(len(sys.modules), {heavy})"
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], capture_output=True, text=True, check=True
    )
    num_modules, found = result.stdout.splitlines()[-1].split(" ", 1)
    assert found == "set()" and int(num_modules) < 600


def test_the_program_is_installed_under_its_name(outrider: Outrider) -> None:
    (script,) = [entry for entry in entry_points(group="console_scripts") if entry.name == "outrider"]
    assert script.value == "outrider.cli.app:main"
    ended = outrider("--version")
    assert (ended.code, ended.out) == (0, f"outrider {version('outrider')}\n")


def test_the_libraries_are_kept_quiet(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their warnings would bury the one line that tells what is wrong; who wants them can ask for them."""
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY")
    monkeypatch.setenv("HF_HUB_VERBOSITY", "info")
    outrider("--version")
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert os.environ["HF_HUB_VERBOSITY"] == "info"


def test_verbose_tells_where_texts_end(outrider: Outrider) -> None:
    words = ("generate", "Once", "-n", "2", "-t", "0", "--draft", "none")
    assert "texts end" not in outrider(*words).err
    logger = logging.getLogger("outrider")
    try:
        assert "fable: texts end with 0 <|endoftext|>\n" in outrider("--verbose", *words).err
    finally:
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)


def test_ctrl_c_ends_with_what_was_generated(tmp_path: Path) -> None:
    """The signal itself, in a process that is writing: exit code 130, the text so far, one line of summary."""
    document = tmp_path / "a.json"
    arguments = ["generate", "Once upon a time", "-n", "900", "--ignore-eos", "--seed", "1", "--json", str(document)]
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        capture_output=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        # Where the tests run in the background of a shell, the signal is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert ended.returncode == 130
    (completion,) = json.loads(document.read_text(encoding="utf-8"))["completions"]
    assert 4 <= len(completion["token_ids"]) <= 20
    assert ended.stdout.decode() == completion["text"] + "\n"
    message = ended.stderr.decode()
    assert message.startswith(f"{len(completion['token_ids'])} tokens, ") and message.endswith(", interrupted\n")
    assert message.count("\n") == 1


@pytest.mark.usefixtures("each_is_probed")
def test_a_device_whose_memory_is_full(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, whatever was being done: the model was being tried out here."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("outrider.runtime.lm.LM.forward", fail)
    ended = outrider("generate", "Once", "-n", 3, "--execution", "eager")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("error: out of device memory (CUDA out of memory): choose a narrower --dtype")
    assert ended.err.count("\n") == 1
