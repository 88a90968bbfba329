"""Matrices in the blocks of GGUF files, whose numbers are those of the package ``gguf``, and in groups of 4 bits; and
products with them."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from ggml_blocks import block_bytes, numbers_of
from outrider.kernels import narrow_weight
from outrider.kernels.blocks import BLOCK_FORMS, GROUP_FORMS, in_groups
from outrider.kernels.library import few_row_matmul, widen_rows
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.weight_tensors import stored_tensors
from rounded_rows import MOST_INTEGER, rounded

_OF_GGUF = {form.name: form for form in BLOCK_FORMS.values()}
_IN_GROUPS = {f"{size}, {has_zero}": (size, has_zero) for size, has_zero in GROUP_FORMS}
_BY_NAME = _OF_GGUF | {name: GROUP_FORMS[form] for name, form in _IN_GROUPS.items()}


def _matrix(name: str, number: int, num_blocks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes, and what they mean."""
    if name in _OF_GGUF:
        blocks = block_bytes((number, num_blocks * _BY_NAME[name].num_numbers), name, seed)
        return torch.from_numpy(blocks), torch.from_numpy(numbers_of(blocks, name))
    size, has_zero = _IN_GROUPS[name]
    generator = torch.Generator().manual_seed(seed)
    wholes = torch.randint(0, 16, (number, num_blocks * size), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (number, num_blocks), dtype=torch.uint8, generator=generator) if has_zero else None
    scales = (torch.randn(number, num_blocks, generator=generator) / 50).half()
    shifts = torch.full((number, num_blocks), 8.0) if zeros is None else zeros.float()
    shifted = wholes.float().view(number, num_blocks, size) - shifts[..., None]
    return in_groups(wholes, scales, zeros), (shifted * scales.float()[..., None]).view(number, -1)  # exact


def _product(x: Tensor, weight: NarrowWeight, num_threads: int) -> Tensor:
    assert weight.blocks is not None
    return few_row_matmul(x, weight.stored, weight.blocks.number, num_threads, weight.blocks.num_digits)


