"""Chain heads: EAGLE-3 and MTP layers. Their output is the target's, whatever happens to their rows.

(The contract of drafters is in test_contract.py, what they compute in tests/models/test_head_checkpoints.py.)
"""

from typing import Any

import pytest
import torch

from contract import check_state
from heads import eagle3_drafter, mtp_pair
from hybrids import V, hybrid
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.heads import ChainSession
from outrider.records import Stats
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, Rule
from toys import InTurn, as_lm, request, tiny_llama, tokens

FEW = [1, 2, 3, 5, 8, 13, 21, 34, 55, 20, 30, 40]
PROMPTS = [(5, 6, 7, 5), (1,), (2, 3) * 5, tuple(range(20, 42)), (*range(20, 42), 3, 4), (9,) * 20]


def _pair() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(num_layers=4))
    return target, eagle3_drafter(target, token_ids=FEW)


def _texts(target: LM, drafter: Drafter, rule: Rule, schedule: Schedule, **options: Any) -> tuple[Any, Stats, int]:
    """Of requests that join late, in three slots; with their counts, and tokens found in caches."""
    requests = [request(ids, seed=i, max_new_tokens=14 + 3 * (i % 3), **options) for i, ids in enumerate(PROMPTS)]
    engine = Engine(target, drafter, rule, num_slots=3, capacity=64, schedule=schedule, prefill_chunk=8)
    found: dict[int, tuple[int, ...]] = {engine.submit(one): () for one in requests}
    rows = [row for round_ in iter(engine.step, None) for row in round_.rows]
    for row in rows:
        found[row.row] += row.token_ids
    return list(found.values()), sum((row.stats for row in rows), Stats()), sum(row.num_cached_tokens for row in rows)


@pytest.mark.each_execution
@pytest.mark.parametrize(
    ("rule", "temperature", "ks", "lookahead"),
    [(BLOCK, 0.0, (3, 0, 0, 0, 0, 0, 0, 1), 0), (GUMBEL, 1.0, (4,), 0), (GUMBEL, 1.0, (3, 0, 2), 2)],
    ids=["greedy", "sampled", "ahead"],
)
def test_the_output_is_plain_decodings(rule: Rule, temperature: float, ks: tuple[int, ...], lookahead: int) -> None:
    """Greedy, and under ``gumbel`` with a seed; also where two rounds are started ahead."""
    target, drafter = _pair()
    plain, *_ = _texts(target, NO_DRAFTER, rule, ConstantSchedule(0), temperature=temperature)
    target.execution.lookahead = lookahead
    output, stats, num_cached = _texts(target, drafter, rule, InTurn(*ks), temperature=temperature)
    assert output == plain
    assert stats.num_draft_tokens > 20 and num_cached > 0
    assert stats.num_accepted_draft_tokens > 0 or temperature == 0


def test_a_bias_may_forbid_all_tokens_of_the_head() -> None:
    """Then it drafts others, which it does not know; other rows do not change."""
    target, drafter = _pair()
    bias = dict.fromkeys(FEW, -torch.inf)
    requests = [request((1, 2, 3), max_new_tokens=16, logit_bias=bias), request((4, 5, 6), max_new_tokens=16)]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 3) == plain


def test_an_entry_of_another_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a shared prefix has the token after it, which differs in the new sequence."""
    target = as_lm(tiny_llama(vocab_size=4, num_layers=4))
    drafter = eagle3_drafter(target)
    shared = [3, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 3] * 2
    sequences = [([*shared, first], [2, 0, 1, 3, 2, 1]) for first in (1, 2, 3)]
    check_state(target, drafter, sequences, 3)
    assign = ChainSession.assign

    def stale(self: ChainSession, slot: int, source: int | None, num_tokens: int) -> None:
        known = None if source is None else min(int(self._cached[source]), num_tokens)
        assign(self, slot, source, num_tokens)
        if known is not None:
            self._cached[slot] = known

    monkeypatch.setattr(ChainSession, "assign", stale)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, drafter, sequences, 3)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3_5_text", "qwen"),
        ("deepseek_v3", "deepseek"),
        pytest.param("qwen3_next", "qwen", marks=pytest.mark.slow),
        pytest.param("glm4_moe", "deepseek", marks=pytest.mark.slow),
    ],
)
def test_drafts_of_mtp_layers_are_a_function_of_the_sequence(family: str, layout: str) -> None:
    """In float32, or with recurrences in float32."""
    target, drafter = mtp_pair(hybrid(family), layout)
    generator = torch.Generator().manual_seed(3)
    first, rest, other, last = (torch.randint(V, (num,), generator=generator).tolist() for num in (5, 9, 9, 9))
    check_state(target, drafter, [(first, rest), (other, last), ([*first, *rest[:4]], last)], 3, atol=1e-4)
