"""Inductor pass: a program writes to caches in place, however often.

torch.export makes a graph without side effects: a write to a cache becomes an operation that returns a new cache, and
the last one is copied to the argument at the end. Inductor undoes this where a program writes to a cache once. Where it
does several times, as K drafted tokens do, it copies the whole cache to the first result and back after the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

_aten = torch.ops.aten
_RESHAPES = (_aten.view.default, _aten.reshape.default)


class InPlacePass(CustomGraphPass):
    """Rewrites sequences of ``index_put`` between an argument and the ``copy_`` to it."""

    def __call__(self, graph: fx.Graph) -> None:
        order = {node: place for place, node in enumerate(graph.nodes)}
        for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
            store, result = copy.args
            writes = _writes(store, result)
            if writes and _are_read_before(writes, [store, *writes[:-1]], copy, order):
                for write in writes:
                    write.target = _aten.index_put_.default
                copy.replace_all_uses_with(store)
                graph.erase_node(copy)

    def uuid(self) -> str:
        """Part of Inductor's cache keys: change it with the pass."""
        return "outrider-in-place-1"


def _writes(store: fx.Node, result: Any) -> list[fx.Node]:
    """The writes that lead from an argument to a result, in order; none if there is anything else between them."""
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


def _are_read_before(writes: list[fx.Node], values: list[fx.Node], copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether all that read a cache do so before the next write.

    Args:
        values: what the writes change.
    """
    return all(
        order[reader] < order[write]
        for value, write in zip(values, writes, strict=True)
        for reader in _readers(value)
        if reader not in (write, copy)
    )


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Operations on a value or on its views."""
    for user in value.users:
        if getattr(user.target, "is_view", False) or user.target is operator.getitem:
            yield from _readers(user)
        else:
            yield user
