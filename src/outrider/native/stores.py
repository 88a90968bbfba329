"""Layers of a native plan in a cache: their shapes, and the numbers of their stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.native.plan import AttentionPlan, LayerPlan, Plan, RecurrencePlan, check_size
from outrider.runtime.cache_shapes import WINDOW, LayerShape, StateShape


def cache_shapes(plan: Plan) -> tuple[LayerShape, ...]:
    """Shapes of the layers of a plan's cache."""
    return tuple(map(_shape, plan.layers))


def _shape(layer: LayerPlan) -> LayerShape:
    """Shape of the cache of a layer."""
    mixer, states = layer.mixer, () if layer.recurrence is None else _states(layer.recurrence)
    num_groups, width = 0, 0
    if isinstance(mixer, AttentionPlan) and mixer.source is None:
        num_groups, width = mixer.num_groups, mixer.head_width
    return LayerShape(num_groups, width, width, torch.float32, torch.device("cpu"), states)


def set_stores(layers: Any, plans: Sequence[LayerPlan]) -> None:
    """Set the numbers of the stores of each layer: keys and values of all layers in turn, then states."""
    shapes = [*map(_shape, plans)]
    num_kept, num_states = 0, 2 * sum(shape.num_heads > 0 for shape in shapes)
    for layer, plan, shape in zip(layers, plans, shapes, strict=True):
        if plan.recurrence is not None:
            layer.recurrence.ring, layer.recurrence.states = num_states, num_states + 1
            num_states += len(shape.states)
        if not isinstance(plan.mixer, AttentionPlan):
            continue
        if plan.mixer.source is None:
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
