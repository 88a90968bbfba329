"""Programs write to caches in place, and only where nobody reads what was there before."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from outrider.compile.in_place import InPlacePass

_PUT, _PUT_IN_PLACE = torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default
Step = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def _put(store: Tensor, place: Tensor, values: Tensor) -> Tensor:
    """Write to [B, L, D] as cache layers do; return a view."""
    store.flatten(0, 1).index_copy_(0, place, values)
    return store[:, :6].transpose(1, 2)


def _twice(store: Tensor, places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    first = _put(store, places[:1], values[:1]).square().sum(-1)
    second = _put(store, places[1:], values[1:] + first.mean()).square().sum(-1)
    return first, second


def _with_old_values(store: Tensor, places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Reads the first result after the second write."""
    first = store.flatten(0, 1).index_copy(0, places[:1], values[:1])
    second = first.index_copy(0, places[1:], values[1:])
    ends = second.square().sum(-1)
    begins = (first * ends.sum()).unbind(0)[0] + first.split(2)[0].sum()
    store.copy_(second.view_as(store))
    return begins, ends


def _with_the_argument(store: Tensor, places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Reads what was there before the first write."""
    first = store.flatten(0, 1).index_copy(0, places[:1], values[:1])
    second = first.index_copy(0, places[1:], values[1:] + first.mean())
    begins = store[0, ::2] * second.sum()
    store.copy_(second.view_as(store))
    return (begins,)


def _with_something_between(store: Tensor, places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
    """Not a sequence of writes alone."""
    first = store.flatten(0, 1).index_copy(0, places[:1], values[:1]) * 2
    second = first.index_copy(0, places[1:], values[1:])
    store.copy_(second.view_as(store))
    return (second.sum(-1),)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # PyTorch about itself
@pytest.mark.parametrize(
    ("step", "num_columns", "num_in_place"),
    [
        (_twice, 3, 2),
        (_twice, 5, 0),
        (_with_old_values, 3, 0),
        (_with_the_argument, 3, 0),
        (_with_something_between, 3, 0),
    ],
)
def test_writes(step: Step, num_columns: int, num_in_place: int) -> None:
    """The number of writes that the pass itself rewrites. Results are those of eager execution.

    Args:
        num_columns: in memory; three are given.
    """
    found: list[int] = []

    class Recording(InPlacePass):
        def __call__(self, graph: fx.Graph) -> None:
            assert sum(node.target is _PUT for node in graph.nodes) == 2
            super().__call__(graph)
            found.append(sum(node.target is _PUT_IN_PLACE for node in graph.nodes))

        def uuid(self) -> str:
            return f"recording {step.__name__}"

    store, places, values = torch.randn(1, 8, num_columns), torch.tensor([4, 1]), torch.randn(2, 3)
    stores = store.clone()[..., :3], store.clone()[..., :3]
    torch._dynamo.reset()
    compiled = torch.compile(
        step, fullgraph=True, options={"post_grad_custom_post_pass": Recording(), "fx_graph_cache": False}
    )
    with torch.no_grad():
        want, got = step(stores[0], places, values), compiled(stores[1], places, values)
    assert found == [num_in_place]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(stores[1], stores[0])
    assert not torch.equal(stores[0], store[..., :3])
