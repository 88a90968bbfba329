"""Inductor pass: a program writes to caches in place, however often.

torch.export makes a graph without side effects: a write to a cache becomes an operation that returns its new state, and
the last state is copied to the argument at the end. Some versions of Inductor undo this for a single write, none for
several, as K drafted tokens need them: the whole cache is copied to the first state, and back from the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.inductor_prims import force_stride_order

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default)
# May return their argument, though their schemas do not say so.
_SILENT_VIEWS = (_aten._unsafe_view.default, force_stride_order, operator.getitem)


class InPlacePass(CustomGraphPass):
    """Rewrites sequences of ``index_put`` between an argument and the ``copy_`` to it. Indices must not be computed
    from the argument, and values must not be views of it (Inductor's own rewriting is wrong then, too)."""

    def __call__(self, graph: fx.Graph) -> None:
        order = {node: place for place, node in enumerate(graph.nodes)}
        for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
            store, result = copy.args[:2]
            writes = _writes(store, result)
            if writes and _are_read_before(store, writes, copy, order):
                for write in writes:
                    write.target = _aten.index_put_.default
                copy.replace_all_uses_with(store)
                graph.erase_node(copy)

    def uuid(self) -> Any:
        """Part of Inductor's cache keys."""
        return get_hash_for_files((__file__,))


def _writes(store: fx.Node, result: Any) -> list[fx.Node]:
    """Writes that lead from an argument to a result, in order. Empty if other operations are between them."""
    if store.op != "placeholder" or not store.meta["val"].is_contiguous():  # else a reshape may be a copy
        return []
    writes: list[fx.Node] = []
    node = result
    while node is not store:
        if node.target is _aten.index_put.default:
            writes.append(node)
        elif node.target not in _RESHAPES:
            return []
        node = node.args[0]
    return writes[::-1]


def _are_read_before(store: fx.Node, writes: list[fx.Node], copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether each state is read only before the write that replaces it."""
    return all(
        order[reader] < order[write]
        for state, write in pairwise([store, *writes])
        for reader in _readers(state)
        if reader not in (write, copy)
    )


def _readers(state: fx.Node) -> Iterator[fx.Node]:
    """Operations on a state or on its views."""
    for user in state.users:
        if getattr(user.target, "is_view", False) or user.target in _SILENT_VIEWS:
            yield from _readers(user)
        else:
            yield user
