"""Commands under torchrun: several processes that print, write, fail and end as one."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider
from launch import launched, ranks_of
from pairs import save
from toys import perturbed, tiny_llama

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="the processes are found by their entries there"),
]
# Of torch, and progress on a slow machine.
_NOT_READ = re.compile(r"\[?(rank\d\]:)?[WE]\d{4} |Failed to load .*torchao|loading |(prompts|round costs|race)\b.*: ")
_LONG = ("-n", 200, "--ignore-eos")
_LIMIT_S = 120  # of waiting, which no verdict depends on unless something hangs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, their names, and files of prompts."""
    folder = tmp_path_factory.mktemp("processes")
    model = tiny_llama()
    save(folder / "target", model)
    save(folder / "draft", perturbed(model, 0.1))
    (folder / "names.toml").write_text(
        '[models.shared]\npath = "target"\ntensor_parallel = 2\n[models.draft]\npath = "draft"\n'
    )
    (folder / "prompts").write_text("w1 w2 w3\nw4\nw5 w6\n")
    (folder / "many").write_text("w1 w2 w3\n" * 5000)
    return folder


def _generate(folder: Path, *more: object, target: str = "shared") -> list[object]:
    models = ("--target", target, "--draft", "draft", "--models", folder / "names.toml", "--dtype", "float64")
    return ["generate", *models, "--seed", 1, *more]


def _ended(process: subprocess.Popen[str]) -> tuple[int, str, list[str]]:
    out, err = process.communicate(timeout=_LIMIT_S)
    lines = err.split("Traceback (most recent call last):\n  File", 1)[0].splitlines()
    return process.returncode, out, [line for line in lines if _NOT_READ.match(line) is None]


def _texts(path: Path) -> dict[int, Any]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["index"] for row in rows}) == len(rows)
    return {row["index"]: row["token_ids"] for row in rows}


def test_output_is_that_of_one_process(folder: Path, tmp_path: Path, outrider: Outrider) -> None:
    """The shared target is asked for by its name; rank 0 prints one summary and writes each file once."""
    more = ["--prompts", folder / "prompts", "--batch-size", 2, "-n", 12]
    with launched(
        *["-m", "outrider"], *_generate(folder, *more, "--output", tmp_path / "two", "--json", tmp_path / "j")
    ) as process:
        code, out, err = _ended(process)
    assert (code, out, len(err)) == (0, "", 1), err
    assert re.match(r"\d+ tokens, .* \(shared with draft, K = 4, block", err[0])
    assert json.loads((tmp_path / "j").read_text())["stats"]["num_generated_tokens"] > 0
    outrider(*_generate(folder, *more, "--output", tmp_path / "one", target=str(folder / "target")))
    assert _texts(tmp_path / "two") == _texts(tmp_path / "one")
    refused = outrider(*_generate(folder, "w1", "-n", 4)).error
    assert refused.endswith(
        "shared needs that many processes, not 1: torchrun --nproc-per-node 2 -m outrider COMMAND ..."
    )


@pytest.fixture
def generating(folder: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Two processes in the midst of long work."""
    more = [*_LONG, "--prompts", folder / "many", "--output", tmp_path / "lines"]
    with launched("-m", "outrider", *_generate(folder, *more)) as process:
        end = time.monotonic() + _LIMIT_S
        while not (tmp_path / "lines").exists() or (tmp_path / "lines").stat().st_size == 0:
            assert time.monotonic() < end
            time.sleep(0.05)
        yield process


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_process_that_is_killed_ends_the_job(
    generating: subprocess.Popen[str], rank: str, folder: Path, tmp_path: Path, outrider: Outrider
) -> None:
    """With one clear line, and whole lines in the output: those of one process."""
    os.kill(ranks_of(generating)[rank], signal.SIGKILL)
    code, _, err = _ended(generating)
    assert code != 0
    assert [line for line in err if line.startswith("error: another process of this job was killed")] == err
    assert len(err) == 1
    more = [*_LONG, "--prompts", folder / "prompts", "--output", tmp_path / "one"]  # the first prompt is the same
    outrider(*_generate(folder, *more, target=str(folder / "target")))
    assert _texts(tmp_path / "lines")[0] == _texts(tmp_path / "one")[0]


def test_ctrl_c_ends_all_processes(generating: subprocess.Popen[str], tmp_path: Path) -> None:
    """torchrun hands it on to its processes, and the first tells what was done until then."""
    os.kill(generating.pid, signal.SIGINT)
    code, _, err = _ended(generating)
    assert code != 0
    assert len(err) == 1 and err[0].endswith(", interrupted"), err
    assert _texts(tmp_path / "lines")


def test_error_of_processes_is_printed_once(folder: Path) -> None:
    """That of the process that writes."""
    more = "--prompts", folder / "prompts", "--output", "/dev/full"
    with launched("-m", "outrider", *_generate(folder, *more)) as process:
        code, out, err = _ended(process)
    assert code != 0 and out == "" and "another process" not in "\n".join(err)
    assert "\n".join(err).count("error: cannot write /dev/full: No space left on device") == 1
