"""Drafters that read the target's hidden states: these are those of one forward over the whole text."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import Rows
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from round_drafters import HEAD_FEATURES, HeadDrafter, head
from toys import llama_pair, request, run

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]


def _opened(target: LM, monkeypatch: pytest.MonkeyPatch) -> tuple[HeadDrafter, list[Any]]:
    """A drafter that keeps the features of every position, and its sessions."""
    sessions: list[Any] = []
    open_session = HeadDrafter.open
    monkeypatch.setattr(HeadDrafter, "open", lambda *given: sessions.append(open_session(*given)) or sessions[-1])
    return head(target), sessions


def _expected(target: LM, token_ids: tuple[int, ...]) -> Tensor:
    """Features from Hugging Face's own forward. (Its last hidden state is after the final norm.) [N, F]"""
    found: list[Tensor] = []
    hook = target.model.model.layers[-1].register_forward_hook(lambda _, args, out: found.append(out))
    with torch.inference_mode():
        states = target.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = [*states[:-1], found[0]]
    return torch.cat([states[i][0] for i in HEAD_FEATURES], dim=-1)


@pytest.mark.each_execution
@pytest.mark.parametrize(("k", "family"), [(0, "llama"), (2, "llama"), (2, "qwen3_5_text")])
def test_features_are_those_of_one_forward(k: int, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every position but that of the last token, which is never fed; in rounds without drafts too; for prompts that
    join later, in chunks, and find their beginning in a cache. Recurrences compute in float32."""
    target = llama_pair()[0] if family == "llama" else hybrid_lm(hybrid(family))
    atol = 1e-9 if family == "llama" else 1e-4
    drafter, sessions = _opened(target, monkeypatch)
    shared = tuple(range(20, 42))
    texts, num_cached = [*PROMPTS, shared, (*shared, 3, 4, 5)], 0
    engine = Engine(target, drafter, REJECTION, num_slots=2, capacity=64, schedule=ConstantSchedule(k), prefill_chunk=8)
    for index, ids in enumerate(texts):
        engine.submit(request(ids, seed=index, max_new_tokens=16))
    for row in (row for round_ in iter(engine.step, None) for row in round_.rows):
        texts[row.row] += row.token_ids
        num_cached += row.num_cached_tokens
        if row.finish_reason is not None:
            want = _expected(target, texts[row.row])[:-1]
            held = sessions[0].states[:, : len(want)].to(want.dtype)
            assert any(torch.allclose(states, want, rtol=0, atol=atol) for states in held), row.row
    assert num_cached >= 16 or target.has_states  # states are seldom at a prefix


def test_no_round_is_started_ahead_for_a_drafter_that_reads_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it sees is all there is: the bound of the lengths is the longest."""
    target, _ = llama_pair()
    target.execution.lookahead = 2
    drafter, sessions = _opened(target, monkeypatch)
    session_type = type(drafter.open(1, 8, target.device, 2))
    propose, spreads = session_type.propose, []

    def look(self: Any, rows: Rows, *rest: Any) -> Draft:
        seen.append(rows.longest - int(rows.lengths.amax()))
        draft: Draft = propose(self, rows, *rest)
        return draft

    monkeypatch.setattr(session_type, "propose", look)
    for reads_on_host in (False, True):
        seen: list[int] = []
        monkeypatch.setattr(HeadDrafter, "reads_on_host", reads_on_host)
        run(target, drafter, [request(ids, seed=i, max_new_tokens=16) for i, ids in enumerate(PROMPTS)], REJECTION, 2)
        spreads.append(max(seen))
    assert spreads[1] == 0 < spreads[0]
