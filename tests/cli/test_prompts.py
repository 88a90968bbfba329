"""``outrider generate --prompts``: many prompts from a file, runs that are continued, and parts of a file."""

import json
import os
import resource
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import Outrider, only_document, rows_of
from outrider.decoder import Decoder
from outrider.errors import FileError
from outrider.offline.jsonl import read_samples
from outrider.offline.output_file import open_output
from outrider.offline.prompt_file import by_length
from pairs import broken_model, embedded, random_llama, save

PROMPTS = ["Once upon a time", "8 * 12 = ", "Grüße: 世界\u2028\u0085", "The king's daughter, who lived far away,"]
OPTIONS = ("-n", "5", "--seed", "20", "--dtype", "float64")


def write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def texts_of(output: Path) -> list[str]:
    return [row["text"] for row in rows_of(output.read_text(encoding="utf-8"))]


def said(prompts: list[str] = PROMPTS) -> list[str]:
    decoder = embedded("float64")
    return [decoder.generate(p, seed=20 + i, max_new_tokens=5)[0].text for i, p in enumerate(prompts)]


def test_every_prompt_has_its_line(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """With its own seed; in float64 the same in every batch. With ``--json -`` the lines go to standard error."""
    arguments = ("generate", "--prompts", prompts, "--batch-size", 3, *OPTIONS)
    ended = outrider(*arguments)
    rows = rows_of(ended.out)
    assert [(row["index"], row["seed"], row["prompt"], row["text"]) for row in rows] == [
        (i, 20 + i, prompt, text) for i, (prompt, text) in enumerate(zip(PROMPTS, said(), strict=True))
    ]
    total = sum(row["stats"]["num_generated_tokens"] for row in rows)
    assert ended.err.startswith(f"{total} tokens, ") and ended.err.count("\n") == 1
    output, document = tmp_path / "out.jsonl", tmp_path / "out.json"
    ended = outrider(*arguments, "--output", output, "--json", document)
    assert (ended.code, ended.out) == (0, "") and rows_of(output.read_text(encoding="utf-8")) == rows
    summary = only_document(document.read_text(encoding="utf-8"), "generate")
    assert summary["completions"] is None and summary["num_failed"] == 0 < summary["time_s"]["total"]
    assert summary["stats"]["num_generated_tokens"] == total
    ended = outrider(*arguments, "--json", "-")
    completions = sorted(only_document(ended.out, "generate")["completions"], key=lambda row: row["index"])
    assert completions == [{key: row[key] for key in row.keys() - {"settings", "model"}} for row in rows]


def test_runs_are_continued(outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any lines, whole or half-written: in the end the file has the lines of an uninterrupted run."""
    output = tmp_path / "out.jsonl"
    more = ("--logprobs", 1, "-t", 0.7, "--draft", "ngram", "--logit-bias", "5=-inf", "--batch-size", 2, "--stop", "e")
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS, *more)
    assert outrider(*arguments).code == 0
    lines = sorted(output.read_bytes().splitlines(keepends=True))
    asked: list[list[int]] = []
    complete = Decoder.complete

    def counted(self: Decoder, items: Iterable[Any], **options: Any) -> Iterator[Any]:
        return complete(self, (asked.append(item[0]) or item for item in items), **options)

    monkeypatch.setattr(Decoder, "complete", counted)
    for kept, half in (
        (lines[:3], lines[3][:40]),
        (lines[:2], lines[2][: lines[2].index("世".encode()) + 1]),
        (lines, b""),
        (lines[:2], bytes(4096)),
        (lines[:1], lines[1][:300] + bytes(100) + b"}\n"),
        ([lines[3], lines[1]], lines[0][:40]),
    ):
        output.write_bytes(b"".join(kept) + half)
        asked.clear()
        ended = outrider(*arguments)
        assert ended.code == 0, ended.err
        assert output.read_bytes().startswith(b"".join(kept))
        assert sorted(output.read_bytes().splitlines(keepends=True)) == lines
        assert len(asked) == 4 - len(kept)


def test_the_output_of_another_run_is_left_alone(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """One with other options that the text depends on, or other prompts; more of them are a continuation."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    outrider(*arguments)
    whole = output.read_bytes()
    for change in (("-n", 9), ("--seed", 21), ("--draft", "ngram")):
        error = outrider(*arguments, *change).error
        assert f"{output}, line 1 belongs to another run (different settings)" in error
    for changed, line in ((["Once upon a time", "else"], 2), (PROMPTS[:2], 3)):
        write(prompts, changed)
        assert f"{output}, line {line} belongs to another run (different prompt" in outrider(*arguments).error
    assert output.read_bytes() == whole
    write(prompts, [*PROMPTS, "And then"])
    assert outrider(*arguments, "--threads", 2, "--allow-pickle").code == 0  # no text depends on them
    assert output.read_bytes().startswith(whole)
    assert texts_of(output) == said([*PROMPTS, "And then"])


def test_other_files_and_those_with_zeros_are_left_alone(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """A note without a newline, and whole lines after zeros, which a loss of power can leave, are not thrown away."""
    notes = tmp_path / "notes.txt"
    for content in ("\0\0some notes", "some notes\n", '{"index": 0}\n', "notes\nand no newline"):
        notes.write_text(content)
        assert f"{notes}, line 1" in outrider("generate", "--prompts", prompts, "--output", notes, *OPTIONS).error
        assert notes.read_text() == content
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    assert outrider(*arguments).code == 0
    first, second, *others = output.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, second[:100], bytes(100), second[200:], *others])
    output.write_bytes(damaged)
    assert outrider(*arguments).error.startswith(f"{output}, line 2 has zeros in it, as a power loss leaves them")
    assert output.read_bytes() == damaged


def test_ctrl_c_keeps_lines(outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 130; started again, the run ends as if it had not been interrupted. What is not kept is not counted."""
    output, document = tmp_path / "out.jsonl", tmp_path / "out.json"
    arguments = ("generate", "--prompts", prompts, "--output", output, "--json", document, *OPTIONS)
    complete = Decoder.complete

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield from islice(complete(self, *arguments, **options), 2)
        assert output.read_bytes().count(b"\n") == 2  # each as it is made, so that a run that is killed keeps it
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "complete", interrupted)
        ended = outrider(*arguments)
    assert ended.code == 130 and ended.err.endswith(", interrupted\n") and texts_of(output) == said()[:2]
    summary = only_document(document.read_text(), "generate")
    assert summary["is_interrupted"] and summary["stats"]["num_generated_tokens"] == 10
    assert outrider(*arguments).code == 0 and texts_of(output) == said()


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    """In the second line: one line of error, and the line before is kept."""
    output = tmp_path / "out.jsonl"
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
def test_one_run_at_a_time(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """The second is told so, at once, and before its model is read."""
    output = tmp_path / "out.jsonl"
    with open_output(output) as file:
        file.write("first\n")
        message = outrider("generate", "--prompts", prompts, "--output", output).error
    remedy = "another run is writing to it: wait until it has ended, or choose another file"
    assert message == f"cannot write {output}: {remedy}" and output.read_text() == "first\n"


def test_a_pipe_may_be_read_and_a_device_written(outrider: Outrider, prompts: Path) -> None:
    """Neither can be read twice, locked or continued. A full one is told."""
    reading, writing = os.pipe()
    os.write(writing, prompts.read_bytes())
    os.close(writing)
    ended = outrider("generate", "--prompts", f"/dev/fd/{reading}", "--output", os.devnull, *OPTIONS)
    os.close(reading)
    assert ended.code == 0 and ended.err.startswith("20 tokens")
    if Path("/dev/full").exists():
        message = outrider("generate", "--prompts", prompts, "--output", "/dev/full", *OPTIONS).error
        assert "cannot write /dev/full: No space left on device" in message


def test_a_prompt_that_fails_does_not_end_the_run(outrider: Outrider, tmp_path: Path) -> None:
    """The row says why, and the exit code that not all is well; also of the run started again, which tries no more."""
    folder, draft = broken_model(tmp_path / "broken"), save(tmp_path / "good", random_llama())
    prompts, output, document = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "out.json"
    prompts.write_text("w1 w2\nw1 w2 w7\nw3 w4 w5 w6\nw7")
    arguments = ("generate", "--prompts", prompts, "--output", output, "--json", document, "--target", folder)
    arguments += ("--draft", draft, "-n", 3, "--logit-bias", "7=-inf", "--seed", 1, "--batch-size", 3)
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.endswith(", 2 failed\n")
    rows = rows_of(output.read_text())
    assert ["error" in row for row in rows] == [not row["token_ids"] for row in rows] == [False, True, False, True]
    assert f"the model {folder} gave NaN or infinite logits for position 3" in rows[1]["error"]
    summary = only_document(document.read_text(), "generate")
    assert summary["num_failed"] == 2 and summary["stats"]["num_generated_tokens"] == 6
    whole = output.read_bytes()
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.startswith("0 tokens") and ended.err.endswith(", 2 failed\n")
    assert output.read_bytes() == whole and len([*read_samples(output, ())]) == 2


def test_shards_equal_an_unsharded_run(outrider: Outrider, tmp_path: Path) -> None:
    """Their files, put together, are the file of the whole. A shard does not continue the file of another."""
    prompts, whole, joined = (tmp_path / name for name in ("prompts.jsonl", "whole.jsonl", "joined.jsonl"))
    rows = [{"prompt": " ".join(["Once"] * (1 + 4 * i % 9)), "max_new_tokens": 1 + 3 * i % 4} for i in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("generate", "--prompts", prompts, *OPTIONS, "--batch-size", 2)
    assert outrider(*arguments, "--output", whole).code == 0
    outputs = [tmp_path / f"{number}.jsonl" for number in range(1, 4)]
    for number, output in enumerate(outputs, start=1):
        ended = outrider(*arguments, "--shard", f"{number}/3", "--output", output)
        assert ended.code == 0, ended.err
    joined.write_bytes(b"".join(output.read_bytes() for output in outputs))
    assert rows_of(joined.read_text()) == rows_of(whole.read_text())
    assert outrider(*arguments, "--output", joined).err.startswith("0 tokens")
    second, text = (*arguments, "--output", outputs[1], "--shard"), outputs[1].read_bytes()
    for other in ("1/3", "1/2"):
        message = outrider(*second, other).error
        assert message.startswith(f"{outputs[1]}, line ") and "is of another shard (prompt " in message
        assert outputs[1].read_bytes() == text
    outputs[1].write_bytes(b"".join(text.splitlines(keepends=True)[:3]))
    assert outrider(*second, "2/3").code == 0
    assert sorted(outputs[1].read_bytes().splitlines()) == sorted(text.splitlines())
    assert outrider(*second[:-1]).code == 0
    assert rows_of(outputs[1].read_text()) == rows_of(whole.read_text())


@given(st.lists(st.integers(0, 50), max_size=500), st.integers(2, 3))
def test_windows_are_sorted_by_length(lengths: list[int], num_slots: int) -> None:
    """The longest first; those of one length as they were; each once, none far from its place."""
    order = list(by_length(iter(range(len(lengths))), lengths, num_slots))
    size = 64 * num_slots
    for start in range(0, len(lengths), size):
        window = range(start, min(start + size, len(lengths)))
        assert order[start : start + size] == sorted(window, key=lambda index: (-lengths[index], index))
