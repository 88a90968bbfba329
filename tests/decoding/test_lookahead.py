"""Rounds that are started before the last is read: the same rounds come of it, and between them nothing is read."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import outrider.decoding.engine as decode_module
from outrider.certify.controls import drop_unlikely
from outrider.decoding.batch import Batch, SlotRows
from outrider.decoding.engine import decode
from outrider.decoding.schedule import Schedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.records import Request, Round, RowRound
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.device_timer import Clock
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule
from toys import InTurn, StopAt, as_lm, llama_pair, perturbed, request, run, tiny_llama

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5, (4, 4)]
LOOKAHEADS = pytest.mark.parametrize("lookahead", [1, 2])
PAUSING = (4, 1, 0, 2, 0, 0, 3)


def _pair(lookahead: int) -> tuple[LM, Drafter]:
    """Rounds are started so many ahead."""
    target, drafter = llama_pair()
    target.execution.lookahead = drafter.models[0].execution.lookahead = lookahead
    return target, drafter


def _requests() -> list[Request]:
    """Rows that end one after the other: at a limit, at an end token, under options that look at the text."""
    return [
        request(PROMPTS[0], seed=1, max_new_tokens=23),
        request(PROMPTS[1], StopAt(13), seed=2, max_new_tokens=60, temperature=1.5),
        request(PROMPTS[2], seed=3, max_new_tokens=9, temperature=0.0, repetition_penalty=1.5),
        request(PROMPTS[3], StopAt(12), seed=4, max_new_tokens=40, temperature=1.5),
    ]


@pytest.mark.parametrize(
    ("rule", "drafter_name", "lookahead"),
    [
        (REJECTION, "model", 1),
        (GUMBEL, "model", 1),
        (BLOCK, "cut", 2),
        (REJECTION, "cut", 1),
        (BLOCK, "ngram", 3),
        (GUMBEL, "none", 1),
    ],
)
def test_the_rounds_are_the_same(rule: Rule, drafter_name: str, lookahead: int) -> None:
    def rounds(lookahead: int) -> list[list[RowRound]]:
        target, by_model = _pair(lookahead)
        cut = drop_unlikely(by_model, 0.3)  # fewer tokens than the draft's cache has been fed
        drafters: dict[str, Drafter] = {"model": by_model, "cut": cut, "ngram": ngram_drafter(), "none": NO_DRAFTER}
        outputs = run(target, drafters[drafter_name], _requests(), rule, 0 if drafter_name == "none" else 3)
        # Last bits of log-probabilities depend on which rows are still in the batch.
        return [[dataclasses.replace(row, logprobs=None) for row in output.rounds] for output in outputs]

    expected = rounds(0)
    assert {output[-1].finish_reason for output in expected} == {"length", "eos"}
    assert rounds(lookahead) == expected


@pytest.fixture
def spreads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Differences between the host's bounds of lengths, for each active row in each round. Looks on the device at the
    numbers that they are bounds of."""
    found: list[int] = []

    class Watched(Batch):
        def view(self, num_rows: int, chosen_k: int, most_unread: int, **options: Any) -> SlotRows:
            rows = super().view(num_rows, chosen_k, most_unread, **options)
            wanted = zip(rows.num_wanted.tolist(), rows.most_wanted, strict=True)
            assert all(0 <= num <= most for num, most in wanted)
            for row, length in zip(self.rows, rows.lengths.tolist(), strict=False):
                if row is not None:
                    assert row.length <= length <= min(row.longest(most_unread), rows.longest)
                    found.append(row.longest(most_unread) - row.length)
            return rows

    monkeypatch.setattr(decode_module, "Batch", Watched)
    return found


@LOOKAHEADS
def test_lengths_are_within_their_bounds(lookahead: int, spreads: list[int]) -> None:
    """And pauses do not lose what the draft's cache lacks: with the target as its own draft all tokens stand. Plain
    decoding starts no round beyond a limit, as each of its rounds adds one token."""
    target = as_lm(tiny_llama())
    target.execution.lookahead = lookahead
    for model in (perturbed(tiny_llama(), 0.1), tiny_llama()):
        spreads.clear()
        drafter = model_drafter(as_lm(model, "draft"))
        drafter.models[0].execution.lookahead = lookahead
        rounds = list(decode(target, drafter, _requests(), REJECTION, num_draft_tokens=InTurn(*PAUSING)))
        assert max(spreads) > 0
    first = [row for round_ in rounds for row in round_.rows if row.row == 0]
    assert all(row.num_accepted == row.num_drafted for row in first)
    assert sum(len(row.token_ids) for row in first) == 23
    spreads.clear()
    (output,) = run(target, drafter, [request((1, 2), max_new_tokens=12)], REJECTION, 0)
    assert len(spreads) == len(output.rounds) == 12


