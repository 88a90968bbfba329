"""The structure of a model for the C++ library: a native plan with the addresses of its weights; and the shapes of its
cache."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_double, c_int64
from dataclasses import fields
from typing import Any

import torch

from outrider.kernels.structures import native
from outrider.native.bounds import check_plan
from outrider.native.plan import (
    AttentionPlan,
    DraftInputPlan,
    ExpertsPlan,
    LayerPlan,
    MatrixPlan,
    Mixer,
    MlpPlan,
    NotPlanned,
    Plan,
    RecurrencePlan,
    check_size,
)
from outrider.native.weights import Weights
from outrider.runtime.cache_shapes import WINDOW, LayerShape, StateShape

_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")  # functions.h
_NUMBERS = (c_double, c_int64)
_RECURRENCES = ("", "convolution", "delta", "mamba2")  # model.h


def model_structure(plan: Plan, weights: Weights) -> Any:
    """Structure of a model. Raises NotPlanned: a weight is missing, or has another size or type; or a number of a plan
    is beyond its bounds."""
    check_plan(plan)
    embedding, lm_head = weights.matrix(MatrixPlan(plan.embedding)), weights.matrix(plan.lm_head)
    hidden = embedding.width
    check_size("LM head", lm_head.width, hidden)
    layers, ropes = (native().Layer * len(plan.layers))(), (native().Rope * len(plan.ropes))()
    for rope, stated in zip(ropes, plan.ropes, strict=True):
        frequencies = weights.keep(torch.tensor(stated.frequencies))
        rope.width, rope.is_interleaved = 2 * len(stated.frequencies), stated.is_interleaved
        rope.scale, rope.frequencies = stated.scale, frequencies.data_ptr()
    per_layer = _per_layer(plan, hidden, weights)
    reads_both = plan.draft_input is not None and plan.draft_input.projection is None  # the norms, in the first layer
    for i, (layer, stated_layer) in enumerate(zip(layers, plan.layers, strict=True)):
        _fill(layer, stated_layer, hidden, 2 * hidden if reads_both and i == 0 else hidden, weights)
        if stated_layer.per_layer_mlp is not None:
            check_size(stated_layer.per_layer_mlp.down.weight, layer.per_layer_mlp.down.width, per_layer.width)
        if layer.attention.num_heads and layer.attention.rope >= 0:
            width = layer.attention.head_dim
            check_size("rope", max(ropes[layer.attention.rope].width, width), width)
    _set_stores(layers, plan.layers)
    if len(weights.num_digits) > 1:
        raise NotPlanned("its matrices have several arithmetics")
    model = _filled(
        native().Model,
        plan,
        num_layers=len(layers),
        hidden=hidden,
        num_ropes=len(ropes),
        num_digits=max(weights.num_digits, default=0),
        embedding=embedding,
        lm_head=lm_head,
        final_norm=weights.norm(plan.final_norm, hidden),
        draft_input=_draft_input(plan.draft_input, hidden, weights),
        per_layer=per_layer,
        ropes=ropes,
        layers=layers,
    )
    if plan.position_embedding is not None:
        positions = weights.vector(plan.position_embedding, plan.num_positions, hidden)
        model.position_embedding = positions.data_ptr()
    return model


def _filled(structure: Any, plan: Any, **others: Any) -> Any:
    """Structure with the numbers in a plan's fields of the same names, 0 for None, and with other fields."""
    stated = {one.name for one in fields(plan)}
    numbers = {
        name: getattr(plan, name) or 0 for name, kind in structure._fields_ if kind in _NUMBERS and name in stated
    }
    return structure(**(numbers | others))


def _gating(plan: MlpPlan | ExpertsPlan) -> Any:
    return _filled(native().Gating, plan, activation=_ACTIVATIONS.index(plan.activation))


def _draft_input(plan: DraftInputPlan | None, hidden: int, weights: Weights) -> Any:
    if plan is None:
        return native().DraftInput()
    norms = (weights.norm(norm, hidden) for norm in (plan.embedding_norm, plan.state_norm))
    matrix = native().Matrix() if plan.projection is None else _matrix(plan.projection, 2 * hidden, hidden, weights)
    return native().DraftInput(True, *norms, matrix, plan.adds_normed)


