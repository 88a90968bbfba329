"""``outrider certify-samples --server``."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers import Running, running
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import FileError
from pairs import embedded


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts"
    path.write_text("".join(f"{who} {did}\n" for who in ("The king", "A fox", "She") for did in ("went", "was")))
    return path


@pytest.fixture(scope="module")
def right() -> Iterator[Running]:
    with running(embedded()) as one:
        yield one


@pytest.fixture(scope="module")
def wrong() -> Iterator[Running]:
    decoder = embedded()
    with running(replace(decoder, target=decoder.drafter.models[0], drafter=NO_DRAFTER)) as one:
        yield one


def _run(file: Path, *words: object) -> tuple[int, str, Any]:
    page = file.with_suffix(".json")
    command = ["certify-samples", "fable", file, *words, "--json", page, "--threads", 1]
    ended = CliRunner().invoke(app, list(map(str, command)))
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    return ended.exit_code, ended.output, json.loads(page.read_text())


def _lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_server_is_sampled_and_tested(right: Running, wrong: Running, prompts: Path, tmp_path: Path) -> None:
    file, draft = tmp_path / "s.jsonl", ("--draft", "fable-draft")
    more = ("--prompts", prompts, "-n", 24, "--num-texts", 36, "--concurrency", 3, *draft)
    code, out, document = _run(file, "--server", right.url, *more)
    assert code == 0 and "CONSISTENT" in out and document["verdict"] == "passed" and document["plain"] is None
    assert document["num_left_out"] == 0 and not document["is_text"]
    (control,) = document["controls"]
    assert control["is_caught"] and control["name"] == "implanted"
    rows = sorted(_lines(file), key=lambda row: row["index"])
    assert [row["seed"] for row in rows] == list(range(36)) and rows[0]["settings"]["engine"] == "outrider"
    # Cut off in the middle of a line, it goes on; other options are another job's; the file alone is tested again.
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:20]) + kept[20][:30])
    assert _run(file, "--server", right.url, *more)[0] == 0
    assert sorted(_lines(file), key=lambda row: row["index"]) == rows
    with pytest.raises(FileError, match="different settings"):
        _run(file, "--server", right.url, *more, "-t", 0.5)
    assert _run(file, *draft)[2]["statistical"] == _run(file, *draft)[2]["statistical"]
    other = tmp_path / "w.jsonl"
    code, out, document = _run(other, "--server", wrong.url, "--plain-server", right.url, *more)
    assert code == 1 and "NOT CONSISTENT" in out and "the reason is its speculation" in out
    assert document["plain"]["verdict"] == "passed" and document["controls"] == []
    assert document["statistical"]["estimate"] > 0.1 and len(_lines(tmp_path / "w-plain.jsonl")) == 36


def test_texts_that_other_tokens_may_spell_are_left_out(right: Running, prompts: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    assert _run(file, "--server", right.url, "--prompts", prompts, "-n", 16, "--num-texts", 30)[0] in (0, 3)
    rows = [{key: value for key, value in row.items() if key != "token_ids"} for row in _lines(file)]
    rows[4]["num_tokens"] += 1
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, document = _run(file)
    assert code in (0, 3) and document["is_text"] and document["num_left_out"] >= 1
    assert "without certain tokens were left out" in out


def test_greedy_texts_of_two_servers(right: Running, wrong: Running, prompts: Path, tmp_path: Path) -> None:
    more = ("--prompts", prompts, "-n", 8, "--same-bytes")
    code, out, document = _run(tmp_path / "a.jsonl", "--server", right.url, *more)
    assert code == 0 and "THE SAME BYTES" in out and document["greedy"][0]["num_texts"] == 6
    code, out, _ = _run(tmp_path / "b.jsonl", "--server", wrong.url, "--plain-server", right.url, *more)
    assert code == 1 and "NOT THE SAME BYTES" in out and ": bug" in out
