"""Weights that keep the type in which they are stored: whatever is done with one is done with the widened matrix."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from outrider.kernels.library import FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.weight_tensors import stored_tensors

_EPSILON = 2.0**-24  # of float32, rounding to nearest


def _weight(number: int, width: int, stored: torch.dtype, seed: int = 0) -> NarrowWeight:
    generator = torch.Generator().manual_seed(seed)
    numbers = (40.0 * torch.randn(number, width, generator=generator)).clamp(-127, 127).to(stored)
    scale = torch.rand(number, 1, generator=generator) + 0.5 if stored == torch.int8 else None
    return NarrowWeight(numbers, torch.float32, scale)


@given(
    num_rows=st.integers(1, 140),  # few of them go to the kernel
    width=st.integers(1, 80),
    number=st.integers(1, 40),
    stored=st.sampled_from(list(FORMS)),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_against_float64(
    num_rows: int, width: int, number: int, stored: torch.dtype, has_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(num_rows, width, generator=generator), _weight(number, width, stored, seed)
    bias = torch.randn(number, generator=generator) if has_bias else None
    got = functional.linear(x[None], weight, bias=bias)
    plain = weight.wide().double()
    want = functional.linear(x[None].double(), plain, None if bias is None else bias.double())
    size = functional.linear(x[None].double().abs(), plain.abs(), None if bias is None else bias.double().abs())
    assert type(got) is Tensor and got.dtype == torch.float32
    assert ((got.double() - want).abs() <= 1.01 * (width + 4) * _EPSILON * size).all()


@pytest.mark.parametrize("stored", FORMS)
@pytest.mark.parametrize("is_inference", [False, True])
def test_it_is_the_widened_matrix(stored: torch.dtype, is_inference: bool) -> None:
    weight = nn.Parameter(_weight(12, 9, stored), requires_grad=False)
    assert isinstance(weight, NarrowWeight) and weight.dtype == torch.float32 and weight.shape == (12, 9)
    with torch.inference_mode(is_inference):
        plain, ids = weight.wide(), torch.tensor([[3, 3, 11]])
        assert torch.equal(weight.stored.float() * (1 if weight.scale is None else weight.scale), plain)
        for one, of in (
            (functional.embedding(ids, weight), functional.embedding(ids, plain)),
            (weight.T, plain.T),
            (weight[2:4], plain[2:4]),
            (weight.double(), plain.double()),
            (weight + 1, plain + 1),
            (torch.zeros(12, 9).copy_(weight), plain),
            (torch.zeros(2, 12) @ weight, torch.zeros(2, 12) @ plain),
        ):
            assert type(one) is Tensor and torch.equal(one, of)
        for same in (weight.detach(), weight.clone(), copy.deepcopy(weight)):
            assert isinstance(same, NarrowWeight) and torch.equal(same.wide(), plain)
            assert [part.dtype for part in stored_tensors(same)] == [part.dtype for part in stored_tensors(weight)]


def test_gradients_pass_through_it() -> None:
    """The kernel has none."""
    x, weight = torch.randn(3, 9, requires_grad=True), _weight(12, 9, torch.bfloat16)
    functional.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.wide().sum(dim=0).expand(3, -1))


@pytest.mark.parametrize("shape", [(3, 1, 9), (9,), (0, 9), (2, 0, 9)])
def test_shapes_of_products(shape: tuple[int, ...]) -> None:
    """A batch, a vector, and nothing at all, as an expert may be given."""
    x, weight = torch.randn(shape), _weight(12, 9, torch.bfloat16)
    got, want = functional.linear(input=x, weight=weight), functional.linear(x, weight.wide())
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        functional.linear(torch.randn(3, 11), _weight(12, 9, torch.bfloat16))


def test_it_cannot_be_written_to() -> None:
    """Not even by loading: the numbers would go into a widened copy, and be lost."""
    weight = _weight(12, 9, torch.bfloat16)
    layer = nn.Linear(9, 12, bias=False).requires_grad_(False)
    state = layer.state_dict()
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for write in (
        lambda: weight.zero_(),
        lambda: torch.add(weight, 1, out=weight),
        lambda: layer.load_state_dict({name: tensor.clone() for name, tensor in state.items()}),
    ):
        with pytest.raises(RuntimeError, match="is read-only"):
            write()
    assert torch.equal(torch.zeros(12, 9).add_(weight), weight.wide())  # it is read


@pytest.mark.parametrize("stored", FORMS)
def test_models_are_moved_and_converted(stored: torch.dtype) -> None:
    layer = nn.Linear(9, 12, bias=False)
    layer.weight = nn.Parameter(_weight(12, 9, stored), requires_grad=False)
    assert stored_tensors(layer.to("cpu").float().weight)[0].dtype == stored
    wide, x = layer.weight.wide(), torch.randn(3, 9)
    for dtype in (torch.float64, torch.float16):
        layer.to(dtype)
        assert layer.weight.dtype == dtype and torch.equal(
            layer(x.to(dtype)), functional.linear(x.to(dtype), wide.to(dtype))
        )
        wide = wide.to(dtype)
    layer.to(torch.float32)
    torch.testing.assert_close(layer(x), functional.linear(x, wide.float()), rtol=0.0, atol=1e-3)
    assert layer.to("meta")(x.to("meta")).device.type == "meta"
