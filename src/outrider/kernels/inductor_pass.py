"""Inductor pass: products of few rows with a large matrix, in programs for the CPU.

A forward of T tokens multiplies T rows with each weight matrix. For small T this is bound by reading the matrix once,
but general matrix libraries are made for large T: on the CPU their call overhead and packing cost several times the
reading. Products with weights of a type that our kernel supports (library.py) become calls of it, those of the same
rows one call. The others are rewritten as T sums over the same rows of the matrix: the compiler fuses them to one loop
that reads each number once, keeps T sums in registers, and takes neighbouring operations into the same parallel region.
Measured in docs/internals/log/2026.md.

The pass rewrites the graph that torch's Inductor is about to lower; it knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from outrider.kernels.attention import ATTENTION
from outrider.kernels.library import FORMS, WEIGHT_DTYPES

MAX_KERNEL_ROWS = 48  # with more rows a matrix library is about as fast
MAX_FEW_ROWS = 8  # rewritten as sums

# Weights are read as several concurrent streams, for which memory bandwidth is higher than for one.
_MOST_PARTS = 4
_LARGE_BYTES = 2 * 2**20  # smaller weights tend to be in the processor's cache, where streams do not matter
_MANY_ROWS = 5  # with this many, loading the rows is the limit; two parts load each once for two sums

MAX_SUMS = MAX_FEW_ROWS * _MOST_PARTS  # of one product, to be fused to one loop

_aten, _prims = torch.ops.aten, torch.ops.prims
_VIEWS = (_aten.view.default, _aten.reshape.default)
KERNEL, WIDEN = torch.ops.outrider.few_row_matmul.default, torch.ops.outrider.widen_rows.default


class FewRowMatmulPass(CustomGraphPass):
    """Rewrites ``mm``, ``addmm`` and ``bmm`` of few rows on the CPU.

    Args:
        num_threads: of the kernel; None if there is no kernel.
    """

    def __init__(self, num_threads: int | None) -> None:
        self._num_threads = num_threads

    def __call__(self, graph: fx.Graph) -> None:
        if self._num_threads is not None:
            _call_the_kernel(graph, self._num_threads)
        _write_out_what_layers_share(graph)
        for node in list(graph.nodes):
            if node.op != "call_function" or node.kwargs:
                continue
            if node.target in (_aten.mm.default, _aten.bmm.default):
                _write_as_sums(graph, node, *node.args)
            elif node.target is _aten.addmm.default:
                bias, rows, matrix = node.args
                _write_as_sums(graph, node, rows, matrix, bias)
        graph.eliminate_dead_code()

    def uuid(self) -> Any:
        """Part of Inductor's cache keys."""
        return get_hash_for_files((__file__,), str(self._num_threads))


@dataclass(frozen=True, slots=True)
class _Product:
    """Rows times the transpose of a weight matrix, plus a bias."""

    node: fx.Node
    rows: fx.Node  # [T, I]
    weight: fx.Node  # [O, I], or in blocks
    form: int  # of the weight (library.py)
    bias: fx.Node | None  # [O]


def _product_of(node: fx.Node) -> _Product | None:
    """The product of a node, if the kernel can compute it."""
    if node.target is KERNEL:  # of a NarrowWeight (narrow_weight.py)
        x, weights, form, _ = cast(Any, node.args)
        return _Product(node, x, weights[0], form, None)
    if node.op != "call_function" or node.kwargs or node.target not in (_aten.mm.default, _aten.addmm.default):
        return None
    arguments: Any = node.args
    *bias, rows, matrix = arguments
    weight = _weight_of(matrix)
    if weight is None or rows.meta["val"].dtype not in (torch.float32, torch.bfloat16):
        return None
    if bias and bias[0].meta["val"].shape != weight.meta["val"].shape[:1]:
        return None
    if rows.meta["val"].device.type != "cpu" or rows.meta["val"].shape[0] > MAX_KERNEL_ROWS:
        return None
    return _Product(node, rows, weight, FORMS[weight.meta["val"].dtype], bias[0] if bias else None)


def _weight_of(matrix: fx.Node) -> fx.Node | None:
    """Weights [O, I] whose transpose [I, O] is this matrix, possibly widened, if the kernel can read them."""
    weight: Any = matrix
    num_transposed = 0
    while weight.target is _aten.permute.default or _is_widened(weight):
        num_transposed += weight.target is _aten.permute.default and list(weight.args[1]) == [1, 0]
        weight = weight.args[0]
    value = weight.meta["val"]
    if num_transposed != 1 or weight.op not in ("placeholder", "get_attr") or value.dim() != 2:
        return None
    return weight if value.dtype in WEIGHT_DTYPES and value.is_contiguous() else None


def _is_widened(node: Any) -> bool:
    is_converted = node.target is _prims.convert_element_type.default
    return is_converted and node.args[0].meta["val"].itemsize < node.meta["val"].itemsize


