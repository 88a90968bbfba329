"""The features that a drafter is told are those of one forward over the whole text, whatever the rounds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrids import hybrid, hybrid_lm
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import Drafter, Rows, empty_draft
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION, Rule
from round_drafters import FeatureSession
from toys import llama_pair, request

pytestmark = pytest.mark.each_execution

FEATURES = (0, 1, 2)  # the embedding, the input of the second layer, and the last hidden state
PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]


class RepeatingSession(FeatureSession):
    """Drafts the last token, twice."""

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        ids = rows.last_ids[:, 1:].expand(-1, k)
        return Draft(ids, None, rows.num_wanted.clamp_max(2)) if k else empty_draft(rows)


def _expected(target: LM, token_ids: tuple[int, ...]) -> Tensor:
    """Features from Hugging Face's own forward. (Its last hidden state is after the final norm.) [N, F]"""
    found: list[Tensor] = []
    hook = target.model.model.layers[-1].register_forward_hook(lambda _, args, out: found.append(out))
    with torch.inference_mode():
        states = target.model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([(*states[:-1], found[0])[i][0] for i in FEATURES], dim=-1)


@pytest.mark.parametrize(("k", "family"), [(0, "llama"), (2, "llama"), (2, "qwen3_5_text")])
def test_features_are_those_of_one_forward(k: int, family: str) -> None:
    """At every position but that of the last token, which is never fed; in rounds without drafts too; for prompts that
    join later, in chunks, and find their beginning in a cache. Recurrences compute in float32."""
    target = llama_pair()[0] if family == "llama" else hybrid_lm(hybrid(family))
    sessions: list[RepeatingSession] = []

    def opens(models: Sequence[LM], num_slots: int, capacity: int, *_: Any) -> RepeatingSession:
        sessions.append(RepeatingSession(len(FEATURES) * models[0].model.config.hidden_size, num_slots, capacity))
        return sessions[-1]

    drafter = Drafter("repeating", opens, (target,), is_one_hot=True, most_drafted=2, features=FEATURES)
    shared = tuple(range(20, 42))
    options: Any = {"num_slots": 2, "capacity": 64, "schedule": ConstantSchedule(k), "prefill_chunk": 8}
    engine = Engine(target, drafter, REJECTION, **options)
    texts, num_cached = {}, 0
    for index, ids in enumerate([*PROMPTS, shared, (*shared, 3, 4, 5)]):
        engine.submit(request(ids, seed=index, max_new_tokens=16))
        texts[index] = tuple(ids)
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            texts[row.row] += row.token_ids
            num_cached += row.num_cached_tokens
            if row.finish_reason is not None:
                expected = _expected(target, texts[row.row])[:-1]
                errors = [(states[: len(expected)] - expected).abs().max() for states in sessions[0].states]
                assert min(errors) < (1e-9 if family == "llama" else 1e-4), row.row
    assert num_cached >= 16 or target.has_states  # states are seldom at a prefix
