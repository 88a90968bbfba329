"""Matrices in every form that weights are stored in: numbers, blocks of GGUF files (as the package ``gguf`` reads
them), groups of 4 bits. All that is done with a ``NarrowWeight`` is that of the widened matrix."""

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
from outrider.kernels.blocks import BLOCK_TYPES, GROUP_TYPES, in_groups
from outrider.kernels.library import WEIGHT_TYPES, dequantize_rows, few_row_matmul
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.kernels.row_copies import BackgroundCopies, RowCopy, copy_rows
from rounded_rows import MOST_INTEGER, rounded

_OF_GGUF = {form.name: form for form in BLOCK_TYPES.values()}
_IN_GROUPS = {f"{size}, {has_zero}": (size, has_zero) for size, has_zero in GROUP_TYPES}
_BY_NAME = _OF_GGUF | {name: GROUP_TYPES[form] for name, form in _IN_GROUPS.items()}
_PLAIN = {str(dtype): dtype for dtype in WEIGHT_TYPES}
_EPSILON = 2.0**-24  # of float32, rounding to nearest


def _matrix(name: str, number: int, num_blocks: int, seed: int = 0) -> tuple[Tensor, Tensor]:
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


def _numbers(number: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    numbers = torch.randn(number, width, generator=torch.Generator().manual_seed(seed))
    return (40.0 * numbers).clamp(-127, 127).to(dtype)


def _weight(name: str, number: int, width: int, seed: int = 0) -> tuple[NarrowWeight, Tensor]:
    if name in _BY_NAME:
        stored, wide = _matrix(name, number, width, seed)
        return NarrowWeight.of_blocks(stored, _BY_NAME[name]), wide
    numbers = _numbers(number, width, _PLAIN[name], seed)
    scale = torch.rand(number, 1) + 0.5 if _PLAIN[name] == torch.int8 else None
    return NarrowWeight(numbers, torch.float32, scale), numbers.float() * (1 if scale is None else scale)


def _product(x: Tensor, weight: NarrowWeight, num_threads: int = 1) -> Tensor:
    assert weight.blocks is not None
    return few_row_matmul(x, weight.stored, weight.blocks.number, num_threads, weight.blocks.num_digits)


_SIZES = {"num_threads": st.integers(1, 3), "seed": st.integers(0, 2**31)}


@settings(max_examples=150)
@given(
    name=st.sampled_from([*_BY_NAME, *_PLAIN]),
    num_rows=st.integers(1, 70),
    width=st.integers(1, 150),
    number=st.integers(1, 140),
    **_SIZES,
)
def test_products_near_float64(name: str, num_rows: int, width: int, number: int, num_threads: int, seed: int) -> None:
    if name in _BY_NAME:
        rows, wide = _matrix(name, number, 1 + width // 15, seed)
        stored, form = NarrowWeight.of_blocks(rows, _BY_NAME[name]).stored, _BY_NAME[name].number
        some = torch.randint(number, (5,), generator=torch.Generator().manual_seed(seed))
        assert torch.equal(dequantize_rows(stored, some, form, wide.shape[1], num_threads), wide[some])
    else:
        stored, form = _numbers(number, width, _PLAIN[name], seed), WEIGHT_TYPES[_PLAIN[name]]
        wide = stored.float()
    x = torch.randn(num_rows, wide.shape[1], generator=torch.Generator().manual_seed(seed))
    got, matrix = few_row_matmul(x, stored, form, num_threads), wide.double()
    bound = 1.01 * wide.shape[1] * _EPSILON * (x.double().abs() @ matrix.abs().T)
    assert ((got.double() - x.double() @ matrix.T).abs() <= bound).all()
    for t in {0, num_rows // 2, num_rows - 1}:
        assert torch.equal(few_row_matmul(x[t : t + 1], stored, form, 1)[0], got[t])


@settings(max_examples=70)
@given(
    name=st.sampled_from(list(_BY_NAME)),
    num_rows=st.integers(1, 40),
    num_blocks=st.integers(1, 11),
    num_digits=st.sampled_from(list(MOST_INTEGER)),
    number=st.integers(1, 40),
    **_SIZES,
)
def test_products_of_rounded_rows(
    name: str, num_rows: int, num_blocks: int, num_digits: int, number: int, num_threads: int, seed: int
) -> None:
    stored, wide = _matrix(name, number, num_blocks, seed)
    x = torch.randn(num_rows, wide.shape[1], generator=torch.Generator().manual_seed(seed))
    x *= torch.tensor([1.0, 1e-3, 1e4, 0.0])[(torch.arange(num_rows) + seed) % 4][:, None]
    weight = NarrowWeight.of_blocks(stored, replace(_BY_NAME[name], num_digits=num_digits))
    some = torch.randint(number, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(weight.stored_rows(some), stored[some])
    got, rows = _product(x, weight, num_threads), rounded(x, num_digits)
    want = rows.double() @ wide.double().T
    size = rows.double().abs() @ (wide.double().abs() + wide.double().abs().amax()).T
    assert bool(((got - want).abs() <= 1e-6 * size).all())
    half = x.abs().amax(-1, keepdim=True) / (1.99 * MOST_INTEGER[num_digits])
    assert bool(((rows - x).abs() <= half).all())
    assert torch.equal(got[-1:], _product(x[-1:], weight))
    x[0, seed % x.shape[1]] = (math.nan, math.inf)[seed % 2]
    assert _product(x, weight)[0].isnan().all() and torch.equal(_product(x, weight)[1:], got[1:])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_row_copies_of_all_types_in_one_call(num_threads: int) -> None:
    """Of two parts each, whose rows have places anywhere, in several pieces; and of one part in the rows' order."""
    generator, copies, wanted = torch.Generator().manual_seed(0), list[RowCopy](), list[Tensor]()
    for name in (*_BY_NAME, *_PLAIN):
        size = _BY_NAME[name].num_bytes if name in _BY_NAME else 4
        rows = torch.randint(256, (523, 5000 // size * size), dtype=torch.uint8, generator=generator)
        rows = rows if name in _BY_NAME else rows.view(_PLAIN[name])
        form = _BY_NAME[name].number if name in _BY_NAME else WEIGHT_TYPES[_PLAIN[name]]
        places, matrix, alone = torch.randperm(523, generator=generator), torch.zeros_like(rows), torch.zeros_like(rows)
        parts = zip(rows.split([217, 306]), places.split([217, 306]), strict=True)
        copies += [RowCopy(part, form, matrix, there) for part, there in parts]
        copy_rows([RowCopy(rows[places.argsort()], form, alone)], 1)
        wanted += [alone, alone]
        if name in _BY_NAME:
            weight = NarrowWeight(alone, torch.float32, None, _BY_NAME[name])
            assert torch.equal(weight.stored_rows(places), rows), name
        else:
            assert torch.equal(alone[places].view(torch.uint8), rows.view(torch.uint8)), name
    copy_rows(copies, num_threads)
    for made, want in zip(copies, wanted, strict=True):
        assert torch.equal(made.matrix.view(torch.uint8), want.view(torch.uint8)), made.weight_type


def test_row_copies_in_the_background() -> None:
    rows, matrix = torch.randn(5, 7), torch.zeros(9, 7)
    BackgroundCopies([RowCopy(rows, WEIGHT_TYPES[torch.float32], matrix, torch.arange(5) + 4)]).wait()
    assert torch.equal(matrix[4:], rows) and not matrix[:4].any()
    beyond = BackgroundCopies([RowCopy(rows, WEIGHT_TYPES[torch.float32], matrix, torch.arange(5) + 5)])
    with pytest.raises(IndexError, match="does not have all rows"):
        beyond.wait()
    wrong = {
        "of the type": RowCopy(rows, 12, matrix),
        "as wide": RowCopy(rows, 0, torch.zeros(9, 8)),
        "contiguous": RowCopy(rows.T, 0, matrix.T),
        "no more rows": RowCopy(matrix, 0, rows),
        "all places": RowCopy(rows, 0, matrix, torch.arange(4)),
    }
    for what, refused in wrong.items():
        with pytest.raises(TypeError, match=what):
            copy_rows([refused], 1)


@given(
    num_rows=st.integers(1, 20),
    width=st.integers(1, 150),
    dtype=st.sampled_from(list(WEIGHT_TYPES)),
    outlier=st.sampled_from([0.0, 1e-38, 1e-20, 1e4, 1e12, 1e30]),
    seed=st.integers(0, 2**31),
)
def test_rows_with_an_outlier(num_rows: int, width: int, dtype: torch.dtype, outlier: float, seed: int) -> None:
    x = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * min(1.0, outlier)
    x[:, seed % width] = outlier
    weights = _numbers(33, width, dtype, seed)
    weights[:, seed % width] *= seed % 2  # what is far above may count for nothing
    got, want = few_row_matmul(x, weights, WEIGHT_TYPES[dtype], 2).double(), x.double() @ weights.double().T
    bound = 1.01 * width * _EPSILON * (x.double().abs() @ weights.double().abs().T)
    assert ((got - want).abs() <= bound + 2.0**-149).all()


@pytest.mark.parametrize("dtype", WEIGHT_TYPES)
def test_rows_of_plain_matrices(dtype: torch.dtype) -> None:
    """Numbers that are not next to one another are copied. Rows that are not finite stay alone."""
    x, weights = torch.randn(3000, 5), _numbers(2000, 301, dtype, 1)
    got = few_row_matmul(x.T[:, ::2][:, :301], weights[::3], WEIGHT_TYPES[dtype], 1)
    want = few_row_matmul(x.T[:, ::2][:, :301].clone(), weights[::3].clone(), WEIGHT_TYPES[dtype], 1)
    assert torch.equal(got, want)
    x = torch.randn(5, 301)
    want = few_row_matmul(x, weights, WEIGHT_TYPES[dtype], 1)
    x[1], x[3, 36] = torch.nan, torch.inf
    got = few_row_matmul(x, weights, WEIGHT_TYPES[dtype], 1)
    assert torch.equal(got[[0, 2, 4]], want[[0, 2, 4]])
    assert not got[1].isfinite().any() and not got[3].isfinite().any()


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", [*_BY_NAME, *_PLAIN])
def test_narrow_weight_equals_widened_matrix(name: str, is_inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow_weight, "_PANEL_NUMBERS", 5 * 256)
    kept, plain = _weight(name, 37, 2 if name in _BY_NAME else 9)
    weight = nn.Parameter(kept, requires_grad=False)
    assert isinstance(weight, NarrowWeight) and weight.dtype == torch.float32 and weight.shape == plain.shape
    width = plain.shape[1]
    with torch.inference_mode(is_inference):
        ids = torch.tensor([[3, 3, 36], [16, 32, 0]], dtype=torch.int32)
        for one, of in (
            (functional.embedding(ids, weight, 11), functional.embedding(ids, plain)),
            (weight[2:4], plain[2:4]),
            (weight + 1, plain + 1),
            (torch.zeros(*plain.shape).copy_(weight), plain),
            (torch.zeros(2, 37) @ weight, torch.zeros(2, 37) @ plain),
        ):
            assert type(one) is Tensor and torch.equal(one, of)
        for shape in ((2, 5, width), (2, 150, width), (width,), (0, width), (2, 0, width)):  # many rows in panels
            x, bias = torch.randn(shape), torch.randn(37)
            got, want = functional.linear(x, weight, bias=bias), functional.linear(x, plain, bias)
            most = float(want.abs().amax()) if want.numel() else 0.0
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-4 * most)
        for same in (weight.clone(), copy.deepcopy(weight)):
            assert isinstance(same, NarrowWeight) and torch.equal(same.wide(), plain)
    if name in _BY_NAME:
        for bad in (-1, 37):
            with pytest.raises(IndexError, match="has 37 rows"):
                functional.embedding(torch.tensor([bad]), weight)
    layer = nn.Linear(width, 37, bias=False)
    layer.weight, x = weight, torch.randn(3, width)
    layer.to(torch.float64)
    assert torch.equal(layer(x.double()), functional.linear(x.double(), plain.double()))
    assert layer.to("meta")(x.to("meta")).device.type == "meta"


def test_narrow_weight_passes_gradients() -> None:
    """The kernel has none. And it cannot be written to: the numbers would go into a widened copy, and be lost."""
    x, (weight, plain) = torch.randn(3, 9, requires_grad=True), _weight("torch.bfloat16", 12, 9)
    functional.linear(x, weight).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, plain.sum(dim=0).expand(3, -1))
    layer = nn.Linear(9, 12, bias=False).requires_grad_(False)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layer.weight = nn.Parameter(weight, requires_grad=False)
    for write in (lambda: weight.zero_(), lambda: layer.load_state_dict(state)):
        with pytest.raises(RuntimeError, match="is read-only"):
            write()
