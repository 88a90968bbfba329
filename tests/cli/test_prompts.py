"""``outrider generate --prompts``: many prompts from a file, and runs that are continued."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.decoder import Decoder
from pairs import embedded

PROMPTS = ["Once upon a time", "8 * 12 = ", "Grüße: 世界", "The king's daughter, who lived far away,"]
OPTIONS = ("-n", "5", "--seed", "20", "--dtype", "float64")
ROW_KEYS = {
    "index", "prompt", "prompt_ids", "text", "token_ids", "origins", "finish_reason", "seed", "stats", "settings",
    "model",
}  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in PROMPTS), encoding="utf-8")
    return path


def rows_of(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n")
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def said(prompts: list[str] = PROMPTS) -> list[str]:
    """Prompt i with seed + i."""
    decoder = embedded("float64")
    return [decoder.generate(p, seed=20 + i, max_new_tokens=5)[0].text for i, p in enumerate(prompts)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_prompt_has_its_line(outrider: Outrider, prompts: Path, batch_size: int) -> None:
    """With its own seed; in float64 the same in every batch."""
    ended = outrider("generate", "--prompts", prompts, "--batch-size", batch_size, *OPTIONS)
    rows = sorted(rows_of(ended.out), key=itemgetter("index"))
    assert ended.code == 0
    assert [row["prompt"] for row in rows] == PROMPTS
    assert [row["text"] for row in rows] == said()
    assert [(row["index"], row["seed"]) for row in rows] == [(i, 20 + i) for i in range(4)]
    assert all(set(row) == ROW_KEYS for row in rows)
    total = sum(row["stats"]["num_generated_tokens"] for row in rows)
    assert ended.err.startswith(f"{total} tokens, ") and ended.err.count("\n") == 1


def test_json_lines_and_plain_lines_say_the_same(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Notes are left alone, and blank lines and a byte order mark are no prompts."""
    other = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"metadata": i, "prompt": prompt}) for i, prompt in enumerate(PROMPTS)]
    other.write_text("\ufeff\n" + "\n\n".join(lines) + "\n\n", encoding="utf-8")
    plain = outrider("generate", "--prompts", prompts, *OPTIONS)
    assert rows_of(outrider("generate", "--prompts", other, *OPTIONS).out) == rows_of(plain.out)


