"""Steps that lack memory: their rows end with an error, and the others go on."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from languages import Remainders
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


def _run(engine: Engine) -> tuple[dict[int, RowRound], dict[int, tuple[int, ...]]]:
    """The last round and the text of each row, when all have ended."""
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
    engine, prefill = _engine(target, draft, k), target.prefill
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
    """Its longest row ends, and the round is tried again without it: constraints forget its draft. The slot keeps
    nothing for the next row."""
    target, draft = llama_pair()

    def asked() -> list[Request]:
        return [replace(one, constraint=Remainders(60)) for one in _REQUESTS]

    want = [tokens(target, NO_DRAFTER, [one], BLOCK, 0)[0] for one in asked()]
    engine = _engine(target, draft, 3)
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
