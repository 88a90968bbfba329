"""``outrider generate --prompts``: many prompts from a file, and runs that are continued."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document, rows_of
from outrider.decoder import Decoder
from pairs import embedded

PROMPTS = ["Once upon a time", "8 * 12 = ", "Grüße: 世界\u2028\u0085", "The king's daughter, who lived far away,"]
OPTIONS = ("-n", "5", "--seed", "20", "--dtype", "float64")
ROW_KEYS = {
    "index", "prompt", "prompt_ids", "text", "token_ids", "origins", "finish_reason", "seed", "stats", "settings",
    "model",
}  # fmt: skip


def write(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", PROMPTS)


def said(prompts: list[str] = PROMPTS) -> list[str]:
    """Prompt i with seed + i."""
    decoder = embedded("float64")
    return [decoder.generate(p, seed=20 + i, max_new_tokens=5)[0].text for i, p in enumerate(prompts)]


def test_every_prompt_has_its_line(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """With its own seed, on standard output or in a file; in float64 the same in every batch. The document has no rows
    of a file: it is held in memory until the end. With ``--json -`` the lines go to standard error."""
    arguments = ("generate", "--prompts", prompts, "--batch-size", 3, *OPTIONS)
    ended = outrider(*arguments)
    rows = rows_of(ended.out)
    assert ended.code == 0 and all(set(row) == ROW_KEYS for row in rows)
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
    completions = only_document(ended.out, "generate")["completions"]
    assert completions == [{key: row[key] for key in ROW_KEYS - {"settings", "model"}} for row in rows]


def test_an_interrupted_run_is_continued(
    outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any lines, whole or half-written, whichever they are: in the end the file has the lines that an
    uninterrupted run writes, and what was there is not generated again."""
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
        (lines[:1], lines[1][:-1]),
        (lines[:2], lines[2][: lines[2].index("世".encode()) + 1]),
        (lines, b""),
        ([], b"{"),
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
    for change in (("-n", 9), ("--seed", 21), ("--draft", "ngram"), ("--stop", "x"), ("-k", 3), ("-t", 0.5)):
        error = outrider(*arguments, *change).error
        assert f"{output}, line 1 belongs to another run (different settings)" in error
        assert "choose another output file, or remove this one" in error
    for changed, line in ((["Once upon a time", "else"], 2), (PROMPTS[:2], 3)):
        write(prompts, changed)
        assert f"{output}, line {line} belongs to another run (different prompt" in outrider(*arguments).error
    assert output.read_bytes() == whole
    write(prompts, [*PROMPTS, "And then"])
    assert outrider(*arguments, "--threads", 2, "--allow-pickle").code == 0  # no text depends on them
    assert output.read_bytes().startswith(whole)
    assert [row["text"] for row in rows_of(output.read_text(encoding="utf-8"))] == said([*PROMPTS, "And then"])


def test_a_file_that_is_no_output_or_has_zeros_in_it_is_left_alone(
    outrider: Outrider, prompts: Path, tmp_path: Path
) -> None:
    """Nor is a note without a newline the half-written line of a run. A loss of power can leave zeros before lines that
    are whole: those are not thrown away."""
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


def test_ctrl_c_keeps_the_lines_that_are_done(
    outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert ended.code == 130 and ended.err.endswith(", interrupted\n")
    rows = rows_of(output.read_text(encoding="utf-8"))
    assert [row["text"] for row in rows] == said()[:2]
    summary = only_document(document.read_text(), "generate")
    assert summary["is_interrupted"]
    assert summary["stats"]["num_generated_tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert outrider(*arguments).code == 0
    assert [row["text"] for row in rows_of(output.read_text(encoding="utf-8"))] == said()
