"""Hidden states recorded during a forward, for drafters that read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def recorded_states(model: Any, features: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the inputs of decoder layers in a dictionary while the model runs. The hooks exist for this run only, and
    are traced and captured with it."""
    states: dict[int, Tensor] = {}
    hooks = []

    def keep(index: int, output: Any) -> None:
        states[index] = output[0] if isinstance(output, tuple) else output

    if features:
        decoder = model.get_decoder()
        for i in set(features):
            if i == 0:
                hook = decoder.layers[0].register_forward_pre_hook(
                    lambda _, args, kwargs: keep(0, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            else:
                hook = decoder.layers[i - 1].register_forward_hook(lambda _, args, output, i=i: keep(i, output))
            hooks.append(hook)
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
