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
from outrider.measure.rounds_file import RecordedArm, arms_json, read_file, read_rounds, read_tensors
from outrider.measure.tau import stats_of
from outrider.options import Sampling
from outrider.records import Stats
from outrider.sampling.rules import RULES
from reference import hf_probs
from toys import StopAt, llama_pair, request, run

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
        (lambda row: row["settings"].update(temperature="hot"), "line 2 is not of a log"),
        (lambda row: row["settings"].update(temperature=0.6), "line 2 has other settings than the lines before"),
        (lambda row: row["model"].update(eos_ids=[5, 9]), "or ends at other tokens, as chats do"),
        (lambda row: row["settings"].update(regex="a+"), r"the output of a constraint \(regex\)"),
        (lambda row: row.update(token_ids=[V]), "line 2 is damaged"),
        (lambda row: row.update(index=[1]), "line 2 is damaged"),
        (lambda row: row.update(probs=[0.1, 0.2, float("nan")]), "line 2 is damaged"),
        (lambda row: row.update(token_ids=[]), "line 2 is damaged"),
        (lambda row: row.pop("probs"), "line 2 is damaged"),
        (lambda row: row.update(probs=[0.0]), "line 2 is damaged"),
        (lambda row: row.update(index=0), "line 2: duplicates prompt 0"),
    ],
)
def test_what_is_wrong_with_a_log_is_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
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


def test_a_summary_of_rounds_by_category() -> None:
    rounds = [(2, 2), (2, 0), (2, 1), (1, 1), (2, 2)]
    prompts = [(i, name, stats_of(rounds[: 3 + i], 0, 9 + i)) for i, name in enumerate(["tale", "sum", "tale"])]
    (arm,) = arms_json({RecordedArm(k=2): prompts})
    assert [(one["category"], one["num_prompts"]) for one in arm["categories"]] == [("sum", 1), ("tale", 2)]
    assert arm["tau"]["value"] == pytest.approx(arm["stats"]["mean_acceptance_length"])
    assert arm["prompt_tau"] == pytest.approx(sum(one.mean_acceptance_length for *_, one in prompts) / 3)
    assert arm["positions"][0]["num_drafted"] == 12 and [one["index"] for one in arm["prompts"]] == [0, 1, 2]


GOOD = {
    "index": 0,
    "origins": ["accepted", "bonus"],
    "stats": Stats(acceptance_histogram=(0, 1), drafted_histogram=(0, 1)).to_json(),
    "settings": {"draft": "d", "num_draft_tokens": 1, "acceptance": "block"},
}
OTHER = GOOD | {"settings": GOOD["settings"] | {"acceptance": "gumbel"}}
NO_ROUNDS = "line 2: not a line of generate --output with a draft"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD, {"index": 0}], NO_ROUNDS),
        ([GOOD, [1]], NO_ROUNDS),
        ([GOOD, '{"index": ' + "9" * 5000 + "}"], NO_ROUNDS),
        ([GOOD, "[" * 99_999], NO_ROUNDS),
        ([GOOD, GOOD | {"stats": {"acceptance_histogram": [0, 1], "drafted_histogram": [0, 2]}}], NO_ROUNDS),
        ([GOOD, GOOD | {"stats": {"acceptance_histogram": [0, 1], "drafted_histogram": None}}], NO_ROUNDS),
        ([GOOD, GOOD | {"origins": ["accepted", "bonus", "drafted"]}], NO_ROUNDS),
        ([GOOD, GOOD | {"origins": ["bonus"]}], NO_ROUNDS),
        ([GOOD, GOOD | {"settings": None}], NO_ROUNDS),
        ([GOOD, OTHER, GOOD], "line 3: duplicates prompt 0: give each run by itself"),
        ([" "], "has no rounds in it"),
    ],
)
def test_what_are_no_rounds(tmp_path: Path, rows: list[Any], message: str) -> None:
    path = tmp_path / "rounds.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    with pytest.raises(FileError, match=message):
        read_file(path)


