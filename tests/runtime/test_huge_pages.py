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
    """In parameters with a storage of their own each, which layers that share a weight still share."""
    model = _large()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    parameters, addresses = dict(model.named_parameters()), _addresses(model)
    move_weights(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert all(new is parameters[name] for name, new in model.named_parameters())
    assert not set(addresses.values()) & set(_addresses(model).values())
    assert all(weight.untyped_storage().nbytes() == weight.nbytes for weight in parameters.values())
    assert len({weight.untyped_storage().data_ptr() for weight in parameters.values()}) == len(parameters)
    assert model[3].weight is model[0].weight


def test_weights_of_other_models_and_views_of_common_memory_stay() -> None:
    model, both = _large(), torch.randn(2, 768, 768)
    model.extend((nn.Linear(768, 768), nn.Linear(768, 768)))
    model[4].weight, model[5].weight = nn.Parameter(both[0]), nn.Parameter(both[1])
    before = _addresses(model)
    move_weights(model, [model[0].weight])
    after = _addresses(model)
    assert {name for name in before if before[name] == after[name]} == {"0.weight", "3.weight", "4.weight", "5.weight"}


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
