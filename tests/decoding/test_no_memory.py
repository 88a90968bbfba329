"""Steps that lack memory: their rows end with an error, and the others go on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.decoding.engine import Engine, decode
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import DeviceError
from outrider.records import Request, RowRound
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from toys import llama_pair, request, tokens

_PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1, 4, 2), (2, 3) * 20, (7, 1)]
_REQUESTS = [request(ids, seed=i, temperature=0.0, max_new_tokens=12) for i, ids in enumerate(_PROMPTS)]


def _too_large(*_: object, **__: object) -> Any:
    return torch.empty(2**60, dtype=torch.uint8)  # PyTorch's own error on the CPU


def _engine(target: LM, drafter: Any = NO_DRAFTER, k: int = 0) -> Engine:
    return Engine(target, drafter, BLOCK, num_slots=2, capacity=128, schedule=ConstantSchedule(k))


def _run(engine: Engine) -> dict[int, list[RowRound]]:
    """The rounds of each row, until all have ended."""
    found: dict[int, list[RowRound]] = {}
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            found.setdefault(row.row, []).append(row)
    return found


def _texts(found: dict[int, list[RowRound]]) -> dict[int, tuple[int, ...]]:
    return {row: tuple(one for round_ in rounds for one in round_.token_ids) for row, rounds in found.items()}


@pytest.mark.parametrize("k", [0, 3])
def test_a_prompt_that_lacks_memory(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts of rows beside it, and of those that get its slot, are what they are alone."""
    target, draft = llama_pair()
    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in _REQUESTS]
    engine, prefill = _engine(target, draft, k), target.prefill
    for one in _REQUESTS:
        engine.submit(one)

    def fail_if_long(ids: Any, starts: Any, ends: Any, *more: Any, **others: Any) -> Any:
        return _too_large() if int(ends.max()) > 30 else prefill(ids, starts, ends, *more, **others)

    monkeypatch.setattr(target, "prefill", fail_if_long)
    found = _run(engine)
    assert isinstance(found[2][0].error, DeviceError) and found[2][0].finish_reason == "error"
    assert _texts(found) == {0: want[0], 1: want[1], 2: (), 3: want[3]}
    monkeypatch.setattr(target, "prefill", prefill)
    again = engine.submit(_REQUESTS[2])
    assert _texts(_run(engine)) == {again: want[2]}


def test_a_round_that_lacks_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its longest row ends, and the round is tried again without it. The slot keeps nothing for the next row."""
    target, draft = llama_pair()
    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in _REQUESTS]
    engine = _engine(target, draft, 3)
    for one in _REQUESTS:
        engine.submit(one)
    engine.step()
    verify, num_rows = engine._runner._verify, []

    def fail_for_two(static: Any, cache: Any, last_ids: Any, *given: Any) -> Any:
        num_rows.append(len(last_ids))
        return (
            _too_large() if num_rows.count(2) == 1 and len(last_ids) == 2 else verify(static, cache, last_ids, *given)
        )

    monkeypatch.setattr(engine._runner, "_verify", fail_for_two)
    found = _run(engine)
    assert isinstance(found[0][-1].error, DeviceError) and num_rows[0] == 2
    texts = _texts(found)
    assert {row: texts[row] for row in (2, 3)} == {2: want[2], 3: want[3]}
    assert texts[1] == want[1][-len(texts[1]) :] and 0 < len(texts[1])


class _Alternating:
    """Allows ids whose parity is not that of the id before."""

    error = None

    def __init__(self) -> None:
        self.ids: list[int] = []

    def effect(self) -> np.ndarray:
        return np.arange(60) % 2 != (self.ids[-1] % 2 if self.ids else 0)

    def push(self, token_id: int) -> bool:
        is_allowed = bool(self.effect()[token_id])
        self.ids += [token_id] if is_allowed else []
        return is_allowed

    def pop(self, num_tokens: int) -> None:
        del self.ids[len(self.ids) - num_tokens :]


def test_constraints_forget_a_draft_that_lacked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft was proposed when memory ran out."""
    target, draft = llama_pair()

    def asked() -> list[Request]:
        return [replace(one, constraint=_Alternating()) for one in (_REQUESTS[0], _REQUESTS[1])]

    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in asked()]
    engine = _engine(target, draft, 3)
    for one in asked():
        engine.submit(one)
    propose, num_calls = engine._runner.session.propose, []

    def fail_once(*given: Any) -> Any:
        found = propose(*given)
        num_calls.append(1)
        return _too_large() if len(num_calls) == 2 else found

    monkeypatch.setattr(engine._runner.session, "propose", fail_once)
    found = _run(engine)
    assert isinstance(found[0][-1].error, DeviceError)
    assert _texts(found)[1] == want[1]


def test_the_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = llama_pair()
    monkeypatch.setattr(target, "prefill", _too_large)

    def generate(requests: list[Request]) -> None:
        for _ in decode(target, NO_DRAFTER, requests, BLOCK, num_draft_tokens=0):
            pass

    with pytest.raises(DeviceError, match="^there is not enough memory on the CPU: free some"):
        generate(_REQUESTS[:1])
    with pytest.raises(DeviceError, match=r"^prompt \d: there is not enough memory"):
        generate(_REQUESTS)