def _matrix(plan: MatrixPlan, width: int, num_channels: int | None, weights: Weights) -> Any:
    """Matrix of this size; None for any number of rows."""
    found = weights.matrix(plan)
    check_size(plan.weight, found.width, width)
    check_size(plan.weight, found.num_channels, found.num_channels if num_channels is None else num_channels)
    return found


def _per_layer(plan: Plan, hidden: int, weights: Weights) -> Any:
    stated = plan.per_layer
    if stated is None:
        return native().PerLayerEmbeddings()
    embedding = weights.matrix(MatrixPlan(stated.embedding))
    projection = _matrix(stated.projection, hidden, embedding.width, weights)
    width = embedding.width // len(plan.layers)
    check_size(stated.embedding, embedding.width, width * len(plan.layers))
    matrices = {"embedding": embedding, "projection": projection}
    return _filled(native().PerLayerEmbeddings, stated, width=width, norm=weights.norm(stated.norm, width), **matrices)


def _fill(layer: Any, plan: LayerPlan, hidden: int, width: int, weights: Weights) -> None:
    # ``width`` is that of the mixer's input.
    for name, kind in layer._fields_:
        if kind is native().Norm:
            setattr(layer, name, weights.norm(getattr(plan, name), hidden))
    if plan.recurrence is not None:
        layer.recurrence = _recurrence(plan.recurrence, hidden, weights)
    if isinstance(plan.mixer, AttentionPlan):
        layer.attention = _attention(plan.mixer, hidden, width, weights)
    if plan.mlp is not None:
        layer.mlp = _mlp(plan.mlp, hidden, weights)
    if plan.experts is not None:
        layer.experts = _experts(plan.experts, hidden, weights)
    if plan.per_layer_mlp is not None:
        layer.per_layer_mlp = _mlp(plan.per_layer_mlp, hidden, weights)
    layer.is_parallel = plan.is_parallel
    layer.scale = 1.0 if plan.scale is None else float(weights.vector(plan.scale, 1)[0])


def _attention(plan: AttentionPlan, hidden: int, width: int, weights: Weights) -> Any:
    q_width, kv_width = plan.num_heads * plan.head_dim, plan.num_kv_heads * plan.head_dim
    before_anchor = -1 if plan.before_anchor is None else plan.before_anchor
    found = _filled(
        native().Attention,
        plan,
        rope=-1 if plan.rope is None else plan.rope,
        is_shared=plan.source is not None,
        mask=_filled(native().AttentionMask, plan, before_anchor=before_anchor),
        query_norm=weights.norm(plan.query_norm, q_width if plan.norms_whole_rows else plan.head_dim),
        key_norm=weights.norm(plan.key_norm, kv_width if plan.norms_whole_rows else plan.head_dim),
        value_norm=weights.norm(plan.value_norm, plan.head_dim),
        sinks=None if plan.sinks is None else weights.vector(plan.sinks, plan.num_heads).data_ptr(),
    )
    _link(found, plan, width, hidden, weights)
    num_others = 0 if plan.source is not None else 1 if plan.values_are_keys else 2
    wanted = q_width * (1 + plan.is_gated) + num_others * kv_width
    check_size("queries, keys and values", sum(one.num_channels for one in found.inputs), wanted)
    check_size(plan.out.weight, found.out.width, q_width)
    return found


def _recurrence(plan: RecurrencePlan, hidden: int, weights: Weights) -> Any:
    C, H, out_width = plan.conv_width, plan.num_heads, plan.num_heads * plan.value_width or plan.conv_width
    conv_weight = weights.vector(plan.conv_weight, C, 1, plan.kernel_size)[:, 0].t().contiguous()
    vectors = {"a_log": plan.a_log, "dt_bias": plan.dt_bias, "skips": plan.skips}
    found = _filled(
        native().Recurrence,
        plan,
        kind=_RECURRENCES.index(plan.kind),
        conv_weight=weights.keep(conv_weight).data_ptr(),
        conv_bias=None if plan.conv_bias is None else weights.vector(plan.conv_bias, C).data_ptr(),
        **{name: weights.vector(one, H).data_ptr() for name, one in vectors.items() if one},
        out_norm=weights.norm(plan.out_norm, out_width if plan.kind == "mamba2" else plan.value_width),
    )
    if H:
        check_size(plan.conv_weight, C, 2 * plan.num_groups * plan.key_width + out_width)
    _link(found, plan, hidden, hidden, weights)
    sizes = {"convolution": (C, C, C), "delta": (C, H, H, out_width), "mamba2": (out_width + C + H,)}[plan.kind]
    for stated, matrix, size in zip(plan.inputs, found.inputs, sizes, strict=False):
        check_size(stated.weight, matrix.num_channels, size)
    check_size(plan.out.weight, found.out.width, out_width)
    return found


