"""How rows end, and what the rounds say of themselves: limits, stops, counts, log-probabilities, errors."""

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError
from outrider.records import Request, RowRound, Stats
from outrider.runtime.execution import EagerExecution
from outrider.runtime.lm import LM
from outrider.runtime.shape_buckets import power_of_two
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from toys import StopAt, as_lm, llama_pair, random_table, request, run, table_lm, table_pair, tiny_llama, tokens

pytestmark = pytest.mark.each_execution

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)


def _requests(prompts: Sequence[Sequence[int]], num_tokens: int = 16, **options: object) -> list[Request]:
    return [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(prompts)]


@ALL_RULES
def test_max_new_tokens_is_never_exceeded(rule: Rule) -> None:
    """Also where the draft is always right; the last round drafts no more than there is room for."""
    target, drafter = table_pair(8)
    drafters = drafter, model_drafter(target), ngram_drafter(), NO_DRAFTER
    for one, k, num_tokens in itertools.product(drafters, (1, 4), (1, 2, 3, 7)):
        for output in run(target, one, _requests(PROMPTS, num_tokens), rule, k):
            assert len(output.token_ids) == num_tokens
            assert [row.finish_reason for row in output.rounds] == [None] * (len(output.rounds) - 1) + ["length"]
            assert not any(row.is_truncated for row in output.rounds)
            assert output.stats.num_generated_tokens == num_tokens
            left = num_tokens
            for row in output.rounds:
                assert row.num_drafted <= min(k, left - 1)
                left -= len(row.token_ids)


