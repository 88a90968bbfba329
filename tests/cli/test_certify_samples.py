"""``outrider certify-samples``."""

import json
from pathlib import Path

import pytest

from commands import Outrider, only_document


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts"
    path.write_text("".join(f"{who} {did}\n" for who in ("The king", "A fox", "She") for did in ("went", "was", "saw")))
    return path


@pytest.fixture
def samples(outrider: Outrider, prompts: Path, tmp_path: Path) -> Path:
    """What ``generate`` writes: text, token ids and options."""
    path = tmp_path / "samples"
    assert outrider("generate", "--prompts", prompts, "--output", path, "-t", 0.8, "-n", 40, "--seed", 1).code == 0
    return path


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_what_generate_writes_is_consistent(outrider: Outrider, samples: Path, tmp_path: Path) -> None:
    ended = outrider("certify-samples", "fable", samples, "--draft", "fable-draft", "--json", "-")
    assert ended.code == 0, ended
    document = only_document(ended.out, "certify-samples")
    assert document["shared_options"]["temperature"] == 0.8 and document["verdict"] == "passed"
    assert document["statistical"]["num_texts"] == 8 and document["statistical"]["places"] == []
    assert "CONSISTENT (a correct system fails" in ended.err and "towards the draft" in ended.err
    # The same ids, said to be of another temperature.
    rows = [{key: row[key] for key in ("prompt", "token_ids")} for row in _lines(samples)]
    others = _write(tmp_path / "others", rows)
    assert outrider("certify-samples", "fable", others, "-t", 0.8).code == 0
    ended = outrider("certify-samples", "fable", others, "-t", 2)
    assert ended.code == 1 and "NOT CONSISTENT" in ended.out and "towards a sharper distribution" in ended.out


def test_greedy_texts_and_texts_without_ids(outrider: Outrider, prompts: Path, tmp_path: Path) -> None:
    """In float64, where rounding moves no token."""
    path, wide = tmp_path / "greedy", ("--dtype", "float64")
    outrider("generate", "--prompts", prompts, "--output", path, "-t", 0, "-n", 12, "--draft", "none", *wide)
    rows = [{"prompt": row["prompt"], "text": row["text"], "options": {"temperature": 0}} for row in _lines(path)]
    ended = outrider("certify-samples", "fable", _write(path, rows), "--json", "-", *wide)
    document = only_document(ended.out, "certify-samples")
    assert ended.code == 0 and document["statistical"] is None and document["greedy"][0]["num_texts"] == 9
    assert document["greedy"][0]["differences"] == []
    rows[4]["text"] = " and" * 5
    ended = outrider("certify-samples", "fable", _write(path, rows), *wide)
    assert ended.code == 1 and "line 5 differs from token 0 on" in ended.out and ": bug" in ended.out


def test_certify_samples_names_bad_lines(outrider: Outrider, tmp_path: Path) -> None:
    path = tmp_path / "samples"
    good = {"prompt_ids": [1, 2], "token_ids": [3, 4]}
    for rows, message in (
        ([good], "two samples"),
        ([good, {"prompt": "The king"}], "line 2: give 'token_ids'"),
        ([good, good | {"options": {"temp": 1}}], "line 2: unknown option 'temp'"),
        ([good | {"token_ids": [10**6]}, good], "line 1: a token id outside"),
        ([good | {"token_ids": [3] * 2000}, good], "line 1: 2002 tokens"),
        ([{"prompt": "a", "token_ids": [3], "settings": {"chat": True}}], "give 'prompt_ids'"),
        ([good | {"settings": {"regex": "[a-z]+"}}], "line 1: samples with a regex cannot be tested"),
    ):
        assert message in outrider("certify-samples", "fable", _write(path, rows)).error
    assert "choose another file" in outrider("certify-samples", "fable", path, "--json", path).error


def test_too_few_texts_are_inconclusive(outrider: Outrider, samples: Path, tmp_path: Path) -> None:
    rows = [row | {"token_ids": row["token_ids"][:3]} for row in _lines(samples)[:3]]
    ended = outrider("certify-samples", "fable", _write(tmp_path / "few", rows))
    assert ended.code == 3 and "INCONCLUSIVE: about " in ended.out and "CONSISTENT" not in ended.out
    rows = [*_lines(samples), {"prompt": "The king", "text": " said", "num_tokens": 9}]
    ended = outrider("certify-samples", "fable", _write(tmp_path / "one", rows), "--detect-tv", 0.001, "--json", "-")
    assert "1 texts without certain tokens were left out. The tests run at a level of" in ended.err
    document = only_document(ended.out, "certify-samples")
    assert ended.code == 3 and document["verdict"] == "inconclusive"
    assert document["num_tokens_needed"] > document["statistical"]["num_tokens"]
