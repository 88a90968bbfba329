"""The statistical tests of a certificate on a masked pair: the loop with constrained rows, against teacher forcing with
logits that are masked by walking along the finished texts."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from languages import Remainders
from outrider.certify.controls import ACCEPT_ALL
from outrider.certify.design import Design
from outrider.certify.observed import Observed, Written, observe
from outrider.drafters.base import Altered, Drafter, Rows
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings
from outrider.sampling.rules import REJECTION, RULES, Rule
from outrider.scoring.teacher_forcing import Forced, Text, force
from toys import request, run, table_pair

PROMPTS = [(1, 2), (3,), (4, 4, 0, 1)]
LENGTH = 20
LEVEL = 1e-6
TARGET, DRAFTER = table_pair(6)


@pytest.fixture(autouse=True)
def _masked_forcing(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(lm: LM, texts: Sequence[Text], settings: Sequence[Settings] = ()) -> Iterator[Forced]:
        walks = [Remainders(lm.vocab_size) for _ in texts]
        for chunk in force(lm, texts, settings):
            allowed = []
            for row, token_id in zip(chunk.rows.tolist(), chunk.ids.tolist(), strict=True):
                allowed.append(walks[row].allowed())
                walks[row].push(token_id)
            yield replace(chunk, logits=chunk.logits.masked_fill(~torch.from_numpy(np.stack(allowed)), -torch.inf))

    monkeypatch.setattr("outrider.certify.observed.force", masked)


def _observed(drafter: Drafter, rule: Rule, first: int, num_texts: int) -> Observed:
    numbers = range(first, first + num_texts)
    requests = [
        replace(request(PROMPTS[i % 3], seed=i, max_new_tokens=LENGTH), constraint=Remainders(6)) for i in numbers
    ]
    written = [
        Written(
            index=i,
            prompt=i % 3,
            prompt_ids=PROMPTS[i % 3],
            token_ids=output.token_ids,
            places=tuple(place for row in output.rounds for place in range(len(row.token_ids))),
        )
        for i, output in zip(numbers, run(TARGET, drafter, requests, rule, 4), strict=True)
    ]
    return observe(TARGET, DRAFTER, Sampling(), written, seed=0, batch_size=num_texts)


def _findings(drafter: Drafter, rule: Rule) -> tuple[bool, bool]:
    """Whether a test alarms, and whether a token came that the mask forbids."""
    pilot, tested = _observed(DRAFTER, REJECTION, 10**6, 30), _observed(drafter, rule, 0, 200)
    design = Design.of(pilot, len(tested), LEVEL, len(PROMPTS))
    return any(test.is_alarm for test in design.tests(tested, LEVEL)), bool(tested.is_forbidden.any())


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
def test_right_rules_pass(rule: Rule) -> None:
    """4,000 tokens. False alarm: 1e-6 each."""
    assert _findings(DRAFTER, rule) == (False, False)


def _unmasked(rows: Rows, k: int, draft: Draft) -> Draft:
    """Drafts are drawn under the masks, while q without them is reported."""
    before = torch.cat((rows.last_ids[:, None], draft.ids[:, :-1]), dim=1)
    return replace(draft, probs=DRAFTER.lm.model.table[before].softmax(-1))


def test_mistakes_alarm() -> None:
    assert _findings(Altered(DRAFTER, "unmasked q", _unmasked), REJECTION)[0]
    assert _findings(DRAFTER, ACCEPT_ALL)[0]
