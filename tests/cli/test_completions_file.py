"""The file that ``generate --output`` writes when things go wrong: full disks, bad prompts, two runs at once, and more
prompts than memory would hold."""

import json
import os
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.decoder import Decoder
from outrider.errors import FileError
from outrider.offline.jsonl import read_samples
from outrider.offline.output_file import open_output
from outrider.records import Completion, Stats
from outrider.system import file_lock
from pairs import broken_model, random_llama, save

PROMPTS = ["Once upon a time", "8 * 12 = ", "Grüße: 世界", "The king's daughter"]
OPTIONS = ("-n", 5, "--seed", 20, "--dtype", "float64")
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    return path


@pytest.mark.parametrize("num_bytes", [0, 40, 600])
def test_a_disk_that_fills_up_in_mid_run(outrider: Outrider, prompts: Path, tmp_path: Path, num_bytes: int) -> None:
    """So many bytes into the third line: one line of error. The lines before it are kept, and the next run goes on."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    assert outrider(*arguments).code == 0
    whole = output.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[:2])
    output.unlink()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(kept) + num_bytes, hard))  # no file may be longer
    try:
        ended = outrider(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ended.error == (
        f"cannot write {output}: File too large; the lines in it are whole, and the same command continues after them"
    )
    assert output.read_bytes() == kept
    assert outrider(*arguments).code == 0
    assert output.read_bytes() == whole


@needs_full
def test_a_disk_that_is_full_from_the_beginning(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    message = outrider("generate", "--prompts", prompts, "--output", FULL, *OPTIONS).error
    assert f"cannot write {FULL}: No space left on device" in message


def test_a_pipe_may_be_read_and_a_device_written(outrider: Outrider, prompts: Path) -> None:
    """Neither can be read twice, locked or continued."""
    reading, writing = os.pipe()
    os.write(writing, prompts.read_bytes())
    os.close(writing)
    ended = outrider("generate", "--prompts", f"/dev/fd/{reading}", "--output", os.devnull, *OPTIONS)
    os.close(reading)
    assert ended.code == 0 and ended.err.startswith("20 tokens")


def test_ctrl_c_in_the_middle_of_a_line_leaves_none(
    outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(file_lock.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 0:
                super().write(data[:10])
                raise KeyboardInterrupt
            return super().write(data)

    output = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(file_lock, "FileIO", Interrupted)
        ended = outrider("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    assert ended.code == 130
    (line,) = output.read_text().splitlines()
    assert json.loads(line)["prompt"] == PROMPTS[0]


def test_one_run_at_a_time(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """The second is told so, at once, whether the first has written or not; when that has ended, it may."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    message = f"cannot write {output}: another run is writing to it: wait until it has ended, or choose another file"
    with open_output(output) as file:
        assert outrider(*arguments).error == message
        file.write('{"index": 0}\n')
        assert outrider(*arguments).error == message
        assert output.read_text() == '{"index": 0}\n'
    output.unlink()
    assert outrider(*arguments).code == 0


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    """However that ends."""
    output = tmp_path / "out.jsonl"
    code = f"""
import os, sys
from pathlib import Path
from outrider.offline.output_file import open_output
with open_output(Path({str(output)!r})) as file:
    file.write("half")
    print("locked", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"locked\n"
        with pytest.raises(FileError, match="another run is writing to it"), open_output(output):
            pass
        other.kill()
        other.wait()
    with open_output(output) as file:
        file.write("\n")
    assert output.read_text() == "half\n"


def test_a_file_that_its_first_owner_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its being opened and locked by the second: that must not write to a file which nobody will find."""
    output = tmp_path / "out.jsonl"
    lock, removed = file_lock._lock, []

    def late(*arguments: Any) -> None:
        if not removed:
            removed.append(output.unlink())
        lock(*arguments)

    monkeypatch.setattr(file_lock, "_lock", late)
    with open_output(output) as file:
        file.write("here\n")
    assert removed and output.read_text() == "here\n"


def test_a_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    output = tmp_path / "out.jsonl"
    with open_output(output), open_output(output):
        pass
    assert f"{output} cannot be locked on this system" in caplog.text


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_prompt_that_fails_does_not_end_the_run(outrider: Outrider, tmp_path: Path, batch_size: int) -> None:
    """Its row says why, the others have their text, and the exit code says that not all is well; so it does when the
    run is started again, which does not try once more. Commands that read such files find no text there."""
    folder, draft = broken_model(tmp_path / "broken"), save(tmp_path / "good", random_llama())
    prompts, output, document = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "out.json"
    texts = ["w1 w2", "w1 w2 w7", "w3 w4 w5 w6", "w7"]
    prompts.write_text("\n".join(texts))
    arguments = ("generate", "--prompts", prompts, "--output", output, "--json", document, "--target", folder)
    arguments += ("--draft", draft, "-n", 3, "--logit-bias", "7=-inf", "--seed", 1, "--batch-size", batch_size)
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
    """Three hundred of 100,000 characters each; neither do the prompts, which are no smaller."""
    num_prompts, length = 300, 10**5
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
    assert peaks[0] < 30 * length  # a few copies of one row, where all rows are six hundred times that length
    assert only_document(document.read_text(), "generate")["completions"] is None