def _call_the_kernel(graph: fx.Graph, num_threads: int) -> None:
    products = [product for product in map(_product_of, graph.nodes) if product is not None]
    alike: dict[Any, list[_Product]] = {}
    for product in products:
        rows: Any = product.rows
        source = rows.args[0] if rows.target in _VIEWS else rows  # each product may have its own view
        alike.setdefault((source, rows.meta["val"].shape, product.form), []).append(product)
    replaced: dict[fx.Node, fx.Node] = {}
    for (*_, form), products in alike.items():
        rows = replaced.get(products[0].rows, products[0].rows)  # they may be products themselves
        dtype = rows.meta["val"].dtype
        with graph.inserting_before(products[0].node):
            x = _contiguous(graph, _converted(graph, rows, torch.float32))
            weights = [product.weight for product in products]
            result = _converted(graph, _call(graph, KERNEL, x, weights, form, num_threads), dtype)
        ends = list(accumulate(weight.meta["val"].shape[0] for weight in weights))
        for product, (start, end) in zip(products, pairwise([0, *ends]), strict=True):
            with graph.inserting_before(product.node):  # after its bias
                part = _call(graph, _aten.slice.Tensor, result, -1, start, end)
                if product.bias is not None:
                    part = _call(graph, _aten.add.Tensor, part, product.bias)
            product.node.replace_all_uses_with(part)
            graph.erase_node(product.node)
            replaced[product.node] = part


def _call(graph: fx.Graph, operator: Any, *args: Any) -> fx.Node:
    result = graph.call_function(operator, args)
    result.meta["val"] = operator(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    return result


def _converted(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    return node if node.meta["val"].dtype == dtype else _call(graph, _prims.convert_element_type.default, node, dtype)


def _contiguous(graph: fx.Graph, numbers: fx.Node) -> fx.Node:
    """Numbers, materialized."""
    shape = list(numbers.meta["val"].shape)
    strides = [prod(shape[i + 1 :]) for i in range(len(shape))]
    return _call(graph, _prims.inductor_force_stride_order.default, numbers, strides)


def _write_out_what_layers_share(graph: fx.Graph) -> None:
    """Materialize masks and rotary angles, which each layer would compute again."""
    angles = _aten.cos.default, _aten.sin.default
    shared: dict[Any, None] = {node: None for node in graph.nodes if node.target in angles}
    shared |= {node.args[3]: None for node in graph.nodes if node.target is ATTENTION}
    for node in shared:
        with graph.inserting_after(node):
            written = _contiguous(graph, node)
        node.replace_all_uses_with(written, delete_user_cb=lambda user, written=written: user is not written)


def _write_as_sums(graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node, bias: fx.Node | None = None) -> None:
    x = rows.meta["val"]  # [T, I] times [I, O], or [B, T, I] times [B, I, O]
    num_rows = x.shape[-2]
    is_weight = x.dim() == 2
    if bias is not None and bias.meta["val"].shape != matrix.meta["val"].shape[-1:]:
        return
    if x.device.type != "cpu" or num_rows > MAX_FEW_ROWS or not x.is_floating_point():
        return
    if is_weight and matrix.meta["val"].stride(0) != 1:
        return  # not the transpose of contiguous rows

    with graph.inserting_before(node):
        # Materialize the rows first, else what produced them (a norm, a softmax) is recomputed in every sum.
        rows = _contiguous(graph, rows)
        num_columns = matrix.meta["val"].shape[-1]
        parts = _parts(num_columns, _num_parts(matrix.meta["val"], num_rows) if is_weight else 1)
        sums = []
        for t in range(num_rows):
            row = _call(graph, _aten.unsqueeze.default, _call(graph, _aten.select.int, rows, -2, t), -1)  # [..., I, 1]
            for start, end in parts:
                part = _call(graph, _aten.slice.Tensor, matrix, -1, start, end)
                # [..., 1, O / parts]
                total = _call(graph, _aten.sum.dim_IntList, _call(graph, _aten.mul.Tensor, part, row), [-2], True)
                if bias is not None:
                    total = _call(graph, _aten.add.Tensor, total, _call(graph, _aten.slice.Tensor, bias, 0, start, end))
                sums.append(total)
        # One-dimensional, so that each sum is written in place: a two-dimensional result would be copied again.
        result = _call(graph, _aten.cat.default, sums, -1) if len(sums) > 1 else sums[0]
        result = _call(graph, _aten.view.default, result, [*x.shape[:-1], num_columns])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _num_parts(weights: Any, num_rows: int) -> int:
    """Number of parts in which weights are read."""
    if weights.nbytes >= _LARGE_BYTES:
        return _MOST_PARTS
    return 2 if num_rows >= _MANY_ROWS else 1


def _parts(num_columns: int, num_parts: int) -> list[tuple[int, int]]:
    """Equal parts, fused to one loop, and the remainder."""
    size = num_columns // num_parts
    bounds = [i * size for i in range(num_parts + 1)]
    return [(start, end) for start, end in pairwise([*bounds, num_columns]) if start < end]