def test_categories_and_turns(outrider: Outrider, tmp_path: Path) -> None:
    """As in Spec-Bench: the first turn is the prompt; a category is written beside what was said, if there is one."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 81, "category": "writing", "turns": ["Once", "More"]}\n{"prompt": "There"}\n')
    first, second = rows_of(outrider("generate", "--prompts", path, "-n", 2, "--seed", 1).out)
    assert (first["prompt"], first["category"], second["prompt"]) == ("Once", "writing", "There")
    assert set(second) == ROW_KEYS


def test_lines_end_where_other_programs_end_them(outrider: Outrider, tmp_path: Path) -> None:
    """At LF or CRLF: not at the other characters that Python takes for line ends, which JSON may hold as they are."""
    prompt = "Once\u2028upon\u0085a\u2029time\x0c"
    path = tmp_path / "prompts.jsonl"
    row = json.dumps({"prompt": prompt}, ensure_ascii=False)
    path.write_bytes(f"{row}\r\n{row}\r\n".encode())
    ended = outrider("generate", "--prompts", path, "-n", 2, "--seed", 1)
    assert [row["prompt"] for row in rows_of(ended.out)] == [prompt, prompt]
    path.write_bytes(b"Once upon\x0ca time\r\nThere was")
    ended = outrider("generate", "--prompts", path, "-n", 2, "--seed", 1)
    assert [row["prompt"] for row in rows_of(ended.out)] == ["Once upon\x0ca time", "There was"]


def test_output_goes_to_a_file(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """And then standard output has nothing. The document has no rows: it is held in memory until the end."""
    output, document = tmp_path / "out.jsonl", tmp_path / "out.json"
    ended = outrider("generate", "--prompts", prompts, "--output", output, "--json", document, *OPTIONS)
    assert (ended.code, ended.out) == (0, "")
    rows = rows_of(output.read_text(encoding="utf-8"))
    assert [row["text"] for row in rows] == said()
    summary = only_document(document.read_text(encoding="utf-8"), "generate")
    assert summary["completions"] is None
    assert summary["stats"]["num_generated_tokens"] == sum(len(row["token_ids"]) for row in rows)
    assert summary["time_s"]["total"] > 0 and summary["num_failed"] == 0


def test_the_document_stands_alone_on_standard_output(outrider: Outrider, prompts: Path) -> None:
    """With the rows that go to standard error then."""
    ended = outrider("generate", "--prompts", prompts, "--json", "-", *OPTIONS)
    completions = only_document(ended.out, "generate")["completions"]
    rows = [json.loads(line) for line in ended.err.splitlines()[:-1]]
    assert completions == [{key: row[key] for key in ROW_KEYS - {"settings", "model"}} for row in rows]


MORE: list[tuple[Any, ...]] = [
    (),
    ("--batch-size", 2, "--stop", "e", "--stop", "\n"),
    ("--logprobs", 1, "-t", 0.7, "--draft", "ngram", "--logit-bias", "5=-inf", "--logit-bias", "300=1.25"),
]


@pytest.mark.parametrize("more", MORE, ids=lambda more: " ".join(map(str, more)) or "plain")
def test_an_interrupted_run_is_continued(
    outrider: Outrider, prompts: Path, tmp_path: Path, more: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any lines, whole or half-written, whichever they are: in the end the file has the lines that an
    uninterrupted run writes, and what was there is not generated again."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS, *more)
    assert outrider(*arguments).code == 0
    lines = output.read_bytes().splitlines(keepends=True)
    asked: list[list[int]] = []
    complete = Decoder.complete

    def counted(self: Decoder, items: Iterable[Any], **options: Any) -> Iterator[Any]:
        return complete(self, (asked.append(item[0]) or item for item in items), **options)

    monkeypatch.setattr(Decoder, "complete", counted)
    for kept, half in (
        (lines[:2], b""),
        (lines[:3], lines[3][:40]),
        (lines[:1], lines[1][:-1]),
        (lines, b""),
        ([], b"{"),
        (lines[:2], bytes(4096)),
        (lines[:1], lines[1][:300] + bytes(100)),
        (lines[:1], lines[1][:300] + bytes(100) + b"}\n"),
        ([lines[3], lines[1]], lines[0][:40]),
    ):
        output.write_bytes(b"".join(kept) + half)
        asked.clear()
        ended = outrider(*arguments)
        assert ended.code == 0, ended.err
        assert output.read_bytes().startswith(b"".join(kept))
        assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(lines)
        assert len(asked) == 4 - len(kept)


def test_a_line_cut_in_the_middle_of_a_character_is_continued(
    outrider: Outrider, prompts: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    outrider(*arguments)
    whole = output.read_bytes()
    output.write_bytes(whole[: whole.index("世".encode()) + 1])
    ended = outrider(*arguments)
    assert ended.code == 0, ended.err
    assert output.read_bytes() == whole


def test_a_run_with_a_model_file_is_continued(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    models, output = tmp_path / "models.toml", tmp_path / "out.jsonl"
    models.write_text("")
    arguments = ("generate", "--prompts", prompts, "--output", output, "--models", models, *OPTIONS)
    assert outrider(*arguments).code == 0
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    assert outrider(*arguments).code == 0
    assert output.read_bytes() == whole


def test_completions_with_any_characters_are_continued(
    outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line separator in a prompt is not the end of a line of JSON."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a\u2028b", "c\u0085d", "e")))
    arguments = ("generate", "--prompts", prompts, "--output", output, "-n", 2, "--seed", 1)
    assert outrider(*arguments).code == 0
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    ended = outrider(*arguments)
    assert ended.code == 0, ended.err
    assert output.read_bytes() == whole


def test_the_output_of_another_run_is_left_alone(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """One with other options that the text depends on."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    outrider(*arguments)
    whole = output.read_bytes()
    for change in (("-n", 9), ("--seed", 21), ("--draft", "ngram"), ("--stop", "x"), ("-k", 3), ("-t", 0.5)):
        ended = outrider(*arguments, *change)
        assert f"{output}, line 1 belongs to another run (different settings)" in ended.error
        assert "choose another output file, or remove this one" in ended.error
        assert output.read_bytes() == whole


