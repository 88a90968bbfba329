"""The file that ``generate --output`` writes when things go wrong: full disks, bad prompts, two runs at once, and more
prompts than memory would hold."""

import json
import os
import resource
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.decoder import Decoder
from outrider.errors import FileError
from outrider.offline import output_file
from outrider.offline.jsonl import read_samples
from outrider.offline.output_file import open_output
from outrider.records import Completion, Stats
from pairs import broken_model, random_llama, save

OPTIONS = ("-n", 5, "--seed", 20, "--dtype", "float64")
FULL = Path("/dev/full")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.parametrize("num_bytes", [0, 4])
def test_a_disk_that_fills_up(output: Path, num_bytes: int) -> None:
    """So many bytes into the second line: one line of error, and the line before is kept."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    message = f"cannot write {output}: File too large; the lines in it are whole, and the same command continues"
    with open_output(output) as file:
        file.write("first\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 + num_bytes, hard))  # no file may be longer
        try:
            with pytest.raises(FileError, match=message):
                file.write("another\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert output.read_text() == "first\n"


def test_ctrl_c_in_the_middle_of_a_line_leaves_none(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(output_file.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 0:
                super().write(data[:3])
                raise KeyboardInterrupt
            return super().write(data)

    monkeypatch.setattr(output_file, "FileIO", Interrupted)
    with pytest.raises(KeyboardInterrupt), open_output(output) as file:
        file.write("first\n")
        file.write("another\n")
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


def test_completions_do_not_pile_up(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of 100,000 characters each; neither do the prompts, which are no smaller."""
    num_prompts, length = 100, 10**5
    prompts, output = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    with prompts.open("w") as stream:
        for index in range(num_prompts):
            stream.write(f"{index} " + "x" * length + "\n")
    peaks: list[int] = []

    def fake(
        self: Decoder, items: Iterable[Any], *, num_slots: int, **options: Any
    ) -> Iterator[tuple[int, Completion]]:
        tracemalloc.start()
        for place, (_, own) in enumerate(items):
            yield place, Completion("y" * length, (1,), ("bonus",), None, "length", Stats(), 1, own["seed"])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()

    monkeypatch.setattr(Decoder, "complete", fake)
    monkeypatch.setattr(Decoder, "encode", lambda self, prompt: [1])
    document = tmp_path / "out.json"
    ended = outrider("generate", "--prompts", prompts, "--output", output, "--json", document, *OPTIONS)
    assert ended.code == 0, ended.err
    assert len(output.read_text().splitlines()) == num_prompts
    assert peaks[0] < 30 * length  # a few copies of one row, where all rows are two hundred times that length
    assert only_document(document.read_text(), "generate")["completions"] is None
