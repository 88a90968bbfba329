"""The engine: what its clients share, rounds that are started ahead, and steps that lack memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from languages import Remainders
from outrider.decoding import scheduler
from outrider.decoding.batch import Row
from outrider.decoding.engine import Engine, decode
from outrider.decoding.fair_queue import FairQueue
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.errors import DeviceError
from outrider.records import Request, RowRound
from outrider.runtime.execution import Clock
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule
from toys import llama_pair, request, tokens

K = 3


def _engine(
    target: LM, drafter: Drafter, rule: Rule, num_slots: int, queue: FairQueue[Row] | None = None, k: int = K
) -> Engine:
    schedule = ConstantSchedule(k)
    options = {"num_slots": num_slots, "capacity": 64, "schedule": schedule, "prefill_chunk": 8, "queue": queue}
    return Engine(target, drafter, rule, **options)  # type: ignore[arg-type]


def test_a_prefix_is_shared_among_requests_of_one_client() -> None:
    """While its row runs and later, wherever the tokens are; others share what is common."""
    target, drafter = llama_pair()
    secret, other = list(range(30)), list(range(30, 55))
    engine = _engine(target, drafter, REJECTION, num_slots=3)
    engine.share([[5, 6], secret[:18]])

    def num_cached(client: str, ids: Sequence[int], max_new_tokens: int = 4) -> int:
        index = engine.submit(request(ids, max_new_tokens=max_new_tokens), client)
        rows: list[RowRound] = []
        while not (rows and rows[-1].finish_reason):  # others run on
            round_ = engine.step()
            rows += [] if round_ is None else [row for row in round_.rows if row.row == index]
        (alone,) = tokens(target, drafter, [request(ids, max_new_tokens=max_new_tokens)], REJECTION, K)
        assert tuple(i for row in rows for i in row.token_ids) == alone
        return sum(row.num_cached_tokens for row in rows)

    endless = engine.submit(request(secret, max_new_tokens=34), "alice")
    assert num_cached("alice", secret) == 29
    assert num_cached("bob", other) == 0
    assert num_cached("bob", secret) == 18
    assert num_cached("bob", secret) == 29  # his own by now
    assert num_cached("carol", secret) == 18
    engine.cancel(endless)
    assert num_cached("alice", other) == 0
    assert num_cached("alice", other) == 24
    assert num_cached("", [*other, 1]) == 0
    # While a prompt is fed, a row of the same client waits for its prefix, and no other.
    for client, is_waiting in (("alice", True), ("bob", False)):
        engine = _engine(target, NO_DRAFTER, REJECTION, num_slots=2)
        for one in ("alice", client):
            engine.submit(request(range(41), max_new_tokens=4), one)
        engine.step()
        assert engine.load.num_waiting == is_waiting


@pytest.mark.each_execution
@pytest.mark.parametrize(
    ("rule", "drafter", "lookahead"),
    [(REJECTION, None, 0), (GUMBEL, None, 2), (BLOCK, suffix_drafter(), 0)],
    ids=["model", "model, ahead", "suffix"],
)
def test_paused_texts(rule: Rule, drafter: Drafter | None, lookahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client with all slots gives up one after the other, until others have their share, and goes on later."""
    monkeypatch.setattr(scheduler, "LEAST_GENERATED", 6)
    paused, resume = list[int](), scheduler.Scheduler.resume
    monkeypatch.setattr(
        scheduler.Scheduler, "resume", lambda self, row: (paused.append(row.index), resume(self, row))[1]
    )
    target, by_model = llama_pair()
    drafter = drafter or by_model
    target.execution.lookahead = lookahead
    options: list[dict[str, object]] = [
        {"temperature": 0.0, "frequency_penalty": 1.0},
        {"top_p": 0.9, "repetition_penalty": 1.2},
        {"presence_penalty": 1.0, "min_tokens": 40, "stop_token_ids": (1, 2, 3)},
        {},
    ]
    asked = [request([7, 8, 9 + i], seed=i, max_new_tokens=40, **options[i % 4]) for i in range(10)]
    engine = _engine(target, drafter, rule, num_slots=4)
    texts: dict[int, tuple[int, ...]] = {}

    def step() -> bool:
        round_ = engine.step()
        for row in () if round_ is None else round_.rows:
            texts[row.row] = (*texts.get(row.row, ()), *row.token_ids)
        return round_ is not None

    for number, client in enumerate("aaaaaabbbc"):
        if number in (6, 9):
            step()
        assert engine.submit(asked[number], client) == number
    while step():
        pass
    wanted = dict(enumerate(tokens(target, drafter, asked, rule, K)))
    assert {0, 1, 2, 3} & set(paused) and len(paused) >= 2
    assert texts == wanted