@ALL_RULES
def test_a_row_that_ended_stays_in_a_batch_of_fixed_width(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise made ahead covers 64 tokens. The last row ends with the 64th: none was made for where it stays."""
    monkeypatch.setattr(EagerExecution, "round_rows", lambda self, num_rows: power_of_two(num_rows))
    target, _ = table_pair(8)
    asked = [(request((1,), seed=i, max_new_tokens=64), 3 if i == 3 else 0) for i in range(4)]
    requests = [dataclasses.replace(one, num_draft_tokens=k) for one, k in asked]
    outputs = run(target, model_drafter(target), requests, rule, 3)
    assert [len(output.rounds) for output in outputs] == [64, 64, 64, 16]


@ALL_RULES
def test_rows_that_draft_beyond_their_end_give_a_prefix(rule: Rule) -> None:
    """Of what a larger limit gives; the context shortens all alike. The control: shortened drafts do not."""

    def outputs(target: LM, drafter: Drafter, limits: Sequence[int], beyond: bool = True) -> list[tuple[int, ...]]:
        asked = [
            request(ids, seed=10 + i, max_new_tokens=n) for i, (ids, n) in enumerate(zip(PROMPTS, limits, strict=True))
        ]
        return tokens(target, drafter, [dataclasses.replace(one, drafts_beyond_end=beyond) for one in asked], rule, 4)

    def prefixes(texts: list[tuple[int, ...]], whole: list[tuple[int, ...]]) -> bool:
        return all(a == b[: len(a)] for a, b in zip(texts, whole, strict=True))

    target, drafter = table_pair(8)
    limits = [1, 2, 3, 5, 8, 13]
    for one in (drafter, model_drafter(target), ngram_drafter()):
        whole = outputs(target, one, (20, 20, 20))
        for i, limit in enumerate(limits):
            own = limit, limits[i - 1], limits[i - 2]
            texts = outputs(target, one, own)
            assert [len(text) for text in texts] == list(own) and prefixes(texts, whole)
    short = outputs(target, drafter, (20, 20, 20), False)
    assert rule is GUMBEL or not all(prefixes(outputs(target, drafter, (n, n, n), False), short) for n in limits)
    target, drafter = llama_pair(context_len=24)
    whole = outputs(target, drafter, (100, 100, 100))
    assert [len(ids) + len(text) for ids, text in zip(PROMPTS, whole, strict=True)] == [24] * 3
    for left in (1, 2, 3, 4):
        assert prefixes(outputs(target, drafter, (17 - left, 23 - left, 14 - left)), whole)


@pytest.mark.parametrize("rule", [REJECTION, GUMBEL])
def test_drafts_are_reported_with_p_and_q_where_asked_for(rule: Rule) -> None:
    """All of them, rejected or not, with the probabilities of the tables, or one-hot q; not for the row beside."""
    table = random_table(8, 0, 1.5)
    p_table, q_table = (one.softmax(-1) for one in (table, 0.5 * table + random_table(8, 1)))
    for drafter in (model_drafter(table_lm(q_table.log(), name="draft")), ngram_drafter()):
        requests = _requests(PROMPTS, 30)
        requests[0] = dataclasses.replace(requests[0], reports_drafts=True)
        asked, *others = run(table_lm(table), drafter, requests, rule, 4)
        assert all(row.drafted is None for output in others for row in output.rounds)
        text, num_rejected = list(PROMPTS[0]), 0
        for row in asked.rounds:
            assert row.drafted is not None and len(row.drafted) == row.num_drafted
            ids = [one.token_id for one in row.drafted]
            assert tuple(ids[: row.num_accepted]) == row.token_ids[: row.num_accepted]
            for before, one in zip([text[-1], *ids], row.drafted, strict=False):
                q = 1.0 if drafter.is_one_hot else q_table[before, one.token_id].item()
                assert (one.p, one.q) == pytest.approx((p_table[before, one.token_id].item(), q), abs=1e-6)
            num_rejected += row.num_accepted < row.num_drafted
            text += row.token_ids
        assert num_rejected > 2


def test_logits_beyond_the_vocabulary_are_never_sampled() -> None:
    """Embedding matrices are often padded; the padding's logits are cut off, however large."""
    table = torch.zeros(6, 9, dtype=torch.float64)
    table[:, 6:] = 50.0
    target = table_lm(table, vocab_size=6)
    (output,) = tokens(target, model_drafter(target), [request((1,), max_new_tokens=200)], REJECTION, 3)
    assert set(output) == set(range(6))


@pytest.mark.parametrize(("rule", "drafter_name"), [(REJECTION, "model"), (BLOCK, "itself"), (GUMBEL, "none")])
def test_a_stop_acts_token_by_token(rule: Rule, drafter_name: str) -> None:
    """80 seeds: the row ends with the stop's token, which is asked once for every token and never for one after it;
    up to there the text is what it is without a stop; what was dropped is marked, and out of the statistics."""
    target, by_model = table_pair(8)
    drafter = {"model": by_model, "itself": model_drafter(target), "none": NO_DRAFTER}[drafter_name]
    requests = [request((1, 2), stop=StopAt(3), seed=seed, max_new_tokens=40) for seed in range(80)]
    outputs = run(target, drafter, requests, rule, 5)
    endless = tokens(target, drafter, [dataclasses.replace(one, stop=None) for one in requests], rule, 5)
    truncated = []
    for one, output, whole in zip(requests, outputs, endless, strict=True):
        expected = whole[: whole.index(3) + 1] if 3 in whole else whole
        assert output.token_ids == tuple(one.stop.pushed) == expected
        assert output.finish_reason == ("eos" if 3 in whole else "length")
        *before, last = output.rounds
        assert not any(row.is_truncated for row in before)
        assert all(len(row.token_ids) == row.num_accepted + 1 == len(row.origins) for row in before)
        assert last.is_truncated == (len(last.token_ids) < last.num_accepted + 1)
        assert len(last.origins) == len(last.token_ids)
        truncated.append(last.is_truncated)
        counted, stats = output.rounds if not last.is_truncated else before, output.stats
        assert (stats.num_generated_tokens, stats.num_rounds) == (len(expected), len(counted))
        assert stats.num_truncated_rounds == int(last.is_truncated)
        assert stats.num_draft_tokens == sum(row.num_drafted for row in counted)
        assert stats.num_accepted_draft_tokens == sum(row.num_accepted for row in counted)
    assert set(truncated) == ({False} if drafter_name == "none" else {False, True})


def test_a_stop_at_the_last_token_of_a_round_truncates_nothing() -> None:
    """A cycle of four tokens: the stop falls on the bonus, or on an accepted token. It wins over the limit."""
    table = torch.full((4, 4), -40.0, dtype=torch.float64)
    table[torch.arange(4), (torch.arange(4) + 1) % 4] = 40.0
    target = table_lm(table)
    for stop_id, is_truncated, limit in ((3, False, 20), (2, True, 20), (3, False, 3)):
        one = request((0,), stop=StopAt(stop_id), temperature=0.0, max_new_tokens=limit)
        (output,) = run(target, model_drafter(target), [one], REJECTION, 2)
        (row,) = output.rounds
        assert row.token_ids == tuple(range(1, stop_id + 1))
        assert row.origins == ("accepted", "accepted", "bonus")[: len(row.token_ids)]
        assert (row.num_drafted, row.num_accepted, row.is_truncated) == (2, 2, is_truncated)
        assert row.finish_reason == "eos"


def test_stats_add() -> None:
    """Whole numbers in any order; ratios are made of the sums; a truncated round counts its tokens only."""
    counts = [(3, 4, 2, False), (1, 4, 0, False), (5, 4, 4, False), (1, 0, 0, False), (2, 4, 4, True)]
    rows = [RowRound(0, (7,) * n, (), drafted, k, is_cut, None, None).stats for n, drafted, k, is_cut in counts]
    total = sum(rows, Stats())
    assert total == sum(reversed(rows), Stats()) == Stats(12, (2, 0, 1, 0, 1), (1, 0, 0, 0, 3), (1, 0, 0, 0, 1), 1)
    assert (total.num_rounds, total.num_draft_tokens, total.num_accepted_draft_tokens) == (4, 12, 6)
    assert (total.mean_acceptance_length, total.draft_acceptance_rate) == (2.5, 0.5)
    assert Stats().mean_acceptance_length is None and rows[3].draft_acceptance_rate is None


def _bad_after(token_id: int, value: float, table_seed: int = 1) -> Tensor:
    """A random chain of 6 tokens whose logits after one of them are not to be sampled from."""
    table = random_table(6, table_seed)
    table[token_id, 2] = value
    return table


@ALL_RULES
def test_bad_logits_of_the_target_are_an_error_that_tells_where(rule: Rule) -> None:
    """Named: the model, the position that the logits were for, the prompt. For plain decoding that is the position
    after the first 4; with drafts the chain goes 2, 1, 4, all drafted, and what comes after 4 is for position 4."""
    target, good = table_lm(_bad_after(4, torch.inf), name="the big one"), table_lm(random_table(6, 1), name="small")
    requests = [request((1, 2), seed=seed, max_new_tokens=40) for seed in (0, 1)]
    ends = [2 + text.index(4) + 1 for text in tokens(good, NO_DRAFTER, requests, rule, 0)]
    assert ends[0] != ends[1]
    where = f"prompt {ends.index(min(ends))}: the model the big one .* position {min(ends)} of the text;"
    with pytest.raises(NumericsError, match=where):
        run(target, NO_DRAFTER, requests, rule, 3)
    good = table_lm(random_table(6, 3), name="the good one")
    bad = table_lm(_bad_after(4, torch.nan, table_seed=3), name="the bad one")
    greedy = [request((0,), temperature=0.0, max_new_tokens=20)]
    for k in (3, 4):
        with pytest.raises(NumericsError, match="the bad one .* position 4 of the text;"):
            run(bad, model_drafter(good), greedy, rule, k)
        # A draft ends before bad logits of its own.
        first = next(decode(good, model_drafter(bad), greedy, rule, num_draft_tokens=k)).rows[0]
        assert first.token_ids == (2, 1, 4, 1) and first.num_drafted == 3 and first.has_broken_draft == (k == 4)
        assert tokens(good, model_drafter(bad), greedy, rule, k) == tokens(good, NO_DRAFTER, greedy, rule, 0)


def _gives_nan_after(token_id: int) -> LM:
    model = tiny_llama(seed=1)
    model.get_input_embeddings().weight.data[token_id] = torch.nan
    return as_lm(model)


@ALL_RULES
def test_a_place_behind_a_rejected_token_ends_no_text(rule: Rule) -> None:
    """The draft proposes a token that the target never takes, and gives NaN after."""
    bad = _gives_nan_after(5)
    options = dict(max_new_tokens=12, logit_bias={5: -60.0})
    requests = [request((1, 2, 3), seed=seed, **options) for seed in range(6)]
    # The draft's own bias would keep it from the token.
    likes_it = model_drafter(table_lm(64.0 * torch.eye(bad.vocab_size)[5].repeat(bad.vocab_size, 1)))
    plain = tokens(bad, NO_DRAFTER, requests, rule, 0)
    assert all(len(text) == 12 and 5 not in text for text in plain)
    outputs = run(bad, likes_it, requests, rule, 4)
    assert {len(output.token_ids) for output in outputs} == {12}
    assert any(row.num_drafted == 1 and row.num_accepted == 0 for output in outputs for row in output.rounds)
    if rule is GUMBEL:
        assert [output.token_ids for output in outputs] == plain


@ALL_RULES
def test_logits_that_are_not_judged_may_be_nan(rule: Rule) -> None:
    """Logits in the padding of ragged rounds, and forbidden tokens (-inf), are no error."""
    table = random_table(6, 1)
    table[:, 4] = -torch.inf
    table[4] = torch.nan
    outputs = tokens(table_lm(table), ngram_drafter(), _requests([(1, 2, 1, 2, 1), (0,), (3, 3, 3)]), rule, 4)
    assert all(4 not in text for text in outputs)
    # The draft goes beyond the token that ends the text, to one after which the target gives NaN.
    counting = 9.0 * torch.nn.functional.one_hot(torch.tensor([1, 2, 3, 4, 5, 5]), 6).float()
    bad = counting.clone()
    bad[2] = torch.nan
    one = request((0,), StopAt(2), temperature=0.0, max_new_tokens=9)
    assert tokens(table_lm(bad), model_drafter(table_lm(counting)), [one], rule, 4) == [(1, 2)]
    # The second row drafts 1 and 2, which end it; in the columns that only the first row drafts, the draft model is fed
    # that 2, after which its logits are no numbers.
    requests = [request((start,), temperature=0.0, max_new_tokens=n) for start, n in ((5, 12), (0, 3))]
    outputs = tokens(table_lm(counting), model_drafter(table_lm(bad)), requests, rule, 6)
    assert outputs == [(5,) * 12, (1, 2, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["candidates", "tensors"])
@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_options_that_leave_no_token_are_an_error(dtype: torch.dtype, k: int, temperature: float) -> None:
    """After a 4 only a 2 has a finite logit."""
    table = random_table(6, 1).to(dtype)
    table[4] = -torch.inf
    table[4, 2] = 0.0
    one = request((1, 4), max_new_tokens=3, temperature=temperature, logit_bias={2: -torch.inf})
    drafter = model_drafter(table_lm(random_table(6, 2).to(dtype), name="draft"))
    with pytest.raises(NumericsError, match="every token that the options allow at position 2 has a logit of minus"):
        tokens(table_lm(table), drafter, [one], BLOCK, k)
