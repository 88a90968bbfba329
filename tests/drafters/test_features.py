"""A drafter that reads the target's hidden states, through the open door: a head that guesses the runner-up.

It is told everything in tensors of fixed shape, and never how many tokens were accepted. Its text is lossless, and its
features are those of one forward over the whole text.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.decoding.engine import Engine, decode
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import Drafter, Rows, Session, empty_draft
from outrider.records import Draft, Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, Rule
from round_drafters import FeatureSession
from toys import llama_pair, request

pytestmark = pytest.mark.each_execution

FEATURES = (0, 1, 2)  # the embedding, the input of the second layer, and the last hidden state
PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]


class OracleSession(FeatureSession):
    """Drafts from the target's last hidden state, with the target's own head."""

    def __init__(self, target: LM, *sizes: int) -> None:
        super().__init__(len(FEATURES) * target.model.config.hidden_size, *sizes)
        self.target = target

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        if k == 0:
            return empty_draft(rows)
        hidden = self.target.model.config.hidden_size
        last = self.states[torch.arange(len(rows)), (rows.lengths - 2).clamp_min(0), -hidden:]  # [B, H]
        logits = self.target.model.lm_head(self.target.model.model.norm(last))
        ids = logits.topk(2, dim=-1).indices[:, 1:].expand(-1, k)
        return Draft(ids=ids, probs=None, num_drafted=rows.num_wanted.clamp_max(2))


def _oracle(target: LM, sessions: list[OracleSession] | None = None, *, reads_on_host: bool = False) -> Drafter:
    """
    Args:
        sessions: takes the sessions that are opened.
        reads_on_host: as if it had to see tokens before it drafts.
    """

    def opens(models: Sequence[LM], num_slots: int, capacity: int, *_: Any) -> Session:
        session = OracleSession(models[0], num_slots, capacity)
        if sessions is not None:
            sessions.append(session)
        return session

    return Drafter(
        "oracle", opens, (target,), is_one_hot=True, most_drafted=2, features=FEATURES, reads_on_host=reads_on_host
    )


def _requests(**options: object) -> list[Request]:
    return [request(ids, seed=10 + i, max_new_tokens=16, **options) for i, ids in enumerate(PROMPTS)]


def _expected(target: LM, token_ids: tuple[int, ...]) -> Tensor:
    """Features from Hugging Face's own forward. (Its last hidden state is after the final norm.) [N, F]"""
    found: list[Tensor] = []
    hook = target.model.model.layers[-1].register_forward_hook(lambda _, args, out: found.append(out))
    with torch.inference_mode():
        states = target.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    states = [*states[:-1], found[0]]
    return torch.cat([states[i][0] for i in FEATURES], dim=-1)


@pytest.mark.parametrize(("k", "family"), [(0, "llama"), (2, "llama"), (2, "qwen3_5_text")])
def test_its_features_are_those_of_one_forward(k: int, family: str) -> None:
    """At every position but that of the last token, which is never fed; in rounds without drafts too; for prompts that
    join later, in chunks, and find their beginning in a cache. Recurrences compute in float32."""
    target = llama_pair()[0] if family == "llama" else hybrid_lm(hybrid(family))
    atol = 1e-9 if family == "llama" else 1e-4
    sessions: list[OracleSession] = []
    oracle = _oracle(target, sessions)
    shared = tuple(range(20, 42))
    prompts = [*PROMPTS, shared, (*shared, 3, 4, 5)]
    engine = Engine(target, oracle, REJECTION, num_slots=2, capacity=64, schedule=ConstantSchedule(k), prefill_chunk=8)
    texts, num_cached = {}, 0
    for index, ids in enumerate(prompts):
        engine.submit(request(ids, seed=index, max_new_tokens=16))
        texts[index] = tuple(ids)
    (session,) = sessions
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            texts[row.row] += row.token_ids
            num_cached += row.num_cached_tokens
            if row.finish_reason is not None:
                expected = _expected(target, texts[row.row])[:-1]
                assert any(
                    torch.allclose(states[: len(expected)], expected, rtol=0, atol=atol) for states in session.states
                ), row.row
    assert num_cached >= 16 or target.has_states  # states are seldom at a prefix


def test_no_round_is_started_ahead_for_a_drafter_that_reads_on_the_host() -> None:
    """What it sees is all there is: the bound of the lengths is the longest."""
    target, _ = llama_pair()
    target.execution.lookahead = 2
    spreads = {}
    for reads_on_host in (False, True):
        oracle = _oracle(target, reads_on_host=reads_on_host)
        seen: list[int] = []
        propose = OracleSession.propose

        def look(self: OracleSession, rows: Rows, *rest: Any, seen: list[int] = seen, propose: Any = propose) -> Draft:
            seen.append(rows.longest - int(rows.lengths.amax()))
            return propose(self, rows, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OracleSession, "propose", look)
            list(decode(target, oracle, _requests(), REJECTION, num_draft_tokens=2))
        spreads[reads_on_host] = max(seen)
    assert spreads[True] == 0 < spreads[False]
