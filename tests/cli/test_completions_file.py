"""The file that ``generate --output`` writes when things go wrong: full disks, bad prompts, two runs at once, and more
prompts than memory would hold."""

import json
import os
import resource
import sys
from pathlib import Path

import pytest

from commands import Outrider, only_document
from outrider.errors import FileError
from outrider.offline.jsonl import read_samples
from outrider.offline.output_file import open_output
from pairs import broken_model, random_llama, save

OPTIONS = ("-n", 5, "--seed", 20, "--dtype", "float64")
FULL = Path("/dev/full")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_disk_that_fills_up(output: Path) -> None:
    """In the second line: one line of error, and the line before is kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = f"cannot write {output}: File too large; the lines in it are whole, and the same command continues"
    with open_output(output) as file:
        file.write("first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # no file may be longer
        try:
            with pytest.raises(FileError, match=message):
                file.write("another\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.read_text() == "first\n"


@pytest.mark.usefixtures("unloaded")
def test_one_run_at_a_time(
    outrider: Outrider,
    prompts: Path,
    output: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The second is told so, at once, and before its model is read; and a system without locks is told, too."""
    with open_output(output) as file:
        file.write("first\n")
        message = outrider("generate", "--prompts", prompts, "--output", output).error
    remedy = "another run is writing to it: wait until it has ended, or choose another file"
    assert message == f"cannot write {output}: {remedy}" and output.read_text() == "first\n"
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with open_output(output), open_output(output):
        pass
    assert f"{output} cannot be locked on this system" in caplog.text


def test_a_pipe_may_be_read_and_a_device_written(outrider: Outrider, prompts: Path) -> None:
    """Neither can be read twice, locked or continued. A full one is told."""
    reading, writing = os.pipe()
    os.write(writing, prompts.read_bytes())
    os.close(writing)
    ended = outrider("generate", "--prompts", f"/dev/fd/{reading}", "--output", os.devnull, *OPTIONS)
    os.close(reading)
    assert ended.code == 0 and ended.err.startswith("10 tokens")
    if FULL.exists():
        message = outrider("generate", "--prompts", prompts, "--output", FULL, *OPTIONS).error
        assert f"cannot write {FULL}: No space left on device" in message


def test_a_prompt_that_fails_does_not_end_the_run(outrider: Outrider, tmp_path: Path) -> None:
    """Its row says why, the others have their text, and the exit code says that not all is well; so it does when the
    run is started again, which does not try once more. Commands that read such files find no text there."""
    folder, draft = broken_model(tmp_path / "broken"), save(tmp_path / "good", random_llama())
    prompts, output, document = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "out.json"
    texts = ["w1 w2", "w1 w2 w7", "w3 w4 w5 w6", "w7"]
    prompts.write_text("\n".join(texts))
    arguments = ("generate", "--prompts", prompts, "--output", output, "--json", document, "--target", folder)
    arguments += ("--draft", draft, "-n", 3, "--logit-bias", "7=-inf", "--seed", 1, "--batch-size", 3)
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.endswith(", 2 failed\n")
    rows = {row["prompt"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert set(rows) == set(texts)
    for text, row in rows.items():
        has_failed = "w7" in text.split()
        assert (row["finish_reason"] == "error") == ("error" in row) == (not row["token_ids"]) == has_failed
    assert f"the model {folder} gave NaN or infinite logits for position 3" in rows["w1 w2 w7"]["error"]
    summary = only_document(document.read_text(), "generate")
    assert summary["num_failed"] == 2
    assert summary["stats"]["num_generated_tokens"] == sum(len(row["token_ids"]) for row in rows.values())
    whole = output.read_bytes()
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.startswith("0 tokens") and ended.err.endswith(", 2 failed\n")
    assert output.read_bytes() == whole
    assert outrider("replay", output, "--per-prompt").code == 0
    assert [line.number for line in read_samples(output, ())] == [
        number for number, line in enumerate(whole.splitlines(), start=1) if b"error" not in line
    ]
