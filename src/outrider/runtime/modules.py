"""Modules of models in Transformers' code: watched, changed for one forward, and called with a cache.

*Mixers* are the modules that update recurrent states. They are called

*token by token*, while the other layers take all tokens together: Transformers' scan of Mamba-1 starts from zeros
whenever several tokens are fed, and continues from its state for a single token only; or

*with finite numbers*: most scans compute chunks of tokens with products that mask later tokens by zeros. 0 x NaN is
NaN, so one token would spoil those before it.

Transformers 5.24 renamed ``past_key_values``, and the ``cache_params`` of models without attention, to ``cache``. A
module that takes any keywords would drop another name silently, so its signature decides (``cache_argument``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def recorded_states(model: Any, features: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Record the inputs of decoder layers in a dictionary while the model runs. The hooks exist for this run only, and
    are traced and captured with it."""
    states: dict[int, Tensor] = {}

    def keep(index: int, output: Any) -> None:
        states[index] = output[0] if isinstance(output, tuple) else output

    with ExitStack() as hooks:
        for i in set(features):
            layers = model.get_decoder().layers
            if i == 0:
                hook = layers[0].register_forward_pre_hook(
                    lambda _, args, kwargs: keep(0, args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            else:
                hook = layers[i - 1].register_forward_hook(lambda _, args, output, i=i: keep(i, output))
            hooks.enter_context(hook)
        yield states


@contextmanager
def find_mixers(model: nn.Module, layers: Iterable[Any]) -> Iterator[list[nn.Module]]:
    """Find the mixers: modules that run while a layer's state is updated. They share no name, class or child. The
    layers are those of a cache for this run alone."""
    running: list[nn.Module] = []
    found: list[nn.Module] = []

    def note(update: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        if running[-1] not in found:
            found.append(running[-1])
        return update(*args, **options)

    def leave(*_: Any) -> None:
        running.pop()

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(lambda module, _: running.append(module)))
            hooks.enter_context(module.register_forward_hook(leave))
        for layer in layers:
            layer.update_conv_state = partial(note, layer.update_conv_state)
            layer.update_recurrent_state = partial(note, layer.update_recurrent_state)
        yield found


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
    """Apply ``kept``, which zeroes numbers that are not finite ([B, T, D] -> [B, T, D]), to the inputs and results of
    mixers and of the products in them, for B x T tokens. These come before the scan, and may be out of range even where
    the inputs and results of the layer are not."""

    def of_tokens(value: Any) -> Any:
        is_of_tokens = isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3
        return kept(value) if is_of_tokens and value.shape[:2] == num_tokens else value

    def before(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(of_tokens, args)), {name: of_tokens(value) for name, value in options.items()}

    def after(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        return of_tokens(result)

    with ExitStack() as hooks:
        for mixer in mixers:
            hooks.enter_context(mixer.register_forward_pre_hook(before, with_kwargs=True))
            for part in mixer.modules():
                # Convolutions return [B, C, T].
                if part is not mixer and not any(part.children()) and not isinstance(part, nn.Conv1d):
                    hooks.enter_context(part.register_forward_hook(after))
        yield


@contextmanager
def constant_frequencies(model: nn.Module) -> Iterator[None]:
    """Keep frequencies constant: code that reads positions on the host cannot be captured. Results do
    not change, since the context ends where other frequencies begin (models/loading.py)."""
    kinds = [
        (attributes, attributes["rope_type"]) for attributes in map(vars, model.modules()) if "rope_type" in attributes
    ]
    try:
        for attributes, kind in kinds:
            attributes["rope_type"] = _constant(kind)
        yield
    finally:
        for attributes, kind in kinds:
            attributes["rope_type"] = kind


def _constant(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _constant(one) for name, one in kind.items()}
    return "default" if kind in ("dynamic", "longrope") else kind


CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def cache_argument(module: Any) -> str:
    """Name of the argument of a module's ``forward`` that takes the cache. One that passes all keywords to another
    model is given the name that this release of Transformers uses."""
    from transformers import GenerationMixin

    own, usual = (
        [name for name in CACHE_NAMES if name in inspect.signature(function).parameters]
        for function in (module.forward, GenerationMixin.prepare_inputs_for_generation)
    )
    return (own or usual)[0]


def cache_of(output: Any) -> Any:
    """The cache in a model's output, or None."""
    fields = vars(output)  # old names are properties, too, and warn
    return next((fields[name] for name in CACHE_NAMES if fields.get(name) is not None), None)
