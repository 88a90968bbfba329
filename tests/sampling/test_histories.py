"""The law under options that look back, by enumeration (round_laws.py).

The law wanted is that of the target alone, by Hugging Face's processors and, for the penalties of OpenAI's API, a count
(reference.py).
"""

from functools import partial

import pytest

from outrider.options import Sampling
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.rules import BLOCK, REJECTION, Rule
from reference import law_distance, rounds_law, table_law
from round_laws import round_law
from toys import random_table

PROMPT = (0, 2, 0)
TABLES = random_table(3, 0, 1.5), random_table(3, 1)
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


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_targets(rule: Rule, sampling: Sampling, k: int) -> None:
    """To 1e-12. (The tokens of ``gumbel`` are those of plain decoding: tests/decoding/test_engine.py.)"""
    law = rounds_law(partial(round_law, rule, k, TABLES, PROMPT, sampling), 3)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, table_law(TABLES[0], PROMPT, sampling, 3)) < 1e-12


def test_a_history_that_forgets_the_drafts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slip of engines whose penalties do not see the tokens of the same round."""
    along = type(NO_HISTORY).along
    monkeypatch.setattr(
        type(NO_HISTORY),
        "along",
        lambda self, ids: along(self, ids).map(lambda values: values[:, :1].expand_as(values)),
    )
    law = rounds_law(partial(round_law, BLOCK, 2, TABLES, PROMPT, SAMPLINGS[1]), 3)
    assert law_distance(law, table_law(TABLES[0], PROMPT, SAMPLINGS[1], 3)) > 0.01
