"""Drafts that end where the draft model is unsure."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.api import load_drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import mask_token_of, model_drafter
from outrider.errors import OptionError
from outrider.sampling.rules import BLOCK, GUMBEL
from pairs import embedded
from toys import llama_pair, request, run, table_pair


@pytest.mark.each_execution
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.3, "top_k": 3}])
def test_a_draft_ends_before_the_first_token_of_which_it_is_unsure(options: dict[str, Any]) -> None:
    """By the probabilities of the model, whatever the temperature. Row by row in a Markov chain, whose every round is
    known from the accepted tokens and the token that was drafted last."""
    target, drafter = table_pair(8)
    probs = drafter.models[0].model.table.softmax(-1).amax(-1)
    min_prob = float(probs.quantile(0.4))
    is_sure = (probs >= min_prob).tolist()
    requests = [replace(request((i,), seed=i, max_new_tokens=24, **options), reports_drafts=True) for i in range(8)]
    outputs = run(target, model_drafter(drafter.models[0], DraftOptions(min_prob=min_prob)), requests, BLOCK, 4)
    numbers = set()
    for output, one in zip(outputs, requests, strict=True):
        text = list(one.prompt_ids)
        for row in output.rounds[:-2]:
            assert row.drafted is not None
            ids = [token.token_id for token in row.drafted]
            before = [text[-1], *ids]
            assert all(is_sure[token_id] for token_id in before[: len(ids)])
            assert len(ids) == 4 or not is_sure[before[len(ids)]]
            numbers.add(len(ids))
            text += row.token_ids
    assert numbers >= {0, 1, 2}


def test_a_row_is_not_read_beyond_its_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly on the CPU, where nothing is left to draft no further forward is run."""
    target, drafter = llama_pair()
    num_forwards = []
    forward = type(drafter.models[0]).forward
    for min_prob in (0.0, 0.999):
        calls: list[int] = []

        def count(self: Any, *args: Any, calls: list[int] = calls, **options: Any) -> torch.Tensor:
            calls.append(1)
            return forward(self, *args, **options)

        monkeypatch.setattr(type(drafter.models[0]), "forward", count)
        outputs = run(
            target,
            model_drafter(drafter.models[0], DraftOptions(min_prob=min_prob)),
            [request((5, 6, 7, 5, 6, 7, 5), max_new_tokens=16)],
            GUMBEL,
            4,
        )
        num_forwards.append(len(calls) / len(outputs[0].rounds))
    assert num_forwards[1] < num_forwards[0] / 2


def test_names() -> None:
    decoder = embedded()
    for name, is_greedy in (
        ("fable-draft:min-prob=0.3", False),
        ("fable-draft:min-prob=0.25:greedy", True),
    ):
        drafter = load_drafter(decoder, name)
        assert drafter.name == name
        assert (drafter.is_one_hot, drafter.lm) == (is_greedy, None)
        assert mask_token_of("fable-draft", drafter.models[0].model) is None
    for wrong in ("0", "1", "1.5", "-1", "nan", "many", ""):
        with pytest.raises(OptionError, match="min-prob is a probability between 0 and 1"):
            load_drafter(decoder, f"fable-draft:min-prob={wrong}")
