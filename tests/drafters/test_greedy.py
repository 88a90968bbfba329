"""A draft model that drafts its likeliest tokens: the law of the output, and its own q."""

import torch

from outrider.api import load_drafter
from outrider.certify.exact import check_exactly
from outrider.certify.observed import draft_rows
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import model_drafter
from outrider.options import Sampling
from outrider.sampling.rules import RULES
from outrider.scoring.teacher_forcing import Text
from pairs import embedded
from toys import llama_pair, request, run, table_pair


def test_the_name_tells() -> None:
    drafter = load_drafter(embedded().plain(), "fable-draft:greedy")
    assert drafter.is_one_hot
    assert drafter.name == "fable-draft:greedy" and drafter.lm.name == "fable-draft"
    assert drafter.with_models(lambda lm: lm) == drafter


def test_drafts_are_the_likeliest_tokens() -> None:
    """Each accepted one is what the draft would have said, and the first correction is not."""
    target, drafter = table_pair(8)
    greedy, best = (
        model_drafter(drafter.models[0], DraftOptions(is_greedy=True)),
        drafter.lm.model.table.argmax(-1).tolist(),
    )
    [output] = run(target, greedy, [request([3], max_new_tokens=200)], RULES["rejection"], 3)
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
    greedy = model_drafter(drafter.models[0], DraftOptions(is_greedy=True))
    texts = [Text([1, 2, 3]), Text([7] * 5)]
    for rule in RULES.values():
        report = check_exactly(target, greedy, Sampling(temperature=0.8, top_p=0.9), rule, texts)
        assert report.is_ok, report


def test_q_is_one_hot_for_certificates() -> None:
    target, drafter = table_pair(8)
    texts = [Text((1, 2, 3, 4, 5, 6))]
    [(_, _, q)] = draft_rows(
        target, model_drafter(drafter.models[0], DraftOptions(is_greedy=True)), Sampling(temperature=0.7), texts
    )
    best = drafter.lm.model.table.argmax(-1)[torch.tensor([1, 2, 3, 4, 5])]
    assert torch.equal(q.argmax(-1), best) and torch.equal(q.amax(-1), torch.ones(5, dtype=torch.float64))
