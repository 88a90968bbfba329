"""Counts of rounds and files of rounds: against rounds counted by hand, and against the counts of the loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.errors import FileError
from outrider.measure.rounds_file import (
    RecordedArm,
    arms_json,
    read_file,
    read_rounds,
    read_tensors,
)
from outrider.measure.tau import counts_json, stats_of, tau_interval
from outrider.records import Interval, Stats
from outrider.sampling.rules import RULES
from toys import StopAt, llama_pair, request, run

ROUNDS = [(2, 2), (2, 0), (2, 1), (1, 1), (2, 2), (0, 0)]


def test_positions_by_hand() -> None:
    """Position 1 was drafted in five rounds and always judged; position 2 in four, of which one stopped before it."""
    counts = stats_of(ROUNDS, 1, 13)
    rates = ("conditional", 4 / 5, 2 / 3), ("unconditional", 4 / 5, 1 / 2)
    by_hand = [("position", 1, 2), ("num_drafted", 5, 4), ("num_judged", 5, 3), ("num_accepted", 4, 2), *rates]
    first, second = ({name: values[i] for name, *values in by_hand} for i in range(2))
    assert counts_json([stats_of(ROUNDS[:2], 0, 5), stats_of(ROUNDS[2:], 1, 8)])["positions"] == [first, second]
    assert counts.mean_acceptance_length == 2.0 and counts.draft_acceptance_rate == 6 / 9
    assert (counts.acceptance_histogram, counts.drafted_histogram, counts.full_histogram) == (
        (2, 2, 2),
        (1, 1, 4),
        (1, 1, 2),
    )
    assert Stats().mean_acceptance_length is None and tau_interval([Stats()]) is None
    assert counts_json([]) == {"tau": None, "stats": Stats().to_json(), "positions": []}


@pytest.mark.parametrize("accepted", [(0, 0, 0), (2, 2, 2), (2, 2, 0)], ids=str)
def test_tau_stays_within_1_and_k_plus_1(accepted: tuple[int, ...]) -> None:
    """Three prompts of four rounds; also where no draft is accepted, or every one. The last drafts one token."""
    prompts = [stats_of([(2, n)] * 4, 0, 0) for n in accepted]
    for counts in (prompts, [*prompts, stats_of([(1, 0)], 0, 0)]):
        interval = tau_interval(counts)
        assert interval is not None and interval.low is not None and interval.high is not None
        assert 1.0 <= interval.low <= interval.value <= interval.high <= 3.0 and interval.low < interval.high
    assert tau_interval(prompts[:1]).low is None


def test_tau_of_plain_decoding_is_1() -> None:
    assert tau_interval([stats_of([(0, 0)] * 4, 0, 0)] * 2) == Interval(1.0, 1.0, 1.0)


def _lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def test_rounds_from_origins_are_those_of_the_loop(tmp_path: Path) -> None:
    """Sequences end at limits and at end tokens within a round, at several K."""
    target, drafter = llama_pair()
    rows, wanted = [], {}
    for k in (1, 3, 6):
        requests = [request([1 + i, 2], StopAt(5), i, max_new_tokens=17) for i in range(8)]
        for i, output in enumerate(run(target, drafter, requests, RULES["block"], k)):
            whole = [row for row in output.rounds if not row.is_truncated]
            pairs = [(row.num_drafted, row.num_accepted) for row in whole]
            wanted[k, i] = stats_of(pairs, len(output.rounds) - len(whole), len(output.token_ids))
            rows.append(
                {
                    "index": i,
                    "prompt": "a\u2028b",
                    "origins": [origin for row in output.rounds for origin in row.origins],
                    "stats": output.stats.to_json(),
                    "settings": {"draft": "draft", "num_draft_tokens": k, "acceptance": "block"},
                }
            )
    arms, _ = read_file(_lines(tmp_path / "out.jsonl", rows))
    assert list(arms) == [RecordedArm("draft", k, "block") for k in (1, 3, 6)]
    assert {(arm.k, index): one for arm, prompts in arms.items() for index, _, one in prompts} == wanted
    assert any(counts.num_truncated_rounds for counts in wanted.values())
    # And the counts are those that the loop reports.
    for row in rows:
        got = wanted[row["settings"]["num_draft_tokens"], row["index"]].to_json()
        assert got == row["stats"]


def test_a_summary_by_category() -> None:
    prompts = [
        (i, category, stats_of(ROUNDS[: 3 + i], int(bool(i)), 9 + i))
        for i, category in enumerate(["tale", "sum", "tale"])
    ]
    (arm,) = arms_json({RecordedArm(k=2): prompts})
    assert [(one["category"], one["num_prompts"]) for one in arm["categories"]] == [("sum", 1), ("tale", 2)]
    assert arm["tau"]["value"] == pytest.approx(arm["stats"]["mean_acceptance_length"])
    assert arm["prompt_tau"] == pytest.approx(sum(one.mean_acceptance_length for *_, one in prompts) / 3)
    assert arm["positions"][0]["num_drafted"] == 12 and [one["index"] for one in arm["prompts"]] == [0, 1, 2]


def test_lines_of_counts_have_notes(tmp_path: Path) -> None:
    path = tmp_path / "rounds.txt"
    path.write_text("[3]\n[4]\n[2]\n[4]\n")
    arms, notes = read_file(path)
    assert len(notes) == 2 and "guessed from decreases" in notes[0]
    assert [one.acceptance_histogram for *_, one in arms[RecordedArm()]] == [(1, 0, 1), (0, 2)]
    assert arms[RecordedArm()][0][2].drafted_histogram == (0, 0, 2)
    assert read_file(path, tokens_per_prompt=4, k=5)[1] == []
    with pytest.raises(FileError, match="a round accepted 2 drafted tokens, which is impossible with K = 1"):
        read_file(path, k=1)


GOOD = {
    "index": 0,
    "origins": ["accepted", "bonus"],
    "stats": Stats(acceptance_histogram=(0, 1), drafted_histogram=(0, 1)).to_json(),
    "settings": {"draft": "d", "num_draft_tokens": 1, "acceptance": "block"},
}


@pytest.mark.parametrize(
    "bad",
    [
        {"index": 0},
        [1],
        '{"index": ' + "9" * 5000 + "}",
        "[" * 99_999,
        GOOD | {"stats": {"acceptance_histogram": [0, 1], "drafted_histogram": [0, 2]}},
        GOOD | {"stats": {"acceptance_histogram": [0, 1], "drafted_histogram": None}},
        GOOD | {"origins": ["accepted", "bonus", "drafted"]},
        GOOD | {"origins": ["bonus"]},
        GOOD | {"settings": None},
    ],
)
def test_what_are_no_rounds(tmp_path: Path, bad: Any) -> None:
    path = _lines(tmp_path / "rounds.jsonl", [GOOD])
    with path.open("a") as stream:
        stream.write(bad if isinstance(bad, str) else json.dumps(bad))
    with pytest.raises(FileError, match="line 2: not a line of generate --output with a draft"):
        read_file(path)
    other = GOOD | {"settings": GOOD["settings"] | {"acceptance": "gumbel"}}
    assert len(read_file(_lines(path, [GOOD, other]))[0]) == 2
    with pytest.raises(FileError, match="line 3: duplicates prompt 0: give each run by itself"):
        read_file(_lines(path, [GOOD, other, GOOD]))
    path.write_text(" \n")
    with pytest.raises(FileError, match="has no rounds in it"):
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
    ("text", "message"),
    [
        (f"tensor([[1, 2]])\n\n{torch.arange(5000)[None]}", "line 3: expected tensor.*; print all ids, after"),
        ("tensor([[1, 2]])\ntensor([[1, 2]", "line 2: expected tensor"),
        ("tensor([[1.5, 2]])", "line 1: expected tensor"),
        ("tensor([[1]])\ntensor([[1,\n -2]])", "line 2: expected tensor"),
        ("tensor([[1]], grad_fn=<X>)x", "line 1: expected tensor"),
        ("\n\n", "has no tensors in it"),
        ("tensor([[[1]]])", "line 1: expected tensor"),
        ("tensor([])", "line 1: expected tensor"),
        (f"tensor([[1],\n [2,\n\n {'7' * 5000}]])", "line 1: expected tensor"),
    ],
)
def test_what_is_no_target_log(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_tensors(path)


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


@pytest.mark.parametrize(
    ("text", "tokens_per_prompt", "message"),
    [
        ("[1]\n[x]", None, "line 2: expected counts"),
        ("[1]\n\n3", None, "line 3: expected"),
        ("", None, "no rounds"),
        ("[1]\n[1027]", None, "line 2: a round of 1026 tokens, but K is at most 1024"),
        (f"[1]\n[{'9' * 5000}]", None, "line 2: expected counts"),
        ("[2]\n[4]\n[1]\n[5]\n", 5, "line 3: a sequence ended after 4 tokens, not 5"),
        ("[2]\n[5]\n[1]\n[4]\n\n", 5, "line 5: a sequence ended after 4 tokens, not 5"),
    ],
)
def test_what_are_no_counts(tmp_path: Path, text: str, tokens_per_prompt: int | None, message: str) -> None:
    path = tmp_path / "rounds.txt"
    path.write_text(text)
    with pytest.raises(FileError, match=message):
        read_rounds(path, tokens_per_prompt)
