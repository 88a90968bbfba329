"""A draft model that drafts its likeliest tokens: the law of the output, its own q, and what replay predicts for it."""

from dataclasses import replace
from math import sqrt

import pytest
import torch

from outrider.api import load_drafter
from outrider.certify.exact import check_exactly
from outrider.certify.observed import draft_rows
from outrider.decoder import Decoder
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.options import Sampling
from outrider.replay.record import header_of, record_outputs
from outrider.replay.replay import replay, summarise
from outrider.sampling.rules import RULES
from outrider.scoring.teacher_forcing import Text
from outrider.stats.counts import tau_interval
from outrider.stats.intervals import Interval
from pairs import embedded
from toys import llama_pair, request, run, table_pair

OPTIONS = {"temperature": 1.0, "max_new_tokens": 48}
PROMPTS = ["Once upon a time", "The old king", "In the wood", "A fox met", "8 * 12 = ", "At night the"] * 3


@pytest.fixture(scope="module")
def greedy() -> Decoder:
    """The embedded pair, by name."""
    decoder = embedded().plain()
    return replace(decoder, drafter=load_drafter(decoder, "fable-draft:greedy"))


def test_the_name_tells(greedy: Decoder) -> None:
    drafter = greedy.drafter
    assert isinstance(drafter, ModelDrafter) and drafter.is_one_hot
    assert drafter.name == "fable-draft:greedy" and drafter.lm.name == "fable-draft"
    assert drafter.with_models(lambda lm: lm) == drafter


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_drafts_are_the_likeliest_tokens(rule) -> None:
    """Each accepted one is what the draft would have said, and the first correction is not; nothing of q is kept."""
    target, drafter = table_pair(8)
    greedy, best = replace(drafter, options=DraftOptions(is_greedy=True)), drafter.lm.model.table.argmax(-1).tolist()
    [output] = run(target, greedy, [request([3], max_new_tokens=200)], rule, 3)
    last, num_accepted = 3, 0
    for row in output.rounds:
        for token, origin in zip(row.token_ids, row.origins, strict=True):
            assert (token == best[last]) == (origin == "accepted") or origin == "bonus"
            num_accepted += origin == "accepted"
            last = token
    assert num_accepted > 20


def test_a_round_follows_the_targets_law() -> None:
    """By enumeration."""
    target, drafter = llama_pair()
    for rule in RULES.values():
        sampling = Sampling(temperature=0.8, top_p=0.9)
        report = check_exactly(
            target,
            replace(drafter, options=DraftOptions(is_greedy=True)),
            sampling,
            rule,
            [Text([1, 2, 3]), Text([7] * 5)],
        )
        assert report.is_ok, report


def test_q_is_one_hot_for_certificates() -> None:
    target, drafter = table_pair(8)
    texts = [Text((1, 2, 3, 4, 5, 6))]
    [(_, _, q)] = draft_rows(
        target, replace(drafter, options=DraftOptions(is_greedy=True)), Sampling(temperature=0.7), texts
    )
    best = drafter.lm.model.table.argmax(-1)[torch.tensor([1, 2, 3, 4, 5])]
    assert torch.equal(q.argmax(-1), best) and torch.equal(q.amax(-1), torch.ones(5, dtype=torch.float64))


def test_greedy_text_is_that_of_plain_decoding(greedy: Decoder) -> None:
    options = {"temperature": 0.0, "max_new_tokens": 40}
    speculative, plain = greedy.generate(PROMPTS[:4], **options), greedy.plain().generate(PROMPTS[:4], **options)
    assert [one.token_ids for one in speculative] == [one.token_ids for one in plain]


@pytest.mark.parametrize("is_greedy", [True, False], ids=["greedy", "sampled"])
def test_tau_is_the_predicted_one(greedy: Decoder, is_greedy: bool) -> None:
    """Predicted from texts of the target alone, measured on others: the difference is less than 5.1 standard errors,
    which fails by chance in less than one of a million runs. The two ways to draft are told apart by far."""
    decoder = greedy if is_greedy else replace(greedy, drafter=ModelDrafter(greedy.drafter.models[0]))
    prompts = [decoder.encode(prompt) for prompt in PROMPTS]
    records = record_outputs(decoder.plain(), prompts, OPTIONS | {"seed": 0}, num_probs=1)
    header = header_of(decoder.plain(), OPTIONS, 1)
    predicted = summarise(replay(records, header, decoder.drafter, "rejection", [3]), [3]).expected[3].tau
    seeds = [1000 + index for index in range(len(PROMPTS))]
    done = decoder.generate(PROMPTS, num_draft_tokens=3, acceptance="rejection", seed=seeds, **OPTIONS)
    measured = tau_interval([one.stats for one in done])
    assert predicted is not None and measured is not None
    assert abs(predicted.value - measured.value) < 5.1 * sqrt(_error(predicted) ** 2 + _error(measured) ** 2)


def _error(interval: Interval) -> float:
    assert interval.low is not None and interval.high is not None
    return (interval.high - interval.low) / 2 / 1.96
