"""Bounds of the numbers of a plan, which the C++ code trusts: with a count of 0 or -1 it writes beyond a buffer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from itertools import cycle
from typing import Any

from outrider.native import plan as plans
from outrider.native.plan import NotPlanned, Plan, parts

_LEAST = {"Count": 1, "Number": 0}  # by the name of a type; other numbers have none
_MAX = 2**31  # the product of two is within int64
_MAX_KERNEL_SIZE = 8  # of a convolution (recurrence.h)


def check_plan(plan: Plan) -> None:
    """Raises NotPlanned: a number is beyond its bounds, by itself or beside others."""
    for part in parts(plan):
        for one in fields(part):
            kind, value = str(one.type), getattr(part, one.name)
            words = re.findall("Count|Number|float", kind) or [kind]
            numbers = () if value is None and "None" in kind else _flat(value)
            for number, least in zip(numbers, cycle(map(_LEAST.get, words)), strict=False):
                is_real = isinstance(number, int | float if least is None else int) and math.isfinite(number)
                if not is_real or least is not None and not least <= number <= _MAX:
                    raise NotPlanned(f"its plan has {one.name} = {number!r:.40}")
        for wrong, is_there in _contradictions(part):
            if is_there:
                raise NotPlanned(f"its plan has {wrong}")


def _contradictions(part: Any) -> Iterator[tuple[str, bool]]:
    """Numbers of a part that are impossible beside each other, and whether they are there. Each is within its own
    bounds."""
    match part:
        case plans.MatrixPlan():
            yield f"part {part.part} of {part.num_parts}", part.part >= part.num_parts
        case plans.AttentionPlan():
            yield f"{part.num_heads} heads on {part.num_kv_heads} KV heads", part.num_heads % part.num_kv_heads > 0
        case plans.RecurrencePlan():
            sizes = part.num_heads, part.num_groups, part.key_width, part.value_width
            yield f"heads of the sizes {sizes}", any(sizes) if part.kind == "convolution" else not all(sizes)
            yield f"{part.num_heads} heads in {part.num_groups} groups", any(sizes) and sizes[0] % sizes[1] > 0
            yield f"a convolution of {part.kernel_size} tokens", part.kernel_size > _MAX_KERNEL_SIZE
        case plans.MlpPlan():
            yield f"{len(part.ups)} matrices before an activation", len(part.ups) not in (1, 2)
        case plans.ExpertsPlan():
            number, num_groups, num_active = part.num_experts, part.num_groups, part.num_active
            yield f"{number} experts in {num_groups} groups", number % num_groups > 0
            # The two largest scores of a group count.
            yield f"{number} experts in {num_groups} groups, of less than two each", number < 2 * num_groups > 2
            yield f"{part.num_active_groups} of {num_groups} groups of experts", part.num_active_groups > num_groups
            most = number // num_groups * part.num_active_groups
            yield f"{num_active} experts of a token, of {most}", num_active > most
            yield f"{len(part.ups)} matrices before an activation", len(part.ups) not in (1, 2)
            yield "a limit of experts that have no gate", part.limit is not None and len(part.ups) < 2
            # The norm would be of the latent width.
            yield "experts of another width, which have a norm", None not in (part.latent, part.post_norm)
        case plans.LayerPlan():
            mlp = part.per_layer_mlp
            yield "a per-layer gate of two matrices", mlp is not None and len(mlp.ups) != 1
        case Plan():
            yield from _of_layers(part)


def _of_layers(plan: Plan) -> Iterator[tuple[str, bool]]:
    yield "no layers", not plan.layers
    yield "embeddings of no positions", plan.position_embedding is not None and plan.num_positions == 0
    owners = set[int]()  # layers with keys and values of their own
    for i, layer in enumerate(plan.layers):
        yield f"a per-layer gate in layer {i} alone", layer.per_layer_mlp is not None and plan.per_layer is None
        if isinstance(layer.mixer, plans.AttentionPlan):
            rope, source = layer.mixer.rope, layer.mixer.source
            yield f"no rope {rope} for layer {i}", rope is not None and rope >= len(plan.ropes)
            yield f"no keys of layer {source} for layer {i}", source is not None and source not in owners
            if source is None:
                owners.add(i)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for one in value:
            yield from _flat(one)
    elif not (isinstance(value, str | bool) or is_dataclass(value)):
        yield value
