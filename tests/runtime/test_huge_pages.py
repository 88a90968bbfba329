"""Weights in huge pages: the same numbers at other addresses."""

import mmap
from collections.abc import Callable

import pytest
import torch
from torch import nn

from outrider.runtime.weight_tensors import move_weights
from toys import tiny_llama

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such pages")


def _large() -> nn.Module:
    """Model larger than a page, with two layers that share a weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1024, 768), nn.Linear(768, 768), nn.BatchNorm1d(768), nn.Linear(768, 1024))
    model[3].weight = model[0].weight
    return model


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: weight.data_ptr() for name, weight in model.state_dict(keep_vars=True).items()}


def test_the_numbers_stay_the_same() -> None:
    """In parameters with a storage of their own each, which layers that share a weight still share. Views of common
    memory stay where they are."""
    model, both = _large(), torch.randn(2, 768, 768)
    model.extend((nn.Linear(768, 768), nn.Linear(768, 768)))
    model[4].weight, model[5].weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, addresses = dict(model.named_parameters()), _addresses(model)
    move_weights(model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(new is parameters[name] for name, new in model.named_parameters())
    after = _addresses(model)
    assert {name for name in after if after[name] == addresses[name]} == {"4.weight", "5.weight"}
    assert model[3].weight is model[0].weight
    moved = [weight for name, weight in parameters.items() if after[name] != addresses[name]]
    assert len({weight.untyped_storage().data_ptr() for weight in moved}) == len(moved)


@pytest.mark.parametrize("make", [_large, tiny_llama], ids=["no memory", "a small model"])
def test_weights_stay(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    model = make()
    addresses = _addresses(model)
    if make is _large:
        monkeypatch.setattr(mmap, "mmap", refuse)
    move_weights(model)
    assert _addresses(model) == addresses
