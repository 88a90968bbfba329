"""Adaptive K in the loop and from call to call: the law of the output is untouched, and no text depends on what was
learned but through K."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from block_heads import tiny_block_drafter
from outrider.decoder import Decoder
from outrider.decoding.batch import Row
from outrider.decoding.schedule import RoundOutcome, Schedule, favoured_ks
from outrider.drafters.base import NO_DRAFTER, Drafter, altered_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES, Rule
from toys import MadeUpTimes, as_lm, run, table_pair, tiny_llama


class Wandering:
    """K that follows the text: the worst case for a law that would depend on it."""

    max_k = 3

    def next_k(self, rows: Sequence[Row], num_rows: int) -> int:
        return sum(row.token_ids[-1] + row.length for row in rows) % 4

    def learn(self, outcome: RoundOutcome) -> None:
        pass


@pytest.mark.parametrize(
    ("rule", "schedule"),
    [(RULES["block"], Wandering()), (RULES["rejection"], MadeUpTimes({1: {0: 10.0, 1: 18.0, 2: 24.5, 3: 32.0}}))],
    ids=["by the text", "by texts before"],
)
def test_the_law_does_not_depend_on_how_k_is_chosen(rule: Rule, schedule: Schedule) -> None:
    """4,000 texts of three tokens over three, a hundred at a time. The K of each round is chosen by the tokens that all
    of them have committed, or by all calls before. Against the exact law (chi-square over 27 texts; false alarm 1e-6).
    A K chosen by the drafts themselves would be the wrong rule "drop-unlikely" of test_lossless.py, which is detected
    there."""
    target, drafter = table_pair(3)
    counts, drafted = torch.zeros(27), set()
    num_texts, at_a_time = 4_000, 100
    for first in range(0, num_texts, at_a_time):
        seeds = range(first, first + at_a_time)
        asked = [Request([0], Sampling(seed=seed, max_new_tokens=3)) for seed in seeds]
        for output in run(target, drafter, asked, rule, schedule):
            a, b, c = output.token_ids
            counts[a * 9 + b * 3 + c] += 1
            drafted |= {row.num_drafted for row in output.rounds}
    p = target.model.table.softmax(-1)
    law = torch.einsum("a,ab,bc->abc", p[0], p, p).flatten()
    statistic = float(((counts - num_texts * law).square() / (num_texts * law)).sum())
    assert statistic < 79.0  # chi-square with 26 degrees of freedom: 3e-7
    assert len(drafted) > 1


def test_auto_through_the_door() -> None:
    target, drafter = table_pair(5)
    decoder = Decoder(target, None, frozenset(), drafter, acceptance="gumbel", num_draft_tokens="auto")
    auto, plain = (d.generate([[1], [2]], seed=[3, 4], max_new_tokens=40) for d in (decoder, decoder.plain()))
    assert [c.token_ids for c in auto] == [c.token_ids for c in plain]
    with pytest.raises(OptionError, match="num_draft_tokens = 'much'"):
        decoder.generate([[1]], num_draft_tokens="much")
    # Rows of one seed meet the same noise, so that K for one must not follow from what happened to the other.
    chunks = list(decoder.stream_many([[1], [2]], seed=[3, 3], max_new_tokens=30, acceptance="rejection"))
    assert [chunk.stats.num_draft_tokens for chunk in chunks[:6]] == [4] * 6


@pytest.fixture
def decoder() -> Decoder:
    target, drafter = table_pair(5)
    return Decoder(target, None, frozenset(), drafter, acceptance="rejection", num_draft_tokens="auto")


def test_replace_keeps_the_estimates_of_a_pair(decoder: Decoder) -> None:
    """To decoders of the same pair, and to no others."""
    other = replace(decoder, acceptance="block", num_draft_tokens=3)
    assert other.pair_state is decoder.pair_state
    for changed in (decoder.plain(), replace(decoder, target=table_pair(5, 1)[0])):
        assert changed.pair_state is not decoder.pair_state
        assert replace(changed, num_draft_tokens=2).pair_state is changed.pair_state
    assert replace(decoder) == decoder  # it is no part of what a decoder is


def test_estimates_are_those_of_a_rule(decoder: Decoder) -> None:
    assert decoder.pair_state is not None
    of_rule = decoder.pair_state.estimates
    decoder.generate([[1]], max_new_tokens=30)
    assert of_rule(RULES["rejection"]) is of_rule(RULES["rejection"]) is not of_rule(RULES["block"])
    assert of_rule(RULES["rejection"])._outcomes and not of_rule(RULES["block"])._outcomes


def test_a_text_with_a_seed_does_not_depend_on_earlier_calls(decoder: Decoder) -> None:
    before = decoder.generate([[1]], seed=3, max_new_tokens=40)[0]
    decoder.generate([[1], [2]], max_new_tokens=40)
    assert decoder.generate([[1]], seed=3, max_new_tokens=40)[0].token_ids == before.token_ids


def test_calls_at_the_same_time(decoder: Decoder) -> None:
    """They share their estimates, and under gumbel each text is that of plain decoding."""
    options = {"acceptance": "gumbel", "max_new_tokens": 40}
    plain = [text.token_ids for text in decoder.plain().generate([[1]] * 4, seed=[0, 1, 2, 3], **options)]

    def text(seed: int) -> tuple[int, ...]:
        return decoder.generate([[1]], seed=seed, **options)[0].token_ids

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(text, range(4))) == plain


def _block(size: int) -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(num_layers=4), "target")
    return target, tiny_block_drafter(target, block_size=size)


def test_a_drafter_adds_its_own_k() -> None:
    """The whole block, and half of a large one; none beyond what the drafter can draft."""
    usual = {0, 1, 2, 3, 4, 6, 8}
    for size, wanted in ((17, usual | {16}), (16, usual | {7, 15}), (8, {0, 1, 2, 3, 4, 6, 7}), (4, {0, 1, 2, 3})):
        assert set(favoured_ks(*_block(size))) == wanted
    draft = as_lm(tiny_llama(), "draft")
    at_once = model_drafter(draft, mask_id=59)
    beside = hybrid_drafter(suffix_drafter(None), at_once, 60)
    for one in (at_once, beside, altered_drafter(at_once, "altered", lambda rows, k, draft: draft)):
        assert favoured_ks(draft, one) == (0, 1, 2, 3, 4, 6, 7, 8, 15)
    assert set(favoured_ks(draft, model_drafter(draft))) == usual and favoured_ks(draft, NO_DRAFTER) == (0,)
