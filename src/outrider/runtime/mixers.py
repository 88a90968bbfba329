"""Mixers: the modules of a model that update its recurrent states, and ways to call them.

*Token by token*, while the other layers take all tokens together: Transformers' scan of Mamba-1 starts from zeros
whenever several tokens are fed, and continues from its state for a single token only.

*With finite numbers*: most scans compute chunks of tokens with products that mask later tokens by zeros. 0 x NaN is
NaN, so one token would spoil those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def find_mixers(model: nn.Module, layers: Iterable[Any]) -> Iterator[list[nn.Module]]:
    """Find the mixers, which share no name, class or child: the modules that run while a state is updated.

    Args:
        layers: the layers with states, of a cache for this run alone.
    """
    running: list[nn.Module] = []
    found: list[nn.Module] = []
    hooks = []

    def note(update: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        if running[-1] not in found:
            found.append(running[-1])
        return update(*args, **options)

    def leave(*_: Any) -> None:
        running.pop()

    for module in model.modules():
        hooks += [
            module.register_forward_pre_hook(lambda module, _: running.append(module)),
            module.register_forward_hook(leave),
        ]
    try:
        for layer in layers:
            layer.update_conv_state = partial(note, layer.update_conv_state)
            layer.update_recurrent_state = partial(note, layer.update_recurrent_state)
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def token_by_token(mixers: Sequence[nn.Module]) -> Iterator[None]:
    """Call the mixers token by token within the context."""
    own = [vars(module).get("forward") for module in mixers]  # most use that of their class
    try:
        for module in mixers:
            module.forward = partial(_step, module.forward)
        yield
    finally:
        for module, forward in zip(mixers, own, strict=True):
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward


def _step(forward: Callable[..., Tensor], hidden_states: Tensor, **options: Any) -> Tensor:
    """[B, T, D] -> [B, T, D]"""
    return torch.cat([forward(hidden_states=token, **options) for token in hidden_states.split(1, dim=1)], dim=1)


@contextmanager
def with_finite_numbers(
    mixers: Sequence[nn.Module], num_tokens: tuple[int, int], kept: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Apply ``kept`` to the inputs and results of mixers and of the products in them. These come before the scan, and
    may be out of range even where the inputs and results of the layer are not.

    Args:
        num_tokens: fed, B x T.
        kept: zeroes numbers that are not finite, [B, T, D] -> [B, T, D].
    """

    def of_tokens(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
        return kept(value) if is_of_tokens and value.shape[:2] == num_tokens else value

    def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(of_tokens, args)), {name: of_tokens(value) for name, value in options.items()}

    def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return of_tokens(result)

    hooks = []
    for mixer in mixers:
        hooks.append(mixer.register_forward_pre_hook(before, with_kwargs=True))
        for part in mixer.modules():
            # Convolutions return [B, C, T].
            if part is not mixer and not any(part.children()) and not isinstance(part, nn.Conv1d):
                hooks.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
