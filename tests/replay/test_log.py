"""Logs: what is written is read, and what is wrong with a file is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import FileError
from outrider.options import Sampling
from outrider.replay.log import Header, Log, TopProbs

V = 50


def _probs(dtype: torch.dtype) -> TopProbs:
    top = torch.rand(3, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return TopProbs(top[:, 0] / 3, torch.arange(12).view(3, 4), top, top.sum(dim=1) * 1e-9)


def _row(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A line with all that a log needs."""
    return {
        "index": index,
        "prompt": "ü \u2028",
        "prompt_ids": [1, 2],
        "token_ids": [3, 4, index % V],
        "finish_reason": "length",
        "probs": _probs(torch.float32).to_json(),
        "seed": 7 + index,
        "model": {"name": "target", "vocab_size": V, "context_len": 64, "eos_ids": [5], "tokenizer": "abc"},
        "settings": {"dtype": "auto", "draft": "none", "temperature": 0.5, "max_new_tokens": 3, "probs": 4},
    } | changes


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_lines_are_read_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    rows = [_row(2, category="sum"), _row(0), _row(1, finish_reason="error", token_ids=[], error="NaN")]
    log = Log.open(_write(tmp_path / "log", *rows))
    assert log.header == Header("target", Sampling(0.5, max_new_tokens=3), 4, V, 64, (5,), "abc")
    first, second = log
    assert (first.index, first.category, first.seed, first.prompt_ids) == (0, None, 7, (1, 2))
    assert (second.index, second.category, second.token_ids) == (2, "sum", (3, 4, 2))
    assert len(log) == 2 and log.num_failed == 1 and log.num_tokens == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_probabilities_keep_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    want = _probs(dtype)
    settings = _row()["settings"] | {"dtype": "float64" if dtype == torch.float64 else "auto"}
    (record,) = Log.open(_write(tmp_path / "log", _row(probs=want.to_json(), settings=settings)))
    for name in ("token_probs", "top_ids", "top_probs", "tail"):
        got = getattr(record.probs, name)
        assert got.dtype == getattr(want, name).dtype and torch.equal(got, getattr(want, name))


def test_every_option_is_read(tmp_path: Path) -> None:
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.2, logit_bias={3: -float("inf"), 5: 0.1}, stop=("a", "b"))
    settings = {"dtype": "auto", "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3, "logprobs": 2}
    settings |= {"repetition_penalty": 1.2, "logit_bias": ["3=-inf", "5=0.1"], "stop": ["a", "b"]}
    log = Log.open(_write(tmp_path / "log", _row(settings=settings)))
    assert log.header.sampling == sampling and log.header.num_probs is None
    assert next(iter(log)).probs is None


def test_half_a_line_is_not_there_yet(tmp_path: Path) -> None:
    path = _write(tmp_path / "log", _row(), _row(1))
    path.write_bytes(path.read_bytes()[:-9])
    assert len(Log.open(path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("model"), "line 2 is not of a log: create one with outrider record"),
        (lambda row: row.pop("settings"), "line 2 is not of a log"),
        (lambda row: row["settings"].update(temperature="hot"), "line 2 is not of a log"),
        (lambda row: row["settings"].update(temperature=0.6), "line 2 has other settings than the lines before"),
        (lambda row: row["model"].update(name="other"), "line 2 has other settings"),
        (lambda row: row["model"].update(eos_ids=[5, 9]), "or ends at other tokens, as chats do"),
        (lambda row: row["model"].update(eos_ids=["a"]), "line 2 is not of a log"),
        (lambda row: row["settings"].update(regex="a+"), r"the output of a constraint \(regex\)"),
        (lambda row: row["settings"].update(bad_words=["a"]), r"the output of a constraint \(bad_words\)"),
        (lambda row: row.update(token_ids=[V]), "line 2 is damaged"),
        (lambda row: row.update(token_ids=[1.5]), "line 2 is damaged"),
        (lambda row: row.update(index=[1]), "line 2 is damaged"),
        (lambda row: row["probs"]["tail"].__setitem__(0, float("nan")), "line 2 is damaged"),
        (lambda row: row["probs"].update(top=[[0.1] * 3] * 3, top_ids=[[1] * 3] * 3), "line 2 is damaged"),
        (lambda row: row.update(token_ids=[]), "line 2 is damaged"),
        (lambda row: row.pop("probs"), "line 2 is damaged"),
        (lambda row: row["probs"].update(tail=[0.0]), "line 2 is damaged"),
        (lambda row: row["probs"].update(top=[[0.1]] * 3), "line 2 is damaged"),
        (lambda row: row.update(index=0), "line 2: duplicates prompt 0"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    row = _row(1)
    change(row)
    with pytest.raises(FileError, match=message):
        Log.open(_write(tmp_path / "log", _row(), row))


def test_files_that_are_no_logs(tmp_path: Path) -> None:
    cases = [("", "no records yet"), ("[3]\n", "not a JSON object"), ("rubbish\n", "not JSON")]
    for text, message in cases:
        (tmp_path / "log").write_text(text)
        with pytest.raises(FileError, match=message):
            Log.open(tmp_path / "log")
    with pytest.raises(FileError, match="cannot read"):
        Log.open(tmp_path / "nowhere")
    with pytest.raises(FileError, match="is a folder: logs of outrider 0.2"):
        Log.open(tmp_path)
