"""Rounds that are started before the last is read: between them nothing is read. (Their texts: test_joining.py.)"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import outrider.decoding.engine as decode_module
from outrider.decoding.engine import decode
from outrider.records import Round, RowRound
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.device_timer import Clock
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule
from toys import StopAt, llama_pair, request

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5, (4, 4)]


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


@pytest.mark.parametrize(
    ("rule", "schedule"),
    [(REJECTION, 3), (BLOCK, 3), (GUMBEL, 3), (REJECTION, 0)],
    ids=["rejection", "block", "gumbel", "plain"],
)
def test_between_rounds_nothing_is_read(rule: Rule, schedule: int, monkeypatch: pytest.MonkeyPatch) -> None:
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
    nothing_is_read, read = _NothingIsRead(), decode_module.read

    def reading(*args: Any) -> list[RowRound]:
        nothing_is_read.is_reading = True
        found = read(*args)
        nothing_is_read.is_reading = False
        return found

    monkeypatch.setattr(decode_module, "read", reading)
    with nothing_is_read:
        for _ in range(14):
            next(rounds)
    assert nothing_is_read.num_calls > 100


def test_loops_take_turns_on_the_same_programs() -> None:
    """Also with ones that are given up on the way: a step's results stand only until the next."""
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
            said += [] if round_ is None else [round_.rows]
    assert together == alone


def test_rounds_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own seconds, not those that the host saw; a round too many is waited for, or it is on the next one's
    clock."""
    target, drafter = llama_pair()
    target.execution.lookahead = 1
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
