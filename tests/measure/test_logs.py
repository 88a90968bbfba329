"""Logs and files of rounds: they are read as written, and what is wrong with a file is named."""

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
from outrider.measure.rounds_file import RecordedArm, read_file, read_rounds, read_tensors
from outrider.measure.tau import stats_of
from outrider.options import Sampling
from outrider.records import Stats
from outrider.sampling.rules import RULES
from reference import hf_probs
from toys import StopAt, llama_pair, request, run

V = 50


def _row(index: int = 0, **changes: Any) -> dict[str, Any]:
    model = {"name": "target", "vocab_size": V, "context_len": 64, "eos_ids": [5], "tokenizer": "abc"}
    settings = {"dtype": "auto", "draft": "none", "temperature": 0.5, "max_new_tokens": 3, "probs": True}
    row = {"index": index, "prompt": "ü \u2028", "prompt_ids": [1, 2], "token_ids": [3, 4, index % V]}
    row |= {"seed": 7 + index}
    row |= {"finish_reason": "length", "probs": [0.5, 1e-30, 1 / 3], "model": model, "settings": settings}
    return row | changes


def _write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_log_is_read_in_the_order_of_the_prompts_with_every_option(tmp_path: Path) -> None:
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
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.2, logit_bias={3: -float("inf"), 5: 0.1}, stop=("a", "b"))
    settings = {"dtype": "auto", "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 3, "logprobs": 2}
    settings |= {"repetition_penalty": 1.2, "logit_bias": ["3=-inf", "5=0.1"], "stop": ["a", "b"]}
    log = Log.open(_write(path, _row(settings=settings)))
    assert log.header.sampling == sampling and not log.header.has_probs and log.records[0].probs is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("model"), "line 2 is not of a log: create one with outrider generate --output"),
        (lambda row: row["settings"].update(temperature=0.6), "line 2 has other settings than the lines before"),
        (lambda row: row["settings"].update(regex="a+"), r"the output of a constraint \(regex\)"),
        (lambda row: row.update(token_ids=[V]), "line 2 is damaged"),
        (lambda row: row.update(probs=[0.1, 0.2, float("nan")]), "line 2 is damaged"),
        (lambda row: row.pop("probs"), "line 2 is damaged"),
        (lambda row: row.update(index=0), "line 2: duplicates prompt 0"),
    ],
)
def test_logs_name_what_is_wrong(tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str) -> None:
    row = _row(1)
    change(row)
    with pytest.raises(FileError, match=message):
        Log.open(_write(tmp_path / "log", _row(), row))


def test_recorded_probabilities_are_those_of_hugging_faces_processors() -> None:
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


def test_rounds_from_origins_are_those_of_the_loop(tmp_path: Path) -> None:
    """Sequences end at limits and at end tokens within a round, at several K."""
    target, drafter = llama_pair()
    rows, wanted = [], {}
    for k in (1, 3, 6):
        requests = [request([1 + i, 2], StopAt(5), i, max_new_tokens=17) for i in range(8)]
        for i, output in enumerate(run(target, drafter, requests, RULES["block"], k)):
            whole = [(row.num_drafted, row.num_accepted) for row in output.rounds if not row.is_truncated]
            wanted[k, i] = stats_of(whole, len(output.rounds) - len(whole), len(output.token_ids))
            assert wanted[k, i].to_json() == output.stats.to_json()
            origins = [origin for row in output.rounds for origin in row.origins]
            settings = {"draft": "draft", "num_draft_tokens": k, "acceptance": "block"}
            row = {"index": i, "prompt": "a\u2028b", "origins": origins, "settings": settings}
            rows.append(row | {"stats": output.stats.to_json()})
    arms, _ = read_file(_write(tmp_path / "out.jsonl", *rows))
    assert list(arms) == [RecordedArm("draft", k, "block") for k in (1, 3, 6)]
    assert {(arm.k, index): one for arm, prompts in arms.items() for index, _, one in prompts} == wanted
    assert any(counts.num_truncated_rounds for counts in wanted.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stats": {"acceptance_histogram": [0, 1], "drafted_histogram": [0, 2]}}, "line 2: not a line of generate"),
        ({"origins": ["accepted", "bonus", "drafted"]}, "line 2: not a line of generate"),
        ({"settings": None}, "line 2: not a line of generate"),
        ({}, "line 2: duplicates prompt 0: give each run by itself"),
    ],
)
def test_rounds_refuse_other_records(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    stats = Stats(acceptance_histogram=(0, 1), drafted_histogram=(0, 1)).to_json()
    settings = {"draft": "d", "num_draft_tokens": 1, "acceptance": "block"}
    row = {"index": 0, "origins": ["accepted", "bonus"], "stats": stats, "settings": settings}
    with pytest.raises(FileError, match=message):
        read_file(_write(tmp_path / "rounds.jsonl", row, row | change))


def test_tensors_and_counts_as_print_writes_them(tmp_path: Path) -> None:
    """Over several lines, with a device, of several rows; and cumulative counts, whose batch ends at a decrease."""
    path = tmp_path / "file"
    path.write_text(
        "tensor([[1, 2,\n         3]],\n       device='cuda:0')tensor([[5]])\n\ntensor([[1, 22],\n [3, 4]])\n"
    )
    assert read_tensors(path) == [(1, 2, 3), (5,), (1, 22), (3, 4)]
    counts = [[3, 1, 5], [2, 2], [3, 1, 1, 1], [1]]
    for lines, committed in (
        ("3 4 9 2 4 3 4 5 6 1", counts),
        ("3,2 4,4 9,4 3,1 4,1 5,1 6,1", counts),
        ("3,2,3,1 4,4,4,1 9,4,5,1 9,4,6,1", counts),
        ("1 3 4 2 4", [[1, 2, 1], [2, 2]]),  # the guess fails: [1, 2] and [4] look like one prompt
    ):
        path.write_text("".join(f"[{line.replace(',', ', ')}]\n" for line in lines.split()))
        assert read_rounds(path) == committed
    assert read_rounds(path, tokens_per_prompt=3) == [[1, 2], [4], [2, 2]]
    arms, notes = read_file(path)
    assert len(notes) == 2 and "guessed from decreases" in notes[0]
    assert [one.mean_acceptance_length for *_, one in arms[RecordedArm()]] == [4 / 3, 2]
    with pytest.raises(FileError, match="a round accepted 1 drafted tokens, .* with K = 0"):
        read_file(path, k=0)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (Log.open, "", "no records yet"),
        (Log.open, "rubbish\n", "not JSON"),
        (read_tensors, f"tensor([[1, 2]])\n\n{torch.arange(5000)[None]}", "line 3: expected tensor.*; print all ids"),
        (read_tensors, "tensor([[1]])\ntensor([[1,\n -2]])", "line 2: expected tensor"),
        (read_rounds, "", "no rounds"),
        (read_rounds, f"[1]\n[{'9' * 5000}]", "line 2: expected counts"),
        (lambda path: read_rounds(path, 5), "[2]\n[4]\n[1]\n[5]\n", "line 3: a sequence ended after 4 tokens, not 5"),
    ],
)
def test_rounds_file_refuses_others(tmp_path: Path, read: Callable[[Path], object], text: str, message: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(FileError, match=message):
        read(tmp_path / "file")
    with pytest.raises(FileError, match="cannot read"):
        read(tmp_path / "nowhere")
