"""The program as it is started: help, streams, signals, and what takes a process of its own to see."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Outrider, command_of
from outrider.cli.app import EXAMPLES
from outrider.cli.shared import progress as module
from outrider.cli.shared.progress import count_items, line_of, progress
from outrider.models.registry import known_models
from outrider.options import LOOKUPS

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


@pytest.mark.parametrize("words", ["", "eval", *EXAMPLES])
def test_help_has_all_options_and_the_examples(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """Examples are parsed as the command does, and name models that are known."""
    monkeypatch.setenv("COLUMNS", "80")
    ended = outrider(*words.split(), "--help")
    assert (ended.code, ended.err) == (0, "")
    shown = re.sub(r"\x1b\[[\d;]*m", "", ended.out)
    assert " ".join(f"Usage: outrider {words}".split()) in shown
    params = [param for param in command_of(words).params if param.param_type_name == "option" and not param.hidden]
    assert [param.opts[0] for param in params if not re.search(rf"{param.opts[0]}[ ,]", shown)] == []
    for name, entry in () if words else command_of("").commands.items():
        assert command_of(name).help.startswith(entry.short_help.removesuffix("."))
    for example in EXAMPLES.get(words, ()):
        assert re.search(rf"^ outrider {re.escape(example)} *$", shown, re.MULTILINE)
        params = command_of(words).make_context(words, shlex.split(example.removeprefix(words))).params
        for name in ("first", "target", "draft", "draft_name"):
            value = params.get(name) or []
            for model in [value] if isinstance(value, str) else value:
                assert model.endswith(".gguf") or " " in model or model in {*known_models(), *LOOKUPS, "none"}


def test_output_that_nobody_reads_or_that_cannot_be_written() -> None:
    """No reader (| head) is no mistake; a full disk is one line."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "outrider", "models"]
    ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=env)
        assert ended.returncode == 2 and "No space left on device" in ended.stderr.splitlines()[0]


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
    summary = json.loads(document.read_text(encoding="utf-8"))
    (completion,) = summary["completions"]
    assert 4 <= len(completion["token_ids"]) <= 20 and completion["finish_reason"] is None
    assert summary["is_interrupted"] and completion["stats"]["num_generated_tokens"] == len(completion["token_ids"])
    assert ended.stdout.decode() == completion["text"] + "\n"
    message = ended.stderr.decode().splitlines()[-1]  # a slow machine is told of the loading before
    assert message.startswith(f"{len(completion['token_ids'])} tokens, ") and message.endswith(", interrupted")


@pytest.mark.usefixtures("each_is_probed")
def test_a_device_whose_memory_is_full(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, whatever was being done: the model was being tried out here."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")

    monkeypatch.setattr("outrider.runtime.lm.LM.forward", fail)
    message = outrider("generate", "Once", "-n", 3, "--execution", "eager").error
    assert message.startswith("out of device memory (CUDA out of memory): choose a narrower --dtype")


def test_a_pipe_is_told_of_slow_work(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And of nothing that is quick."""
    told = threading.Event()
    say = module.say

    def saying(line: str) -> None:
        say(line)
        told.set()

    monkeypatch.setattr(module, "say", saying)
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    with progress("runs", 3, done=1) as advance:
        assert [*count_items("ab", advance)] == ["a", "b"]
        told.clear()  # a line may have come before
        assert told.wait(60)
    assert capsys.readouterr().err.splitlines()[-1].startswith("runs: 3 of 3, ")
    assert line_of("runs", 20.0, 40, 30, 10) == "runs: 30 of 40, 20 s, about 20 s left"  # 20 are of earlier runs
    monkeypatch.setattr(module, "FIRST_S", 1e6)
    with progress("runs", 3):
        pass
    assert capsys.readouterr().err == ""
