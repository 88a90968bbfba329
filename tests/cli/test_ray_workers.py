"""``outrider generate --ray``: prompts continued by other processes."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import outrider.errors
from commands import Outrider, only_document

NUM_PROMPTS = 60
OPTIONS = ("-n", 3, "--seed", 20, "--dtype", "float64", "--batch-size", 2)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{'Once ' * (1 + i % 7)}upon a time\n" for i in range(NUM_PROMPTS)))
    return path


def test_errors_go_from_one_process_to_another() -> None:
    own = {"OptionError": ("--top-p", 7, "0 < top_p <= 1"), "MissingExtra": ("ray", "ray")}
    for name in outrider.errors.__all__:
        error = getattr(outrider.errors, name)(*own.get(name, ("text",)))
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and vars(copy) == vars(error)


def on_ray(prompts: Path, output: Path, *more: object) -> tuple[int, str]:
    """Exit code and standard error of the command in a process of its own: Ray starts threads and handles signals."""
    pytest.importorskip("ray", reason="needs the extra 'ray'")
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two workers need two cores")
    command = [sys.executable, "-m", "outrider", "generate", "--prompts", prompts, "--output", output, *OPTIONS]
    command += ["--ray", "local", "--ray-workers", 2, *more]
    done = subprocess.run([str(one) for one in command], stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_two_workers_write_what_one_process_writes(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    output, document, alone = (tmp_path / name for name in ("out.jsonl", "out.json", "alone.jsonl"))
    code, message = on_ray(prompts, output, "--json", document)
    assert code == 0, message
    assert outrider("generate", "--prompts", prompts, "--output", alone, *OPTIONS).code == 0
    whole = sorted(alone.read_text().splitlines())
    assert sorted(output.read_text().splitlines()) == whole
    summary = only_document(document.read_text(), "generate")
    num_tokens = sum(len(json.loads(line)["token_ids"]) for line in whole)
    assert summary["stats"]["num_generated_tokens"] == num_tokens
    assert summary["provenance"]["dtype"] == "float64"


@pytest.mark.slow
def test_an_error_that_a_worker_finds_is_one_line(prompts: Path, tmp_path: Path) -> None:
    with prompts.open("a") as stream:
        stream.write("word " * 2000 + "\n")
    code, message = on_ray(prompts, tmp_path / "out.jsonl")
    assert code == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert f"{prompts}, line 61: the prompt has " in message and not (tmp_path / "out.jsonl").exists()