def test_tensors_as_print_writes_them(tmp_path: Path) -> None:
    """Short ones, long ones over several lines, with a device, back to back, of several rows."""
    long = torch.arange(300).view(1, 300)
    path = tmp_path / "log.txt"
    torch.set_printoptions(threshold=10_000)
    try:
        printed = str(long)
    finally:
        torch.set_printoptions(profile="default")
    assert printed.count("\n") > 5
    on_cuda = printed.removesuffix(")") + ",\n       device='cuda:0')"
    two_rows = str(torch.tensor([[1, 22], [333, 4]]))
    path.write_text(f"{printed}\n{on_cuda}tensor([[5]])tensor([[1, 2]], device='cuda:1')\n\n{two_rows}\n")
    assert read_tensors(path) == [tuple(range(300))] * 2 + [(5,), (1, 2), (1, 22), (333, 4)]


@pytest.mark.parametrize(
    ("lines", "committed"),
    [
        ("3 4 9 2 4 3 4 5 6 1", [[3, 1, 5], [2, 2], [3, 1, 1, 1], [1]]),
        ("3,2 4,4 9,4 3,1 4,1 5,1 6,1", [[3, 1, 5], [2, 2], [3, 1, 1, 1], [1]]),
        ("3,2,3,1 4,4,4,1 9,4,5,1 9,4,6,1", [[3, 1, 5], [2, 2], [3, 1, 1, 1], [1]]),
        ("1 3 4 2 4", [[1, 2, 1], [2, 2]]),  # the guess fails: [1, 2] and [4] look like one prompt
    ],
)
def test_a_batch_of_cumulative_counts_ends_where_one_decreases(
    tmp_path: Path, lines: str, committed: list[list[int]]
) -> None:
    path = tmp_path / "rounds.txt"
    path.write_text("".join(f"[{line.replace(',', ', ')}]\n" for line in lines.split()))
    assert read_rounds(path) == committed
    if committed[0] == [1, 2, 1]:
        assert read_rounds(path, tokens_per_prompt=3) == [[1, 2], [4], [2, 2]]
    arms, notes = read_file(path)
    assert len(notes) == 2 and "guessed from decreases" in notes[0]
    most = max(map(max, committed)) - 1
    assert [one.mean_acceptance_length for *_, one in arms[RecordedArm()]] == [sum(x) / len(x) for x in committed]
    assert arms[RecordedArm()][0][2].drafted_histogram == (*[0] * most, len(committed[0]))
    with pytest.raises(FileError, match=f"a round accepted {most} drafted tokens, .* with K = {most - 1}"):
        read_file(path, k=most - 1)


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (Log.open, "", "no records yet"),
        (Log.open, "[3]\n", "not a JSON object"),
        (Log.open, "rubbish\n", "not JSON"),
        (read_tensors, f"tensor([[1, 2]])\n\n{torch.arange(5000)[None]}", "line 3: expected tensor.*; print all ids"),
        (read_tensors, "tensor([[1, 2]])\ntensor([[1, 2]", "line 2: expected tensor"),
        (read_tensors, "tensor([[1.5, 2]])", "line 1: expected tensor"),
        (read_tensors, "tensor([[1]])\ntensor([[1,\n -2]])", "line 2: expected tensor"),
        (read_tensors, "tensor([[1]], grad_fn=<X>)x", "line 1: expected tensor"),
        (read_tensors, "\n\n", "has no tensors in it"),
        (read_tensors, "tensor([[[1]]])", "line 1: expected tensor"),
        (read_tensors, "tensor([])", "line 1: expected tensor"),
        (read_tensors, f"tensor([[1],\n [2,\n\n {'7' * 5000}]])", "line 1: expected tensor"),
        (read_rounds, "[1]\n[x]", "line 2: expected counts"),
        (read_rounds, "[1]\n\n3", "line 3: expected"),
        (read_rounds, "", "no rounds"),
        (read_rounds, "[1]\n[1027]", "line 2: a round of 1026 tokens, but K is at most 1024"),
        (read_rounds, f"[1]\n[{'9' * 5000}]", "line 2: expected counts"),
        (lambda path: read_rounds(path, 5), "[2]\n[4]\n[1]\n[5]\n", "line 3: a sequence ended after 4 tokens, not 5"),
        (lambda path: read_rounds(path, 5), "[2]\n[5]\n[1]\n[4]\n\n", "line 5: a sequence ended after 4 tokens, not 5"),
    ],
)
def test_what_is_no_file_of_this_kind(tmp_path: Path, read: Callable[[Path], object], text: str, message: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(FileError, match=message):
        read(tmp_path / "file")
    with pytest.raises(FileError, match="cannot read"):
        read(tmp_path / "nowhere")
