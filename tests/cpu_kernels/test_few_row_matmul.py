"""Products of few rows: the kernel against float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider.kernels.library import FORMS, few_row_matmul

_EPSILON = 2.0**-24  # of float32, rounding to nearest


def _weights(number: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    numbers = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    return (40.0 * numbers).clamp(-127, 127).to(dtype)


@given(
    num_rows=st.integers(1, 50),
    width=st.integers(1, 150),
    number=st.integers(1, 140),
    dtype=st.sampled_from(list(FORMS)),
    num_threads=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
def test_the_kernel_against_float64(
    num_rows: int, width: int, number: int, dtype: torch.dtype, num_threads: int, seed: int
) -> None:
    """Within the bound of a sum in any order; and each row as if it were alone, to the bit."""
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed))
    weights = _weights(number, width, dtype, seed)
    got = few_row_matmul(x, weights, FORMS[dtype], num_threads)
    matrix = weights.double()
    bound = 1.01 * width * _EPSILON * (x.double().abs() @ matrix.abs().T)
    assert ((got.double() - x.double() @ matrix.T).abs() <= bound).all()
    for t in range(num_rows):
        assert torch.equal(few_row_matmul(x[t : t + 1], weights, FORMS[dtype], 1)[0], got[t])


@given(
    num_rows=st.integers(1, 20),
    width=st.integers(1, 150),
    dtype=st.sampled_from(list(FORMS)),
    outlier=st.sampled_from([0.0, 1e-38, 1e-20, 1e4, 1e12, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_rows_with_one_number_far_above_the_others(
    num_rows: int, width: int, dtype: torch.dtype, outlier: float, seed: int
) -> None:
    """Within the bounds of docs/internals/numerics.md, of which one is that of tiles."""
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * min(1.0, outlier)
    x[:, seed % width] = outlier
    weights = _weights(33, width, dtype, seed)
    weights[:, seed % width] *= seed % 2  # what is far above may count for nothing
    got, want = few_row_matmul(x, weights, FORMS[dtype], 2).double(), x.double() @ weights.double().T
    _, exponents = x.abs().amax(dim=1, keepdim=True).frexp()
    of_tiles = (
        weights.double().abs().sum(dim=1) * 2.0 ** (exponents.clamp_min(-90) - 31.0).double() + _EPSILON * want.abs()
    )
    bound = 1.01 * width * _EPSILON * (x.double().abs() @ weights.double().abs().T)
    is_by_tiles = dtype == torch.int8  # on some processors
    assert ((got - want).abs() <= torch.maximum(bound, of_tiles * is_by_tiles) + 2.0**-149).all()


@pytest.mark.parametrize("dtype", FORMS)
def test_numbers_that_are_not_next_to_one_another(dtype: torch.dtype) -> None:
    """Are copied; the copies live until the products are formed."""
    x, weights = torch.randn(3000, 5), _weights(2000, 301, dtype, 1)
    got = few_row_matmul(x.T[:, ::2][:, :301], weights[::3], FORMS[dtype], 1)
    want = few_row_matmul(x.T[:, ::2][:, :301].clone(), weights[::3].clone(), FORMS[dtype], 1)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", FORMS)
def test_rows_that_are_not_finite_stay_alone(dtype: torch.dtype) -> None:
    x = torch.randn(5, 37, generator=torch.Generator().manual_seed(0))
    weights = _weights(9, 37, dtype, 1)
    want = few_row_matmul(x, weights, FORMS[dtype], 1)
    x[1], x[3, 36] = torch.nan, torch.inf
    got = few_row_matmul(x, weights, FORMS[dtype], 1)
    assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]])
    assert not got[1].isfinite().any() and not got[3].isfinite().any()
