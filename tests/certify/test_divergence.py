"""Why two texts differ: rounding, or a fault."""

import copy
from typing import Any

import pytest
import torch

from outrider.certify.divergence import Divergence, GreedyReport, explain
from outrider.drafters.base import NO_DRAFTER
from outrider.options import Sampling
from outrider.sampling.rules import GUMBEL
from toys import as_lm, llama_pair, request, table_lm, tiny_llama, tokens

PROMPT = [3, 1, 4, 1, 5]
GREEDY = Sampling(temperature=0.0)


def test_divergence_of_a_clear_token_is_a_bug() -> None:
    """In float64, where there are no near-ties."""
    sampling = Sampling(temperature=0.8, seed=3)
    target, _ = llama_pair()
    one = request(PROMPT, seed=3, temperature=sampling.temperature, max_new_tokens=12)
    (text,) = tokens(target, NO_DRAFTER, [one], GUMBEL, 0)
    assert explain(target, 0, PROMPT, text, text, sampling, 4) is None
    other = (*text[:7], (text[7] + 1) % 60, *text[8:])
    found = explain(target, 2, PROMPT, text, other, sampling, 4)
    assert found is not None
    assert (found.prompt, found.position, found.plain_id, found.other_id) == (2, 7, text[7], other[7])
    assert found.verdict == "bug" and found.margin is not None and found.margin > 0 and found.gap < 1e-12
    ended = explain(target, 0, PROMPT, text, text[:9], sampling, 4)
    assert ended == Divergence(0, 9, text[9], None, None, None, "bug")
    for promise, verdicts, is_ok in (
        ("promised", ["numerics"], False),  # rounding excuses no broken promise
        ("not promised (eager)", ["numerics"], True),
        ("not promised (eager)", ["numerics", "bug"], False),
    ):
        differences = [Divergence(0, 3, 7, 8, 1e-7, 1e-6, verdict) for verdict in verdicts]
        assert GreedyReport(2, 40, differences, False, promise).is_ok == is_ok


@pytest.mark.parametrize(
    ("margin", "wobble", "k", "verdict"),
    [
        (1e-4, 3e-5, 4, "numerics"),
        (1e-4, 0.0, 4, "bug"),
        # Another system: blocks of the target say nothing about it. With weights in integers its activations may have 8
        # bits.
        (0.4, 0.0, "integers", "numerics"),
        (0.4, 0.0, "floats", "bug"),
    ],
)
def test_divergence_of_near_ties_is_numerics(margin: float, wobble: float, k: Any, verdict: str) -> None:
    """Logits in float32, 1 + margin and 1: as near as their last bits, or as what (made up) blocks change of them."""
    lm = table_lm(torch.tensor([[1.0 + margin, 1.0, -2.0]] * 3))
    right = lm.forward
    if k == "integers":
        lm.weights.register_parameter("w", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))

    def wobbling(ids: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        return right(ids, *rest, **more) + (ids.shape[1] > 1) * torch.tensor([0.0, wobble, 0.0])

    lm.forward = wobbling  # type: ignore[method-assign]
    found = explain(lm, 0, [0, 2, 1], [0], [1], GREEDY, k if isinstance(k, int) else None)
    assert found is not None and found.verdict == verdict, found
    if k == 4:
        assert found.margin == pytest.approx(margin, abs=2e-7) and found.gap == pytest.approx(wobble, abs=1e-6)


@pytest.mark.parametrize(("distance", "verdict"), [(1e-6, "numerics"), (0.1, "bug")])
def test_divergence_at_the_edge_of_a_filter_is_numerics(distance: float, verdict: str) -> None:
    """The third token is let through by one forward and not by another: near the edge, the margin says nothing."""
    model = copy.deepcopy(tiny_llama()).to(torch.float32)
    logits = model(torch.tensor([PROMPT])).logits[0, -1]
    first, second = logits.topk(2).indices.tolist()
    third = (second + 1) % 60 if (second + 1) % 60 != first else (second + 2) % 60
    with torch.no_grad():
        model.lm_head.weight[third] = model.lm_head.weight[second] * (1 - distance / float(logits[second]))
    sampling = Sampling(temperature=1.0, top_k=2, seed=3)
    found = explain(as_lm(model), 0, PROMPT, [first], [third], sampling, 4)
    assert found is not None and found.verdict == verdict, found
