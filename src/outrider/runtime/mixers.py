"""Mixers: the modules of a model that change its states. They are not always called as the modelling code has it.

*Token by token*, while the layers around them take all tokens together: the scan of Mamba-1, as Transformers has it,
starts from zeros whenever several tokens are fed. From one token to the next it goes on from its state.

*With finite numbers*: most scans work through chunks of tokens by products in which later tokens are masked by zeros.
0 x NaN is NaN, so one token would spoil those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def noted(model: nn.Module, layers: Iterable[Any]) -> Iterator[list[nn.Module]]:
    """Note the mixers, which have no name, class or child in common: which module is running while a state is updated?

    Args:
        layers: of a cache for this run alone, those with states.
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
    """Call them so, within."""
    own = [vars(module).get("forward") for module in mixers]  # most have that of their class
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
    """Within, mixers and the products in them are computed with ``kept`` of their inputs and results: these come before
    the scan, and their numbers may be beyond the range of their type even where those of the layer are not.

    Args:
        num_tokens: fed, B x T.
        kept: of numbers of tokens, [B, T, D] -> [B, T, D].
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
            # A convolution gives [B, C, T].
            if part is not mixer and not any(part.children()) and not isinstance(part, nn.Conv1d):
                hooks.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