@pytest.mark.parametrize(
    ("num_slots", "clients", "is_across", "expected"),
    [
        (4, "b", False, "b"),
        (4, "bcd", False, "bcd"),
        (2, "bcd", False, "b"),  # more clients than slots
        (1, "b", False, ""),
        (4, "b", True, ""),  # priorities decide
    ],
)
def test_waiting(num_slots: int, clients: str, is_across: bool, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait of a client is that until a row has generated some tokens; not until a text ends."""
    monkeypatch.setattr(scheduler, "LEAST_GENERATED", 12)
    target, _ = llama_pair()
    queue: FairQueue[Row] = FairQueue(has_priority_across_clients=is_across)
    engine = _engine(target, NO_DRAFTER, REJECTION, num_slots, queue, k=0)
    first_rounds: dict[str, int] = {}
    owners = {engine.submit(request((1, 2), max_new_tokens=50), "a"): "a" for _ in range(9)}
    for number in range(20):
        if number == 5:
            owners |= {engine.submit(request((3, 4), max_new_tokens=50), one): one for one in clients}
        round_ = engine.step()
        assert round_ is not None
        for row in round_.rows:
            first_rounds.setdefault(owners[row.row], number)
    assert first_rounds == {"a": 0} | dict.fromkeys(expected, 12)


def test_rounds_are_timed_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own seconds, not those that the host saw."""
    target, drafter = llama_pair()
    target.execution.lookahead = 1
    monkeypatch.setattr(Clock, "seconds", lambda self, begin, end: 1.5)
    first, *others = decode(target, drafter, [request((1, 2), max_new_tokens=12)], REJECTION, num_draft_tokens=2)
    assert first.timing.total_s == 3.0 and first.timing.prefill_s == 1.5
    assert others and all(one.timing.total_s == 1.5 and one.timing.prefill_s == 0.0 for one in others)


_LONG = [(5, 6, 7, 5, 6, 7, 5), (1, 4, 2), (2, 3) * 20, (7, 1)]
_REQUESTS = [request(ids, seed=i, temperature=0.0, max_new_tokens=12) for i, ids in enumerate(_LONG)]


def _too_large(*_: object, **__: object) -> Any:
    return torch.empty(2**60, dtype=torch.uint8)  # PyTorch's own error on the CPU


def _run(engine: Engine) -> tuple[dict[int, RowRound], dict[int, tuple[int, ...]]]:
    last, texts = dict[int, RowRound](), dict[int, tuple[int, ...]]()
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            last[row.row], texts[row.row] = row, (*texts.get(row.row, ()), *row.token_ids)
    return last, texts


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_that_lacks_memory(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of rows beside it, and of those that get its slot, are what they are alone."""
    target, draft = llama_pair()
    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in _REQUESTS]
    engine, prefill = _engine(target, draft, BLOCK, 2, k=k), target.prefill
    for one in _REQUESTS:
        engine.submit(one)

    def fail_if_long(ids: Any, starts: Any, ends: Any, *more: Any, **others: Any) -> Any:
        return _too_large() if int(ends.max()) > 30 else prefill(ids, starts, ends, *more, **others)

    monkeypatch.setattr(target, "prefill", fail_if_long)
    last, texts = _run(engine)
    assert isinstance(last[2].error, DeviceError) and last[2].finish_reason == "error"
    assert texts == {0: want[0], 1: want[1], 2: (), 3: want[3]}
    monkeypatch.setattr(target, "prefill", prefill)
    again = engine.submit(_REQUESTS[2])
    assert _run(engine)[1] == {again: want[2]}
    monkeypatch.setattr(target, "prefill", _too_large)
    for requests, message in ((_REQUESTS[:1], "^there is not enough"), (_REQUESTS, r"^prompt \d: there is not enough")):
        with pytest.raises(DeviceError, match=f"{message} memory on the CPU: free some"):
            list(decode(target, NO_DRAFTER, requests, BLOCK, num_draft_tokens=0))


def test_a_round_that_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest row ends, and the round is tried again without it. The slot keeps nothing for the next row."""
    target, draft = llama_pair()

    def asked() -> list[Request]:
        return [replace(one, constraint=Remainders(60)) for one in _REQUESTS]

    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in asked()]
    engine = _engine(target, draft, BLOCK, 2)
    for one in asked():
        engine.submit(one)
    engine.step()
    propose, num_rows = engine._runner.session.propose, []

    def fail_for_two(rows: Any, *given: Any) -> Any:
        found = propose(rows, *given)
        num_rows.append(len(rows))
        return _too_large() if num_rows.count(2) == 1 and len(rows) == 2 else found

    monkeypatch.setattr(engine._runner.session, "propose", fail_for_two)
    last, texts = _run(engine)
    assert isinstance(last[0].error, DeviceError) and num_rows[0] == 2
    assert {row: texts[row] for row in (2, 3)} == {2: want[2], 3: want[3]}
    assert texts[1] == want[1][-len(texts[1]) :] and 0 < len(texts[1])