@settings(max_examples=70)
@given(
    name=st.sampled_from(list(_BY_NAME)),
    num_rows=st.integers(1, 70),
    num_blocks=st.integers(1, 11),
    number=st.integers(1, 20),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_widened_matrix(
    name: str, num_rows: int, num_blocks: int, number: int, num_threads: int, seed: int
) -> None:
    """Up to the order of sums, for any number of rows and threads; and each row is as if it were alone."""
    rows, numbers = _matrix(name, number, num_blocks, seed)
    blocks, form = NarrowWeight.of_blocks(rows, _BY_NAME[name]).stored, _BY_NAME[name].number
    width = numbers.shape[1]
    some = torch.randint(number, (5,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(widen_rows(blocks, some, form, width, num_threads), numbers[some])
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    got, wide = few_row_matmul(x, blocks, form, num_threads), numbers.double()
    error, size = (got - x.double() @ wide.T).abs(), x.double().abs() @ wide.abs().T
    assert bool((error <= 1.01 * width * 2.0**-24 * size).all())
    assert torch.equal(got[-1:], few_row_matmul(x[-1:], blocks, form, 1))


@settings(max_examples=70)
@given(
    name=st.sampled_from(list(_BY_NAME)),
    num_rows=st.integers(1, 40),
    num_blocks=st.integers(1, 11),
    num_digits=st.sampled_from(list(MOST_INTEGER)),
    number=st.integers(1, 40),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_of_rounded_rows(
    name: str, num_rows: int, num_blocks: int, num_digits: int, number: int, num_threads: int, seed: int
) -> None:
    """They are those of ``rounded`` rows; each row is as if it were alone."""
    stored, wide = _matrix(name, number, num_blocks, seed)
    x = torch.randn(num_rows, wide.shape[1], generator=torch.Generator().manual_seed(seed))
    x *= torch.tensor([1.0, 1e-3, 1e4, 0.0])[(torch.arange(num_rows) + seed) % 4][:, None]
    weight = NarrowWeight.of_blocks(stored, replace(_BY_NAME[name], num_digits=num_digits))
    assert torch.equal(weight.wide(), wide)
    some = torch.randint(number, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weight.stored_rows(some), stored[some])
    got, rows = _product(x, weight, num_threads), rounded(x, num_digits)
    want = rows.double() @ wide.double().T
    size = rows.double().abs() @ (wide.double().abs() + wide.double().abs().amax()).T
    assert bool(((got - want).abs() <= 1e-6 * size).all())
    half = x.abs().amax(-1, keepdim=True) / (1.99 * MOST_INTEGER[num_digits])
    assert bool(((rows - x).abs() <= half).all())
    assert torch.equal(got[-1:], _product(x[-1:], weight, 1))


@pytest.mark.parametrize("num_digits", MOST_INTEGER)
def test_rows_are_rounded_alike(num_digits: int) -> None:
    """To the bit: times a matrix of ones and zeros."""
    most, largest = torch.logspace(-4, 4, 600)[:, None], MOST_INTEGER[num_digits]
    x = (67 * torch.arange(256) % largest + 0.5) * (most / largest)  # nearly in the middle between two integers
    x[:, 31::32] = most
    halves = torch.ones(256, 8, 1, dtype=torch.float16).view(torch.int8)  # scales of 1
    ones = torch.cat((halves, torch.eye(256, dtype=torch.int8).view(256, 8, 32)), dim=2).flatten(1).view(torch.uint8)
    got = _product(x, NarrowWeight.of_blocks(ones, replace(_BY_NAME["Q8_0"], num_digits=num_digits)), 1)
    assert torch.equal(got, rounded(x, num_digits))


@pytest.mark.parametrize("num_digits", MOST_INTEGER)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_stays_so(bad: float, num_digits: int) -> None:
    stored, _ = _matrix("Q4_K", 5, 2)
    x = torch.ones(3, 512)
    x[1, 300] = bad
    got = _product(x, NarrowWeight.of_blocks(stored, replace(_BY_NAME["Q4_K"], num_digits=num_digits)), 1)
    assert got.isnan().any(1).tolist() == rounded(x, num_digits).isnan().any(1).tolist() == [False, True, False]
    assert got[1].isnan().all()


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", _BY_NAME)
def test_it_is_the_widened_matrix(name: str, is_inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_weight, "_PANEL_NUMBERS", 5 * 256)
    stored, plain = _matrix(name, 12, 2)
    if name in _IN_GROUPS:
        size, has_zero = _IN_GROUPS[name]
        assert _BY_NAME[name].num_bytes == size // 2 + 2 + has_zero
    weight = nn.Parameter(NarrowWeight.of_blocks(stored, _BY_NAME[name]), requires_grad=False)
    assert weight.dtype == torch.float32 and weight.shape == plain.shape
    with torch.inference_mode(is_inference):
        ids = torch.tensor([[3, 3, 11]])
        for one, of in (
            (functional.embedding(ids, weight, 11), functional.embedding(ids, plain)),
            (weight.T, plain.T),
            (weight[2:4], plain[2:4]),
            (weight.double(), plain.double()),
            (torch.zeros(*plain.shape).copy_(weight), plain),
        ):
            assert type(one) is Tensor and torch.equal(one, of)
        for num_rows in (5, 150):  # the latter by the library, some rows of the matrix at a time
            x, bias = torch.randn(2, num_rows, plain.shape[1]), torch.randn(12)
            got, want = functional.linear(x, weight, bias), functional.linear(x, plain, bias)
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))
        for same in (weight.detach(), weight.clone(), copy.deepcopy(weight)):
            assert isinstance(same, NarrowWeight) and torch.equal(same.wide(), plain)
            (part,) = stored_tensors(same)
            assert part.dtype == torch.uint8 and part.nbytes == 12 * 2 * _BY_NAME[name].num_bytes
    layer = nn.Linear(plain.shape[1], 12, bias=False)
    layer.weight = weight
    assert stored_tensors(layer.to("cpu").float().weight)[0].dtype == torch.uint8
    assert torch.equal(layer.to(torch.float64).weight, plain.double())


@pytest.mark.parametrize("name", _BY_NAME)
def test_rows_of_a_matrix(name: str) -> None:
    """Rows that are not there are refused."""
    stored, plain = _matrix(name, 37, 2)
    weight = NarrowWeight.of_blocks(stored, replace(_BY_NAME[name], num_digits=1))
    assert weight.stored.shape == stored.shape
    ids = torch.tensor([[0, 36, 15], [16, 16, 32]], dtype=torch.int32)
    for same in (weight, copy.deepcopy(weight)):
        assert torch.equal(functional.embedding(ids, same), functional.embedding(ids, plain))
        assert torch.equal(same.wide(), plain)
    for bad in (-1, 37):
        with pytest.raises(IndexError, match="has 37 rows"):
            functional.embedding(torch.tensor([bad]), weight)
