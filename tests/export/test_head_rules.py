"""The tau of heads under the rules of engines: their drafts are forced along recorded output."""

from dataclasses import replace

import numpy as np
import pytest

from block_heads import block_drafter
from heads import eagle3_drafter
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.chain import ChainDrafter
from outrider.drafters.draft_options import DraftOptions
from outrider.export.engine_rules import GREEDY, RATIO, RATIO_BY_TEMPERATURE
from outrider.options import Sampling
from outrider.replay.forced import force_records
from outrider.replay.log import Header, Record
from outrider.replay.replay import MATCH, replay, summarise
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from toys import as_lm, request, run, tiny_llama

FILTERED = Sampling(temperature=0.8, top_k=3, max_new_tokens=12)
PLAIN = replace(FILTERED, top_k=0)


@pytest.fixture(scope="module")
def target() -> LM:
    return as_lm(tiny_llama(num_layers=4))


@pytest.fixture(scope="module", params=["chain", "block"])
def drafter(request: pytest.FixtureRequest, target: LM) -> Drafter:
    return eagle3_drafter(target) if request.param == "chain" else block_drafter(target)


@pytest.fixture(scope="module")
def records(target: LM) -> list[Record]:
    prompts = [(5, 6, 7), (1,)]
    requests = [request(ids, seed=i, max_new_tokens=12, temperature=0.8, top_k=3) for i, ids in enumerate(prompts)]
    outputs = run(target, NoDrafter(), requests, REJECTION, 0)
    return [
        Record(i, None, i, "length", ids, tuple(output.token_ids))
        for i, (ids, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def _header(sampling: Sampling) -> Header:
    return Header("target", sampling, None, 60, 256, (), None)


def test_q_has_the_options_of_the_engine(target: LM, drafter: Drafter, records: list[Record]) -> None:
    """Its temperature and no filters: the ratio is that of a plain q to a filtered p."""

    def logs(acceptance: str, header: Sampling, q: Sampling | None) -> list[np.ndarray]:
        return [one.logs for one in force_records(records, _header(header), target, drafter, acceptance, 3, q)]

    q, p = logs(MATCH, PLAIN, None), logs(MATCH, FILTERED, Sampling(temperature=0.8))
    filtered = logs(MATCH, FILTERED, None)
    for one, other, third in zip(q, p, filtered, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
        assert np.isinf(third[np.isfinite(one)]).any()  # a filter would have removed some of the tokens
    by_engine = RATIO_BY_TEMPERATURE.expected(records, _header(FILTERED), drafter, [3], target)
    same = RATIO.expected(records, _header(FILTERED), drafter, [3], target)
    assert by_engine[3].tau is not None and by_engine[3].tau != same[3].tau


def test_greedy_drafts(target: LM, drafter: Drafter, records: list[Record]) -> None:
    """As of a drafter that takes its argmax."""
    found = GREEDY.expected(records, _header(PLAIN), drafter, [3], target)
    if isinstance(drafter, ChainDrafter):
        greedy = replace(drafter, options=DraftOptions(is_greedy=True))
        expected = summarise(replay(records, _header(PLAIN), greedy, REJECTION.name, [3], target=target), [3])
        assert found[3].tau == expected.expected[3].tau
    assert found[3].tau is not None and 1 <= found[3].tau.value < 2
