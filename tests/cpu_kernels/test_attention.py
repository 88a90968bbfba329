"""Attention of few queries: the kernel against float64, and the models that call it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from outrider.kernels.attention import KEY_DTYPES, few_query_attention, register
from toys import as_lm, tiny_llama

_EPSILON = 2.0**-24  # of float32, rounding to nearest
_LEAST = torch.finfo(torch.float32).min


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The slow twin, in float64: the result, and how far off it may be. [B, T, H, E] each"""
    query, key, value, mask = (tensor.double() for tensor in (query, key, value, mask))
    num_shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(num_shared, dim=1) for tensor in (key, value))
    weights = (query @ key.mT * scale + mask).softmax(dim=-1)
    # A score is a sum of D terms, its mask is added; a weight is off by as much as its score and the largest one, in
    # proportion; then L terms are added twice, and the exponential itself is off by two units.
    seen = mask > _LEAST
    terms = query.abs() @ key.abs().mT * abs(scale) * (key.shape[-1] + 2) + mask.abs()
    terms = terms.masked_fill(~seen, 0.0)
    error = 1.1 * _EPSILON * (2.0 * terms.amax(dim=-1, keepdim=True) + 2 * key.shape[-2] + 10)
    return (weights @ value).transpose(1, 2), (error * (weights @ value.abs())).transpose(1, 2) + 1e-30


def inputs(
    num_rows: int,
    num_groups: int,
    num_shared: int,
    num_queries: int,
    num_places: int,
    width: int,
    value_width: int,
    dtype: torch.dtype,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As a model gives them: queries transposed, keys and values in view of a cache with a place more."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int, num_heads: int, width: int) -> Tensor:
        return torch.randn(num_rows, length, num_heads, width, generator=generator)

    query = 2.0 * numbers(num_queries, num_groups * num_shared, width).transpose(1, 2)
    key = numbers(num_places + 1, num_groups, width)[:, :num_places].transpose(1, 2).to(dtype)
    value = numbers(num_places + 1, num_groups, value_width)[:, :num_places].transpose(1, 2).to(dtype)
    positions = torch.randint(0, num_places, (num_rows, 1, num_queries, 1), generator=generator)
    is_hidden = torch.arange(num_places) > positions
    return query, key, value, torch.zeros(is_hidden.shape).masked_fill(is_hidden, _LEAST)


SHAPES = {
    "num_rows": st.integers(1, 3),
    "num_groups": st.integers(1, 3),
    "num_shared": st.integers(1, 4),
    "num_queries": st.integers(1, 9),
    "num_places": st.one_of(st.integers(1, 40), st.sampled_from([128, 255, 256, 257, 520])),
    "width": st.integers(1, 70),
    "value_width": st.integers(1, 140),
    "dtype": st.sampled_from(KEY_DTYPES),
    "seed": st.integers(0, 2**31),
}


@given(num_threads=st.integers(1, 3), **SHAPES)
def test_the_kernel_against_float64(num_threads: int, **shape: object) -> None:
    """Within the bound of sums in any order; and each query as if it were alone, to the bit."""
    query, key, value, mask = inputs(**shape)
    scale = query.shape[-1] ** -0.5
    got = few_query_attention(query, key, value, mask, scale, num_threads)
    want, bound = attention(query, key, value, mask, scale)
    assert got.dtype == torch.float32 and got.is_contiguous()
    assert ((got.double() - want).abs() <= bound).all()
    for t in range(query.shape[2]):
        alone = few_query_attention(query[:, :, t : t + 1], key, value, mask[:, :, t : t + 1], scale, 1)
        assert torch.equal(alone[:, 0], got[:, t])


@pytest.mark.parametrize("dtype", KEY_DTYPES)
def test_the_view_does_not_matter(dtype: torch.dtype) -> None:
    """Nor what lies in places that are hidden from all."""
    query, key, value, mask = inputs(2, 2, 2, 5, 700, 64, 64, dtype, 0)
    mask[..., 90:] = _LEAST
    mask[..., :90][..., 0] = 0
    want = few_query_attention(query, key[:, :, :128], value[:, :, :128], mask[..., :128], 0.1, 1)
    assert torch.equal(few_query_attention(query, key, value, mask, 0.1, 2), want)
    key, value = key.clone(), value.clone()
    key[:, :, 90:], value[:, :, 90:] = torch.nan, torch.inf
    assert torch.equal(few_query_attention(query, key, value, mask, 0.1, 2), want)


@pytest.mark.parametrize("num_places", [40, 600])
def test_masks_are_added(num_places: int) -> None:
    """Whatever they are, one for all heads or one for each."""
    query, key, value, mask = inputs(2, 2, 3, 4, num_places, 32, 32, torch.float32, 1)
    mask = torch.randn(2, 6, 4, num_places, generator=torch.Generator().manual_seed(2)) * 5.0
    mask[:, :, :, ::3] = -torch.inf
    for one in (mask, mask[:1], mask[:, :1], mask[:1, :1]):
        want, bound = attention(query, key, value, one, 0.2)
        got = few_query_attention(query, key, value, one, 0.2, 2)
        assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("hidden", [-torch.inf, _LEAST])
@pytest.mark.parametrize("num_places", [40, 600])
def test_rows_that_are_not_finite_stay_alone(num_places: int, hidden: float) -> None:
    query, key, value, mask = inputs(3, 1, 2, 3, num_places, 20, 20, torch.float32, 3)
    mask[..., 0] = 0
    want = few_query_attention(query, key, value, mask, 0.2, 1)
    query[0, :, 1] = torch.nan
    key[1, :, 0], mask[2, :, 2] = torch.inf, hidden
    got = few_query_attention(query, key, value, mask, 0.2, 1)
    assert got[0, 1].isnan().all() and got[1].isnan().all()
    assert torch.equal(got[0, [0, 2]], want[0, [0, 2]]) and torch.equal(got[2, :2], want[2, :2])
    assert (got[2, 2] == 0).all()  # it may look nowhere


def test_scores_that_overflow_an_exponential() -> None:
    """Weights are formed from the distance to the largest score."""
    query, key, value, mask = inputs(1, 1, 1, 2, 300, 16, 16, torch.float32, 4)
    want, bound = attention(query * 1e4, key, value, mask, 1.0)
    assert ((few_query_attention(query * 1e4, key, value, mask, 1.0, 1).double() - want).abs() <= bound).all()


def _logits(model: PreTrainedModel, implementation: str) -> Tensor:
    """Logits of two rows of different lengths, three tokens each. [2, 3, V]"""
    lm = as_lm(model)
    cache = lm.new_cache(2, 40)
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(2, -1)
    model.set_attn_implementation(implementation)
    with torch.inference_mode():
        lm.forward(
            ids[:, :9], torch.where(positions[:, :9] < torch.tensor([[9], [4]]), positions[:, :9], -1), cache, 40
        )
        return lm.forward(ids[:, 9:], torch.tensor([[9], [4]]) + torch.arange(3), cache, 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_models_that_call_it(dtype: torch.dtype) -> None:
    """Groups of heads, rows of different lengths; in float64 they have torch's own attention."""
    model = tiny_llama().to(dtype)
    want, got = _logits(tiny_llama().to(dtype).double(), "sdpa"), _logits(model, register(1))
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float64: 0.0}[dtype]
    assert ((got.double() - want).abs().amax() <= tolerance * want.abs().amax()).all()
