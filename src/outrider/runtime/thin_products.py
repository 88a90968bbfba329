"""Products of a few rows with a large matrix, as sums that the compiler can fuse.

A forward of T tokens multiplies T rows with each weight matrix. For small T that is bound by reading the matrix once,
but general matrix libraries are made for large T: on the CPU their call overhead and packing cost several times the
reading. Written as T sums over the same rows of the weights, the compiler makes one loop of them that reads each weight
once, keeps T sums in registers, and fuses what comes before and after into the same parallel region. Measured in
docs/log.md.

This is a pass over the graph that torch's Inductor is about to lower; it knows nothing of models.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

MAX_THIN_ROWS = 8  # beyond it a matrix library is as fast

# Weights are read as several parts at the same time: memory gives more to several streams than to one.
_MOST_PARTS = 4
_LARGE_BYTES = 2 * 2**20  # smaller weights tend to be in the processor's cache, which has no such preference
_MANY_ROWS = 5  # so many rows are bound by loading them, and two parts load each of them once for two sums

MAX_SUMS = MAX_THIN_ROWS * _MOST_PARTS  # of one product, which are to be one loop

_aten = torch.ops.aten


class ThinProducts(CustomGraphPass):
    """Rewrites ``mm``, ``addmm`` and ``bmm`` of at most MAX_THIN_ROWS rows on the CPU."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or node.kwargs:
                continue
            if node.target in (_aten.mm.default, _aten.bmm.default):
                _rewrite(graph, node, *node.args)
            elif node.target is _aten.addmm.default:
                bias, rows, matrix = node.args
                _rewrite(graph, node, rows, matrix, bias)
        graph.eliminate_dead_code()

    def uuid(self) -> str:
        """Part of the keys under which compiled code is kept: to be changed with the pass."""
        return "outrider-thin-products-9"


def _rewrite(graph: fx.Graph, node: fx.Node, rows: fx.Node, matrix: fx.Node, bias: fx.Node | None = None) -> None:
    x = rows.meta["val"]  # [T, I] times [I, O], or [B, T, I] times [B, I, O]
    num_rows, width = x.shape[-2:]
    is_weight = x.dim() == 2
    if bias is not None and bias.meta["val"].shape != matrix.meta["val"].shape[-1:]:
        return
    if x.device.type != "cpu" or num_rows > MAX_THIN_ROWS or not x.is_floating_point():
        return
    if is_weight and matrix.meta["val"].stride(0) != 1:
        return  # not the transpose of rows that can be read one after the other

    def call(operator: Any, *args: Any) -> fx.Node:
        result = graph.call_function(operator, args)
        result.meta["val"] = operator(*fx.map_arg(args, lambda arg: arg.meta["val"]))
        return result

    with graph.inserting_before(node):
        # Write the rows out first, else whatever made them (a norm, a softmax) is computed anew in every sum.
        strides = [width, 1] if is_weight else [num_rows * width, width, 1]
        rows = call(torch.ops.prims.inductor_force_stride_order.default, rows, strides)
        num_columns = matrix.meta["val"].shape[-1]
        parts = _parts(num_columns, _num_parts(matrix.meta["val"], num_rows) if is_weight else 1)
        sums = []
        for t in range(num_rows):
            row = call(_aten.unsqueeze.default, call(_aten.select.int, rows, -2, t), -1)  # [..., I, 1]
            for start, end in parts:
                part = call(_aten.slice.Tensor, matrix, -1, start, end)
                # [..., 1, O / parts]
                total = call(_aten.sum.dim_IntList, call(_aten.mul.Tensor, part, row), [-2], True)
                if bias is not None:
                    total = call(_aten.add.Tensor, total, call(_aten.slice.Tensor, bias, 0, start, end))
                sums.append(total)
        # In one dimension, so that each sum is written to its place: one of two dimensions would be copied again.
        result = call(_aten.cat.default, sums, -1) if len(sums) > 1 else sums[0]
        result = call(_aten.view.default, result, [*x.shape[:-1], num_columns])
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _num_parts(weights: Any, num_rows: int) -> int:
    """In how many parts weights are read."""
    if weights.nbytes >= _LARGE_BYTES:
        return _MOST_PARTS
    return 2 if num_rows >= _MANY_ROWS else 1


def _parts(num_columns: int, num_parts: int) -> list[tuple[int, int]]:
    """Equal parts, which end up in one loop, and what is left over."""
    size = num_columns // num_parts
    bounds = [i * size for i in range(num_parts + 1)]
    return [(start, end) for start, end in pairwise([*bounds, num_columns]) if start < end]
