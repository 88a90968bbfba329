"""Logs: what is recorded, that it is read as written, and that what is wrong with a file is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import FileError
from outrider.measure.log import Header, Log, record_outputs
from outrider.options import Sampling
from reference import hf_probs
from toys import llama_pair

V = 50


def _row(index: int = 0, **changes: Any) -> dict[str, Any]:
    """A line with all that a log needs."""
    return {
        "index": index,
        "prompt": "ü \u2028",
        "prompt_ids": [1, 2],
        "token_ids": [3, 4, index % V],
        "finish_reason": "length",
        "probs": [0.5, 1e-30, 1 / 3],
        "seed": 7 + index,
        "model": {"name": "target", "vocab_size": V, "context_len": 64, "eos_ids": [5], "tokenizer": "abc"},
        "settings": {"dtype": "auto", "draft": "none", "temperature": 0.5, "max_new_tokens": 3, "probs": True},
    } | changes


def _write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def test_lines_are_read_in_the_order_of_the_prompts(tmp_path: Path) -> None:
    """Half a line at the end is not there yet."""
    rows = [_row(2, category="sum"), _row(0), _row(1, finish_reason="error", token_ids=[], error="NaN"), _row(3)]
    path = _write(tmp_path / "log", *rows)
    path.write_bytes(path.read_bytes()[:-9])
    log = Log.open(path)
    assert log.header == Header("target", Sampling(0.5, max_new_tokens=3), True, V, 64, (5,), "abc")
    first, second = log.records
    assert (first.index, first.category, first.seed, first.prompt_ids) == (0, None, 7, (1, 2))
    assert (second.index, second.category, second.token_ids) == (2, "sum", (3, 4, 2))
    assert first.probs == (0.5, 1e-30, 1 / 3) and log.num_failed == 1


def test_every_option_is_read(tmp_path: Path) -> None:
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.2, logit_bias={3: -float("inf"), 5: 0.1}, stop=("a", "b"))
    settings = {"dtype": "auto", "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3, "logprobs": 2}
    settings |= {"repetition_penalty": 1.2, "logit_bias": ["3=-inf", "5=0.1"], "stop": ["a", "b"]}
    log = Log.open(_write(tmp_path / "log", _row(settings=settings)))
    assert log.header.sampling == sampling and not log.header.has_probs and log.records[0].probs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("model"), "line 2 is not of a log: create one with outrider generate --output"),
        (lambda row: row["settings"].update(temperature="hot"), "line 2 is not of a log"),
        (lambda row: row["settings"].update(temperature=0.6), "line 2 has other settings than the lines before"),
        (lambda row: row["model"].update(eos_ids=[5, 9]), "or ends at other tokens, as chats do"),
        (lambda row: row["settings"].update(regex="a+"), r"the output of a constraint \(regex\)"),
        (lambda row: row["settings"].update(bad_words=["a"]), r"the output of a constraint \(bad_words\)"),
        (lambda row: row.update(token_ids=[V]), "line 2 is damaged"),
        (lambda row: row.update(index=[1]), "line 2 is damaged"),
        (lambda row: row.update(probs=[0.1, 0.2, float("nan")]), "line 2 is damaged"),
        (lambda row: row.update(token_ids=[]), "line 2 is damaged"),
        (lambda row: row.pop("probs"), "line 2 is damaged"),
        (lambda row: row.update(probs=[0.0]), "line 2 is damaged"),
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
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(FileError, match="cannot read"):
            Log.open(path)


def test_probabilities_are_those_of_hugging_faces_processors() -> None:
    """Of plain decoding's tokens, against one plain forward. (The numbers are those that float32 holds exactly.)"""
    options = {"temperature": 0.75, "top_k": 9, "repetition_penalty": 1.25, "presence_penalty": 0.5, "min_tokens": 4}
    options["max_new_tokens"] = 12
    prompts = [[1, 2, 3], [9] * 5, [4]]
    decoder = Decoder(llama_pair()[0], None, frozenset([5]), NO_DRAFTER)
    law = Sampling(**options, stop_token_ids=tuple(decoder.eos_ids))
    header, records = record_outputs(decoder, prompts, options | {"seed": 7}, num_slots=2)
    assert header.sampling == Sampling(**options) and header.has_probs and header.eos_ids == (5,)
    for record, ids in zip(records, prompts, strict=True):
        (completion,) = decoder.generate([ids], **options, seed=record.seed)
        assert (record.token_ids, record.finish_reason) == (completion.token_ids, completion.finish_reason)
        text = (*record.prompt_ids, *record.token_ids)
        logits = decoder.target.model(torch.tensor([text])).logits[0]
        want = [
            float(hf_probs(logits[n - 1], text[:n], law, len(ids))[token])
            for n, token in enumerate(record.token_ids, start=len(ids))
        ]
        assert record.probs == pytest.approx(want, abs=1e-9)
