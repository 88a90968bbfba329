"""Layers that go on from a state by one token alone: they are called once for each token, while the layers around them
take all tokens together.

The scan of Mamba-1, as Transformers has it, starts from zeros whenever several tokens are fed. From one token to the
next it goes on from its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def token_by_token(model: nn.Module) -> Iterator[None]:
    """Call the layers with states so, within."""
    mixers = [module for module in model.modules() if "conv1d" in dict(module.named_children())]
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