def _link(found: Any, plan: Mixer, width: int, hidden: int, weights: Weights) -> None:
    found.num_inputs = len(plan.inputs)
    for i, one in enumerate(plan.inputs):
        found.inputs[i] = _matrix(one, width, None, weights)
    found.out = weights.matrix(plan.out)
    check_size(plan.out.weight, found.out.num_channels, hidden)


def _mlp(plan: MlpPlan, hidden: int, weights: Weights) -> Any:
    down = weights.matrix(plan.down)
    found = native().Mlp(len(plan.ups), _gating(plan), down=down, post_norm=weights.norm(plan.post_norm, hidden))
    for i, one in enumerate(plan.ups):
        found.ups[i] = _matrix(one, hidden, down.width, weights)
    check_size(plan.down.weight, down.num_channels, hidden)
    if plan.output_gate is not None:
        found.output_gate = _matrix(plan.output_gate, hidden, 1, weights)
    return found


def _experts(plan: ExpertsPlan, hidden: int, weights: Weights) -> Any:
    vectors = {"correction_bias": plan.correction_bias, "scales": plan.scales}
    found = _filled(
        native().Experts,
        plan,
        router=_matrix(plan.router, hidden, plan.num_experts, weights),
        num_ups=len(plan.ups),
        gating=_gating(plan),
        down=weights.matrices(plan.down, plan.num_experts),
        **{name: weights.norm(getattr(plan, name), hidden) for name in ("router_norm", "norm", "post_norm")},
        **{name: weights.vector(one, plan.num_experts).data_ptr() for name, one in vectors.items() if one},
    )
    down, width = found.down.first, hidden
    if plan.latent is not None:
        found.latent_in = _matrix(plan.latent[0], hidden, None, weights)
        width = found.latent_in.num_channels
        found.latent_out = _matrix(plan.latent[1], width, hidden, weights)
    for i, one in enumerate(plan.ups):
        found.ups[i] = weights.matrices(one, plan.num_experts)
        check_size(one.weight, found.ups[i].first.width, width)
        check_size(one.weight, found.ups[i].first.num_channels, down.width)
    check_size(plan.down.weight, down.num_channels, width)
    return found


def cache_shapes(plan: Plan) -> tuple[LayerShape, ...]:
    return tuple(map(_shape, plan.layers))


def _shape(layer: LayerPlan) -> LayerShape:
    mixer, states = layer.mixer, () if layer.recurrence is None else _states(layer.recurrence)
    num_heads, width = 0, 0
    if isinstance(mixer, AttentionPlan) and mixer.source is None:
        num_heads, width = mixer.num_kv_heads, mixer.head_dim
    return LayerShape(num_heads, width, width, torch.float32, torch.device("cpu"), states)


def _set_stores(layers: Any, plans: Sequence[LayerPlan]) -> None:
    """Set the numbers of the stores of each layer: keys and values of all layers in turn, then states."""
    shapes = list(map(_shape, plans))
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
                "shared keys", attention.num_kv_heads * attention.head_dim, source.num_kv_heads * source.head_dim
            )
            attention.store = source.store


def _states(mixer: RecurrencePlan) -> tuple[StateShape, ...]:
    kept_width = mixer.conv_width + 2 * mixer.num_heads  # numbers of a token
    ring = StateShape("window", 0, (WINDOW, kept_width), torch.float32, mixer.kernel_size - 1)
    size = mixer.num_heads, mixer.key_width, mixer.value_width
    return (ring, StateShape("replayed", 0, size, torch.float32)) if mixer.num_heads else (ring,)
