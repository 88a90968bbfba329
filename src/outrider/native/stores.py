"""Layers of a native plan in a cache: their shapes, and the numbers of their stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.native.plan import AttentionPlan, LayerPlan, Mixer, Plan, RecurrencePlan, check_size
from outrider.runtime.cache_shapes import WINDOW, LayerShape, StateShape


def cache_shapes(plan: Plan) -> tuple[LayerShape, ...]:
    """Shapes of the layers of a plan's cache."""
    return tuple(_shape(layer.mixer) for layer in plan.layers)


def _shape(mixer: Mixer | None) -> LayerShape:
    """Shape of the cache of a layer."""
    if not isinstance(mixer, AttentionPlan):
        states = () if mixer is None else _states(mixer)
        return LayerShape(0, 0, 0, torch.float32, torch.device("cpu"), states)
    num_groups, width = (mixer.num_groups, mixer.head_width) if mixer.source is None else (0, 0)
    return LayerShape(num_groups, width, width, torch.float32, torch.device("cpu"))


def set_stores(layers: Any, plans: Sequence[LayerPlan]) -> None:
    """Set the numbers of the stores of each layer: keys and values of all layers in turn, then states."""
    shapes = [_shape(plan.mixer) for plan in plans]
    num_kept, num_states = 0, 2 * sum(shape.num_heads > 0 for shape in shapes)
    for layer, plan, shape in zip(layers, plans, shapes, strict=True):
        if isinstance(plan.mixer, RecurrencePlan):
            layer.recurrence.ring, layer.recurrence.states = num_states, num_states + 1
            num_states += len(shape.states)
        elif plan.mixer is None:
            continue
        elif plan.mixer.source is None:
            layer.attention.store, num_kept = num_kept, num_kept + 2
        else:
            source, attention = layers[plan.mixer.source].attention, layer.attention
            check_size(
                "shared keys", attention.num_groups * attention.head_width, source.num_groups * source.head_width
            )
            attention.store = source.store


def _states(mixer: RecurrencePlan) -> tuple[StateShape, ...]:
    ring = StateShape("window", 0, (WINDOW, mixer.kept_width), torch.float32, mixer.num_taps - 1)
    size = mixer.num_heads, mixer.key_width, mixer.value_width
    return (ring, StateShape("replayed", 0, size, torch.float32)) if mixer.num_heads else (ring,)