def test_loops_that_take_turns_on_the_same_programs() -> None:
    """Also with ones that are given up on the way: what a step gave stands only until the next."""
    target, drafter = llama_pair()
    target.execution, drafter.lm.execution = CapturedExecution(), CapturedExecution()

    def started(seed: int) -> Iterator[Round]:
        requests = [request(ids, seed=seed + i, max_new_tokens=20 + 9 * i) for i, ids in enumerate(PROMPTS)]
        return decode(target, drafter, requests, REJECTION, num_draft_tokens=3)

    alone = [[round_.rows for round_ in started(seed)] for seed in (0, 10)]
    together: list[list[Any]] = [[], []]
    for pair in itertools.zip_longest(started(0), started(10)):
        given_up = started(20)
        next(given_up)
        given_up.close()
        for said, round_ in zip(together, pair, strict=True):
            if round_ is not None:
                said.append(round_.rows)
    assert together == alone


class _NothingIsRead(TorchFunctionMode):
    """On a GPU each of these would make the host wait for all that was started before: what reads a tensor, and what
    copies the host's numbers to the device."""

    waits = {"tolist", "item", "__bool__", "__int__", "__float__", "__index__", "nonzero", "numpy", "cpu", "tensor"}

    def __init__(self) -> None:
        super().__init__()
        self.is_reading = False
        self.num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        assert self.is_reading or func.__name__ not in self.waits, func
        if func.__name__ == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in index), "a list of numbers is copied"
            assert not any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index), "a mask is counted"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> _NothingIsRead:
    mode, read = _NothingIsRead(), decode_module.read

    def reading(*args: Any) -> list[RowRound]:
        mode.is_reading = True
        try:
            return read(*args)
        finally:
            mode.is_reading = False

    monkeypatch.setattr(decode_module, "read", reading)
    return mode


@pytest.mark.parametrize(
    ("rule", "schedule"),
    [(REJECTION, 3), (BLOCK, 3), (GUMBEL, 3), (REJECTION, 0)],
    ids=["rejection", "block", "gumbel", "plain"],
)
def test_between_rounds_nothing_is_read(nothing_is_read: _NothingIsRead, rule: Rule, schedule: int | Schedule) -> None:
    """With all options that the steps know, logprobs too. One row has ended before, and is kept to fill the batch.
    (A draft that has paused reads how much it lacks.)"""
    target, drafter = llama_pair()
    target.execution, drafter.lm.execution = CapturedExecution(), CapturedExecution()
    options = {"repetition_penalty": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 1}
    options |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 4, "stop_token_ids": (1,)}
    num_tokens = (1, 100, 100, 100)
    requests = [request(ids, seed=n, max_new_tokens=n, **options) for n, ids in zip(num_tokens, PROMPTS, strict=True)]
    rounds = decode(target, drafter, requests, rule, num_draft_tokens=schedule)
    assert next(rounds).rows[0].finish_reason == "length"  # prompts come from the host
    with nothing_is_read:
        for _ in range(14):
            next(rounds)
    assert nothing_is_read.num_calls > 100


def test_rounds_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own seconds, not those that the host saw; a round too many is waited for, or it is on the next one's
    clock."""
    target, drafter = _pair(1)
    with monkeypatch.context() as patch:
        patch.setattr(Clock, "seconds", lambda self, begin, end: 1.5)
        first, *others = decode(target, drafter, [request((1, 2), max_new_tokens=12)], REJECTION, num_draft_tokens=2)
    assert first.timing.total_s == 3.0 and first.timing.prefill_s == 1.5
    assert others and all(one.timing.total_s == 1.5 and one.timing.prefill_s == 0.0 for one in others)
    marks, waits = itertools.count(), list[int]()
    monkeypatch.setattr(Clock, "seconds", lambda self, begin, end: 0.0)
    monkeypatch.setattr(Clock, "mark", lambda self: next(marks))
    monkeypatch.setattr(Clock, "wait", lambda self, one: waits.append(one))
    requests = [request(PROMPTS[3], StopAt(12), seed=4, max_new_tokens=40, temperature=1.5)]
    (*_, last) = decode(target, drafter, requests, REJECTION, num_draft_tokens=3)
    assert last.rows[0].finish_reason == "eos"
    assert waits[0] == 0 and waits[-1] == next(marks) - 1