def test_other_prompts_are_another_run(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Changed ones, or fewer; more of them are a continuation."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    outrider(*arguments)
    whole = output.read_bytes()
    for text, line in (("Once upon a time\nelse\n", 2), ("Once upon a time\n8 * 12 = \n", 3)):
        prompts.write_text(text, encoding="utf-8")
        assert f"{output}, line {line} belongs to another run (different prompt" in outrider(*arguments).error
        assert output.read_bytes() == whole
    prompts.write_text("".join(f"{prompt}\n" for prompt in [*PROMPTS, "And then"]), encoding="utf-8")
    assert outrider(*arguments).code == 0
    assert output.read_bytes().startswith(whole)
    assert [row["text"] for row in rows_of(output.read_text(encoding="utf-8"))] == said([*PROMPTS, "And then"])


@pytest.mark.parametrize(
    "content", ["\0\0some notes", "some notes\n", "[1, 2]\n", '{"index": 0}\n', "some notes\nand no newline"]
)
def test_a_file_that_is_no_output_is_left_alone(
    outrider: Outrider, prompts: Path, tmp_path: Path, content: str
) -> None:
    output = tmp_path / "notes.txt"
    output.write_text(content)
    assert f"{output}, line 1" in outrider("generate", "--prompts", prompts, "--output", output, *OPTIONS).error
    assert output.read_text() == content


def test_a_note_without_a_newline_is_left_alone(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """It is not the half-written line of a run, and must not be thrown away as one."""
    output = tmp_path / "notes.txt"
    output.write_text("my only copy of something")
    ended = outrider("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    assert output.read_text() == "my only copy of something"
    assert str(output) in ended.error


def test_zeros_within_a_file_are_reported(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """A loss of power can leave them before lines that are whole: those are not thrown away."""
    output = tmp_path / "out.jsonl"
    arguments = ("generate", "--prompts", prompts, "--output", output, *OPTIONS)
    assert outrider(*arguments).code == 0
    first, second, *others = output.read_bytes().splitlines(keepends=True)
    damaged = b"".join([first, second[:100], bytes(100), second[200:], *others])
    output.write_bytes(damaged)
    assert outrider(*arguments).error.startswith(f"{output}, line 2 has zeros in it, as a power loss leaves them")
    assert output.read_bytes() == damaged
    output.write_bytes(b"".join([first, *others]))
    assert outrider(*arguments).code == 0
    assert output.read_bytes() == b"".join([first, *others, second])


def test_ctrl_c_keeps_the_lines_that_are_done(
    outrider: Outrider, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 130; started again, the run ends as if it had not been interrupted. What is not kept is not counted."""
    output, document = tmp_path / "out.jsonl", tmp_path / "out.json"
    arguments = ("generate", "--prompts", prompts, "--output", output, "--json", document, *OPTIONS)
    complete = Decoder.complete

    def interrupted(self: Decoder, *arguments: Any, **options: Any) -> Iterator[Any]:
        yield from islice(complete(self, *arguments, **options), 2)
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


def test_no_file_is_written_over(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """Neither output by the other, nor the prompts by one of them."""
    path, before = tmp_path / "out.json", prompts.read_bytes()
    arguments = ("generate", "--prompts", prompts, *OPTIONS)
    remedy = "another option reads or writes this file: choose another file"
    assert remedy in outrider(*arguments, "--output", path, "--json", path).error and not path.exists()
    for option in ("--output", "--json"):
        assert remedy in outrider(*arguments, option, prompts).error
    assert prompts.read_bytes() == before
