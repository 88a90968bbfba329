"""The law under options that look back: every way that rounds may go, by the histories and probabilities of the loop.

As in enumeration.py, but p and q depend on the whole text. The law wanted is that of the target alone, by Hugging
Face's processors and, for the penalties of OpenAI's API, a count (reference.py).
"""

import itertools
from functools import partial

import pytest
import torch

from outrider.options import Sampling
from outrider.records import Draft
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.noise import RoundUniforms
from outrider.sampling.probs import Settings, to_probs
from outrider.sampling.rules import BLOCK, REJECTION, Rule
from reference import LENGTHS, RESTS, THRESHOLDS, Law, accept_branches, cells, law_distance, rounds_law, table_law
from toys import random_table

PROMPT = (0, 2, 0)
TARGET, DRAFT = random_table(3, 0, 1.5), random_table(3, 1)
SAMPLINGS = [
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=0.75),
    Sampling(min_tokens=2, stop_token_ids=(1,)),
    Sampling(repetition_penalty=1.5),
    Sampling(
        temperature=0.75,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        min_tokens=3,
        stop_token_ids=(0, 1),
        logit_bias={0: 0.5},
    ),
]


def round_law(rule: Rule, k: int, sampling: Sampling, output: tuple[int, ...]) -> Law:
    """What a round commits after this output."""
    settings = Settings.of([sampling], 3, torch.device("cpu"))
    begin = settings.with_room(NO_HISTORY, 1, 3)
    begin.begin(0, torch.tensor([*PROMPT, *output]), len(PROMPT))
    last = (*PROMPT, *output)[-1]
    law: Law = {}
    for ids in itertools.product(range(3), repeat=k):
        history, q, weight = begin, [], 1.0
        for before, x in zip((last, *ids), ids, strict=False):
            row = to_probs(DRAFT[before][None, None], settings, history.map(lambda values: values[:, None]))[0, 0]
            q.append(row.tolist())
            weight *= q[-1][x]
            history = history.then(torch.tensor([x]))
        if weight == 0:
            continue
        drafted = torch.tensor([ids], dtype=torch.long)
        p_rows = to_probs(TARGET[[last, *ids]][None], settings, begin.along(drafted))
        p = p_rows[0].tolist()
        thresholds = THRESHOLDS[rule.name](p, q, ids)
        draft = Draft(drafted, torch.tensor([q], dtype=torch.float64).view(1, k, 3), torch.tensor([k]))
        for accept, coin_weight in accept_branches(thresholds):
            length = LENGTHS[rule.name](thresholds, accept)
            for _, low, high in cells(RESTS[rule.name](p, q, ids, length)):
                uniforms = torch.tensor([accept], dtype=torch.float64), torch.tensor([(low + high) / 2]).double()
                verdict = rule.verify(p_rows, draft, RoundUniforms(torch.zeros(1, k), *uniforms))
                committed = (*ids[: int(verdict.num_accepted)], int(verdict.next_ids))
                law[committed] = law.get(committed, 0.0) + weight * coin_weight * (high - low)
    return law


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_targets(rule: Rule, sampling: Sampling, k: int) -> None:
    """To 1e-12. (The tokens of ``gumbel`` are those of plain decoding: tests/decoding/test_engine.py.)"""
    law = rounds_law(partial(round_law, rule, k, sampling), 3)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, table_law(TARGET, PROMPT, sampling, 3)) < 1e-12


def test_a_history_that_forgets_the_drafts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip of engines whose penalties do not see the tokens of the same round."""
    along = type(NO_HISTORY).along
    monkeypatch.setattr(
        type(NO_HISTORY),
        "along",
        lambda self, ids: along(self, ids).map(lambda values: values[:, :1].expand_as(values)),
    )
    law = rounds_law(partial(round_law, BLOCK, 2, SAMPLINGS[1]), 3)
    assert law_distance(law, table_law(TARGET, PROMPT, SAMPLINGS[1], 3)) > 0.01
