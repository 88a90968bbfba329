"""Certificates under constraints: the loop with constrained rows, against masks from walks along finished texts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from languages import Remainders
from outrider.certify.controls import ACCEPT_ALL
from outrider.certify.design import Design
from outrider.certify.exact import check_exactly
from outrider.certify.observed import GeneratedText, ObservedTokens, UnenforcedConstraint, observe
from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.records import Draft
from outrider.sampling.rules import BLOCK, REJECTION, RULES, Rule
from toys import request, run, table_pair

PROMPTS = [(1, 2), (3,), (4, 4, 0, 1)]
LENGTH = 20
LEVEL = 1e-6
TARGET, DRAFTER = table_pair(6)
OPTIONS = Sampling(temperature=0.9, top_k=4, presence_penalty=0.5)


def _new(prompt_ids: Sequence[int] = ()) -> Remainders:
    return Remainders(6)


def _observed(drafter: Drafter, rule: Rule, first: int, num_texts: int, sampling: Sampling = OPTIONS) -> ObservedTokens:
    numbers = range(first, first + num_texts)
    requests = []
    for i in numbers:
        row = replace(sampling, seed=i, max_new_tokens=LENGTH)
        requests.append(replace(request(PROMPTS[i % 3]), sampling=row, constraint=UnenforcedConstraint(_new())))
    written = []
    for i, output in zip(numbers, run(TARGET, drafter, requests, rule, 4), strict=True):
        places = tuple(place for row in output.rounds for place in range(len(row.token_ids)))
        written.append(GeneratedText(i, i % 3, PROMPTS[i % 3], output.token_ids, places))
    return observe(TARGET, DRAFTER, sampling, written, seed=0, batch_size=num_texts, new_constraint=_new)


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_the_exact_layer_sees_the_masks(rule: Rule) -> None:
    """Contexts with output before them, some tokens of which forbid others."""
    texts = [Text((1, 2, 3, 5, 0), 2), Text((3,)), Text((4, 4, 0, 1, 2), 4)]
    report = check_exactly(TARGET, DRAFTER, OPTIONS, rule, texts, _new)
    assert report.is_ok and report.distance != check_exactly(TARGET, DRAFTER, OPTIONS, rule, texts).distance


def _unmasked(rows: Rows, k: int, draft: Draft) -> Draft:
    """Drafts are drawn under the masks, while q without them is reported."""
    if draft.ids.shape[1] == 0:
        return draft
    before = torch.cat((rows.last_ids[:, 1:], draft.ids[:, :-1]), dim=1)
    return replace(draft, probs=DRAFTER.lm.model.table[before].softmax(-1))


def test_a_right_loop_passes_and_a_mistake_alarms() -> None:
    """4,000 tokens; false alarm: 1e-6. Proposals of a look-up are not masked, and here all are kept."""
    design = Design.of(_observed(DRAFTER, REJECTION, 10**6, 30), 4000, LEVEL, len(PROMPTS))
    for drafter, rule, is_wrong in (
        (DRAFTER, BLOCK, False),
        (altered_drafter(DRAFTER, "unmasked q", _unmasked), REJECTION, True),
    ):
        tested = _observed(drafter, rule, 0, 200)
        assert any(test.is_alarm for test in design.tests(tested, LEVEL)) == is_wrong
        assert is_wrong or not tested["is_forbidden"].any()
    observed = _observed(ngram_drafter(), ACCEPT_ALL, 0, 100, Sampling())
    assert observed["is_forbidden"].any() and len(observed) == 100 * LENGTH
