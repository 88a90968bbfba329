"""Matrices in groups of 4 bits: their numbers, and products with them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from outrider.kernels.blocks import GROUP_FORMS, in_groups
from outrider.kernels.library import few_row_matmul, widen_rows
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.runtime.tensor_parts import stored_tensors
from rounded_rows import MOST_INTEGER, rounded


def _matrix(form: tuple[int, bool], number: int, num_groups: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Bytes, and what they mean, in float64."""
    size, has_zero = form
    generator = torch.Generator().manual_seed(seed)
    wholes = torch.randint(0, 16, (number, num_groups * size), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (number, num_groups), dtype=torch.uint8, generator=generator) if has_zero else None
    scales = (torch.randn(number, num_groups, generator=generator) / 50).half()
    shifts = torch.full((number, num_groups), 8) if zeros is None else zeros
    shifted = wholes.double().view(number, num_groups, size) - shifts.double()[..., None]
    return in_groups(wholes, scales, zeros), (shifted * scales.double()[..., None]).view(number, -1)


@settings(max_examples=40)
@given(
    form=st.sampled_from(list(GROUP_FORMS)),
    num_rows=st.integers(1, 70),
    num_groups=st.integers(1, 11),
    number=st.integers(1, 20),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_with_groups(
    form: tuple[int, bool], num_rows: int, num_groups: int, number: int, num_threads: int, seed: int
) -> None:
    """Numbers are exact, products up to the order of sums, and each row is as if it were alone."""
    matrices = [_matrix(form, one, num_groups, seed) for one in (number, 3)]
    groups = [NarrowWeight.of_blocks(pair[0], GROUP_FORMS[form]).stored for pair in matrices]
    numbers = [pair[1] for pair in matrices]
    kind, width = GROUP_FORMS[form].number, numbers[0].shape[1]
    wide = [widen_rows(one, torch.arange(len(one)), kind, width, num_threads) for one in groups]
    assert all(torch.equal(one.double(), of) for one, of in zip(wide, numbers, strict=True))
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    got = few_row_matmul(x, groups, kind, num_threads)
    assert torch.equal(got[-1:], few_row_matmul(x[-1:], groups, kind, 1))
    all_numbers = torch.cat(numbers)
    error, size = (got - x.double() @ all_numbers.T).abs(), x.double().abs() @ all_numbers.abs().T
    assert bool((error <= 1.01 * width * 2.0**-24 * size).all())


@settings(max_examples=40)
@given(
    form=st.sampled_from(list(GROUP_FORMS)),
    num_rows=st.integers(1, 40),
    num_groups=st.integers(1, 11),
    num_digits=st.sampled_from(list(MOST_INTEGER)),
    number=st.integers(1, 40),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_products_of_rounded_rows(
    form: tuple[int, bool], num_rows: int, num_groups: int, num_digits: int, number: int, num_threads: int, seed: int
) -> None:
    """They are those of ``rounded`` rows; each row is as if it were alone."""
    stored, numbers = _matrix(form, number, num_groups, seed)
    x = torch.randn(num_rows, numbers.shape[1], generator=torch.Generator().manual_seed(seed))
    weight, kind = NarrowWeight.of_blocks(stored, GROUP_FORMS[form]), GROUP_FORMS[form].number
    assert torch.equal(weight.wide().double(), numbers)
    got = few_row_matmul(x, [weight.stored], kind, num_threads, num_digits)
    rows = rounded(x, num_digits).double()
    size = rows.abs() @ (numbers.abs() + numbers.abs().amax()).T
    assert bool(((got - rows @ numbers.T).abs() <= 1e-6 * size).all())
    assert torch.equal(got[-1:], few_row_matmul(x[-1:], [weight.stored], kind, 1, num_digits))


@pytest.mark.parametrize("form", GROUP_FORMS)
def test_a_weight_in_groups_takes_their_bytes(form: tuple[int, bool]) -> None:
    stored, numbers = _matrix(form, 12, 3)
    weight = NarrowWeight.of_blocks(stored, GROUP_FORMS[form])
    assert weight.shape == numbers.shape and torch.equal(weight.wide().double(), numbers)
    assert [part.nbytes for part in stored_tensors(weight)] == [12 * 3 * (form[0] // 2 + 2 + form[1])]
    for num_rows in (5, 150):  # the latter by the library
        x = torch.randn(num_rows, numbers.shape[1])
        got, want = functional.linear(x, weight), functional.linear(x, numbers.float())
        torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))
