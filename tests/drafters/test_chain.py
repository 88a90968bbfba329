"""Chain heads: EAGLE-3 and MTP layers. Their output is the target's, whatever happens to their rows.

(The contract of drafters is in test_contract.py, what they compute in tests/models/test_head_checkpoints.py.)
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from contract import check_state
from heads import eagle3_drafter, mtp_pair
from hybrids import V, hybrid
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import AlteredDrafter, Drafter, NoDrafter, Rows
from outrider.drafters.chain import ChainSession
from outrider.records import Draft, Stats
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from sampled_law import law_z
from toys import InTurn, as_lm, request, tiny_llama, tokens

pytestmark = pytest.mark.each_execution

FEW = [1, 2, 3, 5, 8, 13, 21, 34, 55, 20, 30, 40]
PROMPTS = [(5, 6, 7, 5), (1,), (2, 3) * 5, tuple(range(20, 42)), (*range(20, 42), 3, 4), (9,) * 20]
MIXED = pytest.mark.parametrize("ks", [(4,), (3, 0, 2), (3, 0, 0, 0, 0, 0, 0, 1)], ids=str)
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)


def _pair() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(num_layers=4))
    return target, eagle3_drafter(target, token_ids=FEW)


def _texts(target: LM, drafter: Drafter, rule: Rule, schedule: Schedule, **options: Any) -> tuple[Any, Stats, int]:
    """Of requests that join late, in three slots; with their counts, and tokens found in caches."""
    requests = [request(ids, seed=i, max_new_tokens=14 + 3 * (i % 3), **options) for i, ids in enumerate(PROMPTS)]
    engine = Engine(target, drafter, rule, num_slots=3, capacity=64, schedule=schedule, prefill_chunk=8)
    found: dict[int, tuple[int, ...]] = {engine.submit(one): () for one in requests}
    stats, num_cached = Stats(), 0
    while (round_ := engine.step()) is not None:
        for row in round_.rows:
            found[row.row] += row.token_ids
            stats += row.stats
            num_cached += row.num_cached_tokens
    return list(found.values()), stats, num_cached


@MIXED
@ALL_RULES
def test_greedy_output_is_plain_decodings(rule: Rule, ks: tuple[int, ...]) -> None:
    target, drafter = _pair()
    plain, *_ = _texts(target, NoDrafter(), rule, ConstantSchedule(0), temperature=0.0)
    output, stats, num_cached = _texts(target, drafter, rule, InTurn(*ks), temperature=0.0)
    assert output == plain
    assert stats.num_draft_tokens > 20 and num_cached > 0


@MIXED
def test_a_seed_under_gumbel_gives_what_plain_decoding_gives(ks: tuple[int, ...]) -> None:
    target, drafter = _pair()
    plain, *_ = _texts(target, NoDrafter(), GUMBEL, ConstantSchedule(0), temperature=1.0)
    output, stats, _ = _texts(target, drafter, GUMBEL, InTurn(*ks), temperature=1.0)
    assert output == plain and stats.num_accepted_draft_tokens > 0


def test_two_rounds_may_be_started_ahead() -> None:
    target, drafter = _pair()
    plain, *_ = _texts(target, NoDrafter(), GUMBEL, ConstantSchedule(0), temperature=1.0)
    target.execution.lookahead = 2
    assert _texts(target, drafter, GUMBEL, InTurn(3, 0, 2), temperature=1.0)[0] == plain


@pytest.mark.eager_only
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_distribution_is_the_targets(rule: Rule) -> None:
    """Also where the head knows five of six tokens; and not if it reports the q of its own ids."""
    target = as_lm(tiny_llama(vocab_size=6, num_layers=4))
    drafter = eagle3_drafter(target, token_ids=[0, 1, 2, 4, 5])
    assert law_z(target, drafter, rule, (3, 1, 2), k=3, num_samples=3000) < 5

    def unmapped(rows: Rows, k: int, draft: Draft) -> Draft:
        if draft.probs is None:
            return draft
        return replace(draft, probs=torch.nn.functional.pad(draft.probs[..., [0, 1, 2, 4, 5]], (0, 1)))

    assert law_z(target, AlteredDrafter(drafter, "unmapped", unmapped), rule, (3, 1, 2), k=3, num_samples=3000) > 20


@pytest.mark.eager_only
def test_a_bias_may_forbid_all_tokens_of_the_head() -> None:
    """Then it drafts others, which it does not know; other rows do not change."""
    target, drafter = _pair()
    bias = dict.fromkeys(FEW, -torch.inf)
    for temperature in (0.0, 1.0):
        requests = [
            request((1, 2, 3), max_new_tokens=16, temperature=temperature, logit_bias=bias),
            request((4, 5, 6), max_new_tokens=16, temperature=temperature),
        ]
        plain = tokens(target, NoDrafter(), requests, GUMBEL, 0)
        assert tokens(target, drafter, requests, GUMBEL, 3) == plain


@pytest.mark.eager_only
def test_an_entry_of_another_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a shared prefix has the token after it, which differs in the new sequence."""
    target = as_lm(tiny_llama(vocab_size=4, num_layers=4))
    drafter = eagle3_drafter(target)
    shared = [3, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 3] * 2
    sequences = [([*shared, first], [2, 0, 1, 3, 2, 1, 0, 3, 1]) for first in (1, 2, 3)]
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


@pytest.mark.eager_only
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3_5_text", "qwen", marks=pytest.mark.slow),
        pytest.param("qwen3_next", "qwen", marks=pytest.mark.slow),
        ("deepseek_v3", "deepseek"),
        pytest.param("glm4_moe", "deepseek", marks=pytest.mark.slow),
    ],
)
def test_mtp_layers_give_what_plain_decoding_gives(family: str, layout: str) -> None:
    target, drafter = mtp_pair(hybrid(family), layout)
    for rule, temperature in ((BLOCK, 0.0), (GUMBEL, 1.0)):
        plain, *_ = _texts(target, NoDrafter(), rule, ConstantSchedule(0), temperature=temperature)
        output, stats, _ = _texts(target, drafter, rule, InTurn(3, 0, 2), temperature=temperature)
        assert output == plain and stats.num_draft_tokens > 20


@pytest.mark.eager_only
@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen3_5_text", "qwen"), pytest.param("glm4_moe", "deepseek", marks=pytest.mark.slow)],
)
def test_drafts_of_mtp_layers_are_a_function_of_the_sequence(family: str, layout: str) -> None:
    """In float32, or with recurrences in float32."""
    target, drafter = mtp_pair(hybrid(family), layout)
    generator = torch.Generator().manual_seed(3)
    some = [torch.randint(V, (number,), generator=generator).tolist() for number in (5, 12, 9, 12)]
    check_state(
        target, drafter, [(some[0], some[1]), (some[2], some[3]), ([*some[0], *some[1][:4]], some[3])], 3, atol=1e-4
    )
