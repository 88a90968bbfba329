"""Costs of rounds, as they are kept on disk."""

import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.decoding import costs as costs_module
from outrider.decoding.costs import round_costs
from outrider.drafters.base import NoDrafter
from outrider.runtime.thin_weight import ThinWeight
from outrider.sampling.rules import RULES
from toys import as_lm, table_pair, tiny_llama


def test_costs_of_another_processor_or_of_long_ago_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    target, drafter = table_pair(5)
    measured = []

    def made_up(*_: object) -> dict[int, float]:
        measured.append(1.0 + len(measured))
        return dict.fromkeys(target.execution.favoured_k, measured[-1])

    def cost() -> float:
        return round_costs(target, drafter, RULES["rejection"], 2, 60)[0]

    monkeypatch.setattr(costs_module, "measure_round_costs", made_up)
    assert cost() == cost() == 1.0
    (file,) = (tmp_path / "outrider" / "costs").iterdir()
    day = 24 * 3600
    for age, wanted in ((29 * day, 1.0), (31 * day, 2.0), (0, 2.0)):
        if age:
            os.utime(file, (time.time() - age,) * 2)
        assert cost() == wanted
    monkeypatch.setattr(costs_module, "processor_name", lambda: "Another Processor 9000")
    assert cost() == cost() == 3.0


def test_weights_that_are_kept_as_they_are_stored_have_costs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read in another time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = iter((1.0, 2.0, 3.0))
    monkeypatch.setattr(costs_module, "measure_round_costs", lambda *_: {0: next(measured)})
    target = as_lm(tiny_llama().float())
    layer = target.model.model.layers[0].mlp.up_proj
    weight = layer.weight.detach()
    for wanted, stored in ((1.0, weight), (2.0, ThinWeight(weight, torch.float32)), (1.0, weight)):
        layer.weight = nn.Parameter(stored, requires_grad=False)
        assert round_costs(target, NoDrafter(), RULES["block"], 1, 60)[0] == wanted
    layer.weight = nn.Parameter(ThinWeight(weight.bfloat16(), torch.float32), requires_grad=False)
    assert round_costs(target, NoDrafter(), RULES["block"], 1, 60)[0] == 3.0
