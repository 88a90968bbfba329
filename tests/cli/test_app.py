"""The program as it is started: what takes a process of its own to see. Everything else is tested in this process."""

import io
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
from rich.console import Console

from commands import Outrider
from outrider.bench.tables import new_table
from outrider.cli.shared.output import print_table
from pairs import embedded

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
{how}
runpy.run_module("outrider", run_name="__main__")
"""
AFTER_FOUR_CHUNKS = """\
stream = Decoder.stream
def interrupted(*arguments, **options):
    for number, chunk in enumerate(stream(*arguments, **options), start=1):
        yield chunk
        if number == 4:
            os.kill(os.getpid(), signal.SIGINT)
Decoder.stream = interrupted
"""
AFTER_FOUR_TEXTS = """\
complete = Decoder.complete
def killed(*arguments, **options):
    for number, text in enumerate(complete(*arguments, **options), start=1):
        yield text
        if number == 4:
            os.kill(os.getpid(), signal.SIGKILL)
Decoder.complete = killed
"""


def program(how: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", INTERRUPTED.format(how=how), *arguments]


def quiet() -> dict[str, str]:
    """One thread, and no network."""
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_help_answers_at_once() -> None:
    """Imports are what takes its time, and their number, unlike seconds, is the same on every machine: 366 modules when
    this was written, in a quarter of a second; with torch there are 2,000."""
    result = subprocess.run(
        [sys.executable, "-c", ENDING + "print(len(sys.modules))", "--help"], capture_output=True, text=True, check=True
    )
    assert int(result.stdout.splitlines()[-1]) < 600
    for command in ("generate", "compare", "latency", "eval", "record", "replay", "plan", "models"):
        assert f" {command} " in result.stdout


@pytest.mark.parametrize("arguments", ["--help", "generate --help", "compare --help", "models", "replay --help"])
def test_no_torch_before_there_is_work(arguments: str) -> None:
    names = "[name for name in ('torch', 'transformers', 'numpy', 'scipy') if name in sys.modules]"
    result = subprocess.run(
        [sys.executable, "-c", f"{ENDING}print({names})", *arguments.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "[]"


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
        program(AFTER_FOUR_CHUNKS, *arguments),
        capture_output=True,
        env=quiet(),
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


def test_a_killed_run_is_continued(outrider: Outrider, tmp_path: Path) -> None:
    """One that could not even say that it was interrupted: what is in the file is kept, the rest is made."""
    texts = [f"Chapter {i}. Once upon a time" for i in range(8)]
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("".join(f"{text}\n" for text in texts))
    arguments = ["generate", "--prompts", str(prompts), "-n", "6", "--seed", "1", "--dtype", "float64"]
    arguments += ["--batch-size", "2", "--output", str(output)]
    ended = subprocess.run(program(AFTER_FOUR_TEXTS, *arguments), capture_output=True, env=quiet())
    assert ended.returncode == -signal.SIGKILL
    before = output.read_bytes()
    assert before.count(b"\n") == 4 and before.endswith(b"\n")
    output.write_bytes(before + before[:20])  # killed while it wrote a line
    assert outrider(*arguments).code == 0
    assert output.read_bytes().startswith(before)
    rows = sorted((json.loads(line) for line in output.read_text().splitlines()), key=lambda row: row["index"])
    assert [(row["index"], row["prompt"], row["seed"]) for row in rows] == [
        (i, text, 1 + i) for i, text in enumerate(texts)
    ]
    for i in (0, 3, 4, 7):
        assert rows[i]["text"] == embedded("float64").generate(texts[i], seed=1 + i, max_new_tokens=6)[0].text


@pytest.mark.usefixtures("each_is_probed")
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


def test_a_narrow_terminal_cuts_no_number_off() -> None:
    table = new_table("title", "arm", "tokens/s", "speed-up, 95%", "prefill ms", "verify ms", "tau")
    table.add_row("fable-draft", "1234.56789", "1.42 [1.11, 1.81]", "33.44 ±13.21", "22.33 ±44.55", "3.05")
    out = io.StringIO()
    print_table(Console(file=out, width=40, legacy_windows=False), table)
    for cell in ("fable-draft", "1234.56789", "1.42 [1.11, 1.81]", "33.44 ±13.21", "22.33 ±44.55", "3.05"):
        assert cell in out.getvalue()
