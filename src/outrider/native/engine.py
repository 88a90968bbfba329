"""The native forward of a model: its plan with the addresses of its weights, and the call of the C++ library.

The weights are those of a module of Transformers, as they are stored (kernels/narrow_weight.py). The module keeps them
alive, and may run beside.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import addressof, byref, c_double, c_int64, c_void_p
from dataclasses import fields
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.kernels.library import FORMS, library
from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.native.families import plan_of
from outrider.native.plan import (
    AttentionPlan,
    ExpertsPlan,
    JointPlan,
    LayerPlan,
    MatrixPlan,
    Mixer,
    MlpPlan,
    NormPlan,
    NotPlanned,
    Plan,
    RecurrencePlan,
)
from outrider.native.structures import native
from outrider.native.team import Team
from outrider.runtime.cache import SlotCache
from outrider.runtime.cache_shapes import WINDOW, LayerShape, StateShape
from outrider.runtime.execution import NativeResults
from outrider.runtime.stand_in import StandIn

_ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu", "relu2")  # functions.h
_NUMBERS = (c_double, c_int64)
_NORMS = {"rms": 1, "layer": 2}
_FEW_TOKENS, _SIMILAR_PLACES = 64, 512  # forwards whose times are compared
_RECURRENCES = ("", "convolution", "delta", "mamba2")  # model.h
_MOST_TAPS = 8  # of a convolution (recurrence.h)
_WHOLE_VECTOR = 16  # rows: parts of a matrix in blocks begin at multiples of this, on all processors


class NativeForward:
    """Forwards of one model on the CPU.

    Attributes:
        vocab_size: V, rows of the head.
        width: the width of hidden states.
        layer_shapes: the shapes of a cache's layers.
    """

    def __init__(self, model: Any, plan: Plan | None = None) -> None:
        """
        Args:
            model: module of Transformers, in float32; a stand-in for one; or a head.
            plan: of a head; None for the plan of the model's configuration.

        Raises:
            NotPlanned: its family, its configuration or the form of its weights is not known here.
        """
        kernels = library()
        if kernels is None:
            raise NotPlanned("the native library cannot be compiled here")
        self._run = kernels.outrider_forward
        is_head = plan is not None
        if plan is None:
            plan = model.plan if isinstance(model, StandIn) else plan_of(model.config)
        weights = _Weights(model.state_dict(keep_vars=True))
        self._weights = weights  # which keeps them alive
        self._model = _structure(plan, weights)
        weights.check("layers." if is_head else "")  # other parameters of a head run elsewhere
        self.vocab_size = int(self._model.head.num_channels)
        self.width = int(self._model.hidden)
        self.layer_shapes = cache_shapes(plan)
        self._team = Team()
        self._stores: WeakKeyDictionary[SlotCache, Any] = WeakKeyDictionary()

    def __call__(
        self,
        ids: Tensor,
        places: Tensor,
        cache: SlotCache,
        view_len: int,
        *,
        num_logits: int | None = None,
        features: Sequence[int] = (),
        keeps_finite: bool = False,
        states: Tensor | None = None,
    ) -> NativeResults:
        """Run a forward; see ``Native``."""
        (num_rows, num_columns), num_wanted = ids.shape, ids.shape[1] if num_logits is None else num_logits
        ids, places = ids.contiguous(), places.contiguous()
        assert ids.dtype == places.dtype == torch.long
        assert (states is None) == (not self._model.joint.is_there)
        if states is not None:
            states = states.contiguous()
            assert states.dtype == torch.float32 and states.shape == (*ids.shape, self.width)
        stores, bits, row_places = self._stores_of(cache)
        offsets, anchors = cache.offsets, cache.anchors if cache.has_anchors else None
        logits = torch.empty(num_rows, num_wanted, self.vocab_size)
        found = torch.empty(num_rows, num_columns, len(features) * self.width) if features else None
        broken = torch.empty(num_rows, num_columns, dtype=torch.bool) if keeps_finite else None
        layers = (c_int64 * len(features))(*features)
        batch = native().Batch(
            *(num_rows, num_columns, ids.data_ptr(), places.data_ptr()),
            *(None if one is None else one.data_ptr() for one in (states, offsets)),
            *(addressof(stores), None if anchors is None else anchors.data_ptr(), cache.is_ahead, not keeps_finite),
            *(bits, row_places),
            *(num_wanted, logits.data_ptr(), len(features), addressof(layers)),
            *(None if found is None else found.data_ptr(), None if broken is None else broken.data_ptr()),
        )
        num_threads = torch.get_num_threads()
        size = self._team.size(num_threads)
        begin_s = time.perf_counter()
        if not self._run(byref(self._model), byref(batch), size):
            raise IndexError("a token id or a position is out of range")
        if ids.numel() <= _FEW_TOKENS:
            kind = ids.numel(), num_wanted, view_len // _SIMILAR_PLACES
            self._team.learn(kind, size, num_threads, time.perf_counter() - begin_s)
        return NativeResults(logits, found, broken)

    @contextmanager
    def without_rounding(self) -> Iterator[None]:
        """Multiply rows of float32 with blocks for a while."""
        num_digits = self._model.num_digits
        try:
            self._model.num_digits = 0
            yield
        finally:
            self._model.num_digits = num_digits

    def _stores_of(self, cache: SlotCache) -> Any:
        found = self._stores.get(cache)
        if found is None:
            num_kept = 2 * sum(shape.num_heads > 0 for shape in self.layer_shapes)
            kept, states = cache.storage[:num_kept], cache.storage[cache.num_token_stores :]
            assert all(store.is_contiguous() for store in (*kept, *states))
            assert all(store.shape[1] == cache.capacity + 1 for store in kept)
            addresses = (c_void_p * (num_kept + len(states)))(*(store.data_ptr() for store in (*kept, *states)))
            bits = 8 * kept[0].itemsize if kept else 32
            found = self._stores[cache] = addresses, bits, cache.capacity + 1
        return found


class _Weights:
    """Parameters and stored buffers of a model by name, and their addresses."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._used: set[str] = set()
        self._made: list[Tensor] = []
        self._copies: dict[str, Tensor] = {}
        self.num_digits: set[int] = set()

    def matrix(self, plan: MatrixPlan) -> Any:
        return self.matrices(plan, 1).first

    def matrices(self, plan: MatrixPlan, number: int) -> Any:
        """Matrices of so many experts, or one of a layer."""
        weight = self._named(plan.weight)
        stored: Tensor = weight
        form, scales = FORMS.get(stored.dtype), None
        if isinstance(weight, NarrowWeight):
            stored, form = weight.stored, FORMS.get(weight.stored.dtype)
            scales = None if weight.scale is None else self._keep(weight.scale[:, 0].contiguous())
            layout = ExpertLayout(number, plan.num_parts if plan.is_transposed else None) if number > 1 else None
            if weight.order is not None or weight.experts != layout or plan.is_transposed and layout is None:
                raise NotPlanned(f"{plan.weight} has rows or columns in another order")
            if weight.blocks is not None:
                form = weight.blocks.number
                self.num_digits.add(weight.blocks.num_digits)
        elif type(weight) is not torch.nn.Parameter:  # others' types state one type and store another
            raise NotPlanned(f"{plan.weight} is stored as {type(weight).__name__}")
        width = weight.shape[-2 if plan.is_transposed else -1]
        if plan.is_transposed and number > 1:
            stored = stored if isinstance(weight, NarrowWeight) else self._rows(plan.weight, plan, number)
        elif plan.is_transposed:
            stored = stored.detach().t().contiguous()
            weight.data = stored.t()  # of the same memory
        if form is None or stored.device.type != "cpu" or not stored.is_contiguous():
            raise NotPlanned(f"{plan.weight} is stored as {stored.dtype} on {stored.device}")
        stored = self._keep(stored.detach().flatten(0, -2))
        rows_apart, row_bytes = len(stored) // number, stored.stride(0) * stored.itemsize
        num_channels = rows_apart // plan.num_parts
        first = plan.part * num_channels
        if stored.dtype == torch.uint8 and plan.num_parts * number > 1 and num_channels % _WHOLE_VECTOR:
            raise NotPlanned(f"{plan.weight} has parts of {num_channels} rows, no multiple of {_WHOLE_VECTOR}")
        scales_at = None if scales is None else scales.data_ptr() + first * scales.itemsize
        bias = None if plan.bias is None else self._bias(plan, number, rows_apart).data_ptr() + first * 4
        matrix = native().Matrix(stored.data_ptr() + first * row_bytes, form, num_channels, width, scales_at, bias)
        return native().ExpertMatrices(matrix, rows_apart, rows_apart * row_bytes)

    def _bias(self, plan: MatrixPlan, number: int, length: int) -> Tensor:
        assert plan.bias is not None
        bias = self.vector(plan.bias, *((length,) if number == 1 else (number, length)))
        return self._rows(plan.bias, plan, number) if plan.is_transposed and number > 1 else bias

    def _rows(self, name: str, plan: MatrixPlan, number: int) -> Tensor:
        """Copy of experts' rows, or biases, in the order of parts."""
        if name not in self._copies:
            layout = ExpertLayout(number, plan.num_parts)
            self._copies[name] = layout.rows(self._named(name).detach()).contiguous()
        return self._copies[name]

    def vector(self, name: str, *shape: int) -> Tensor:
        weight = self._named(name)
        if weight.ndim == len(shape) + 1 and len(weight) == 1:
            weight = self._parameters[name][0]
        is_plain = type(self._parameters[name]) in (Tensor, torch.nn.Parameter)
        if not is_plain or weight.dtype != torch.float32 or weight.shape != shape:
            raise NotPlanned(f"{name} is {type(weight).__name__} {tuple(weight.shape)} of {weight.dtype}")
        return self._keep(weight.detach().contiguous())

    def norm(self, plan: NormPlan | None, length: int) -> Any:
        if plan is None:
            return native().Norm(0, 0.0, None, None)
        weight = self._keep(torch.ones(length)) if plan.weight is None else self.vector(plan.weight, length)
        if plan.added or plan.factor != 1:
            weight = self._keep((weight + plan.added) * plan.factor)
        bias = None if plan.bias is None else self.vector(plan.bias, length).data_ptr()
        return native().Norm(_NORMS[plan.kind], plan.epsilon, weight.data_ptr(), bias)

    def check(self, beginning: str) -> None:
        """Raises NotPlanned: there are parameters of such names that the plan does not use."""
        used = {id(self._parameters[name]) for name in self._used}
        unused = [
            name for name, weight in self._parameters.items() if name.startswith(beginning) and id(weight) not in used
        ]
        if unused:
            raise NotPlanned(f"its plan does not know {unused[0]}")

    def _named(self, name: str) -> Tensor:
        if name not in self._parameters:
            raise NotPlanned(f"it has no {name}")
        self._used.add(name)
        return self._parameters[name]

    def _keep(self, tensor: Tensor) -> Tensor:
        self._made.append(tensor)
        return tensor


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


def _set_stores(layers: Any, plans: Sequence[LayerPlan]) -> None:
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
            _check("shared keys", attention.num_groups * attention.head_width, source.num_groups * source.head_width)
            attention.store = source.store


def _states(mixer: RecurrencePlan) -> tuple[StateShape, ...]:
    ring = StateShape("window", 0, (WINDOW, mixer.kept_width), torch.float32, mixer.num_taps - 1)
    size = mixer.num_heads, mixer.key_width, mixer.value_width
    return (ring, StateShape("replayed", 0, size, torch.float32)) if mixer.num_heads else (ring,)


def _structure(plan: Plan, weights: _Weights) -> Any:
    embedding, head = weights.matrix(MatrixPlan(plan.embedding)), weights.matrix(plan.head)
    hidden = embedding.width
    _check("head", head.width, hidden)
    layers, ropes = (native().Layer * len(plan.layers))(), (native().Rope * len(plan.ropes))()
    for rope, stated in zip(ropes, plan.ropes, strict=True):
        frequencies = weights._keep(torch.tensor(stated.frequencies))
        rope.width, rope.is_interleaved = 2 * len(stated.frequencies), stated.is_interleaved
        rope.scale, rope.frequencies = stated.scale, frequencies.data_ptr()
    is_joint = plan.joint is not None and plan.joint.matrix is None  # the first layer reads both norms
    for i, (layer, stated_layer) in enumerate(zip(layers, plan.layers, strict=True)):
        _fill(layer, stated_layer, hidden, 2 * hidden if is_joint and i == 0 else hidden, weights)
        if layer.attention.num_heads and layer.attention.rope >= 0:
            width = layer.attention.head_width
            _check("rope", max(ropes[layer.attention.rope].width, width), width)
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
        head=head,
        last_norm=weights.norm(plan.last_norm, hidden),
        joint=_joint(plan.joint, hidden, weights),
        sides=_sides(plan, hidden, weights),
        ropes=ropes,
        layers=layers,
    )
    if plan.place_embedding is not None:
        places = weights.vector(plan.place_embedding, plan.num_places, hidden)
        model.place_embedding = places.data_ptr()
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


def _joint(plan: JointPlan | None, hidden: int, weights: _Weights) -> Any:
    if plan is None:
        return native().Joint()
    norms = (weights.norm(norm, hidden) for norm in (plan.embedding_norm, plan.state_norm))
    matrix = native().Matrix()
    if plan.matrix is not None:
        matrix = weights.matrix(plan.matrix)
        _check(plan.matrix.weight, matrix.width, 2 * hidden)
        _check(plan.matrix.weight, matrix.num_channels, hidden)
    return native().Joint(True, *norms, matrix, plan.adds_normed)


def _sides(plan: Plan, hidden: int, weights: _Weights) -> Any:
    sides = plan.sides
    if sides is None:
        return native().Sides()
    embedding, projection = weights.matrix(MatrixPlan(sides.embedding)), weights.matrix(sides.projection)
    width = embedding.width // len(plan.layers)
    _check(sides.embedding, embedding.width, width * len(plan.layers))
    _check(sides.projection.weight, projection.num_channels, embedding.width)
    _check(sides.projection.weight, projection.width, hidden)
    norm = weights.norm(sides.norm, width)
    return _filled(native().Sides, sides, width=width, embedding=embedding, projection=projection, norm=norm)


def _fill(layer: Any, plan: LayerPlan, hidden: int, width: int, weights: _Weights) -> None:
    """
    Args:
        width: the width of the mixer's input.
    """
    for name, kind in layer._fields_:
        if kind is native().Norm:
            setattr(layer, name, weights.norm(getattr(plan, name), hidden))
    if isinstance(plan.mixer, RecurrencePlan):
        layer.recurrence = _recurrence(plan.mixer, hidden, weights)
    elif plan.mixer is not None:
        layer.attention = _attention(plan.mixer, hidden, width, weights)
    if plan.mlp is not None:
        layer.mlp = _mlp(plan.mlp, hidden, weights)
    if plan.experts is not None:
        layer.experts = _experts(plan.experts, hidden, weights)
    if plan.side is not None:
        layer.side = _mlp(plan.side, hidden, weights)
    layer.is_parallel = plan.is_parallel
    layer.scale = 1.0 if plan.scale is None else float(weights.vector(plan.scale, 1)[0])


def _attention(plan: AttentionPlan, hidden: int, width: int, weights: _Weights) -> Any:
    _check("heads", plan.num_heads % plan.num_groups, 0)
    q_width, kv_width = plan.num_heads * plan.head_width, plan.num_groups * plan.head_width
    found = _filled(
        native().Attention,
        plan,
        rope=-1 if plan.rope is None else plan.rope,
        is_shared=plan.source is not None,
        reach=_filled(native().Reach, plan, before_anchor=-1 if plan.before_anchor is None else plan.before_anchor),
        query_norm=weights.norm(plan.query_norm, q_width if plan.norms_whole_rows else plan.head_width),
        key_norm=weights.norm(plan.key_norm, kv_width if plan.norms_whole_rows else plan.head_width),
        value_norm=weights.norm(plan.value_norm, plan.head_width),
        sinks=None if plan.sinks is None else weights.vector(plan.sinks, plan.num_heads).data_ptr(),
    )
    _link(found, plan, width, hidden, weights)
    num_others = 0 if plan.source is not None else 1 if plan.values_are_keys else 2
    wanted = q_width * (1 + plan.is_gated) + num_others * kv_width
    _check("queries, keys and values", sum(one.num_channels for one in found.inputs), wanted)
    _check(plan.out.weight, found.out.width, q_width)
    return found


def _recurrence(plan: RecurrencePlan, hidden: int, weights: _Weights) -> Any:
    C, H, out_width = plan.conv_width, plan.num_heads, plan.num_heads * plan.value_width or plan.conv_width
    taps = weights.vector(plan.taps, C, 1, plan.num_taps)[:, 0].t().contiguous()
    vectors = {"rates": plan.rates, "step_bias": plan.step_bias, "skips": plan.skips}
    found = _filled(
        native().Recurrence,
        plan,
        kind=_RECURRENCES.index(plan.kind),
        taps=weights._keep(taps).data_ptr(),
        conv_bias=None if plan.taps_bias is None else weights.vector(plan.taps_bias, C).data_ptr(),
        **{name: weights.vector(one, H).data_ptr() for name, one in vectors.items() if one},
        out_norm=weights.norm(plan.out_norm, out_width if plan.kind == "mamba2" else plan.value_width),
    )
    _check("taps", min(plan.num_taps, _MOST_TAPS), plan.num_taps)
    if H:
        _check("heads", H % plan.num_groups, 0)
        _check(plan.taps, C, 2 * plan.num_groups * plan.key_width + out_width)
    _link(found, plan, hidden, hidden, weights)
    sizes = {"convolution": (C, C, C), "delta": (C, H, H, out_width), "mamba2": (out_width + C + H,)}[plan.kind]
    for stated, matrix, size in zip(plan.inputs, found.inputs, sizes, strict=False):
        _check(stated.weight, matrix.num_channels, size)
    _check(plan.out.weight, found.out.width, out_width)
    return found


def _link(found: Any, plan: Mixer, width: int, hidden: int, weights: _Weights) -> None:
    """Link the matrices of a mixer."""
    found.num_inputs = len(plan.inputs)
    for i, one in enumerate(plan.inputs):
        found.inputs[i] = weights.matrix(one)
        _check(one.weight, found.inputs[i].width, width)
    found.out = weights.matrix(plan.out)
    _check(plan.out.weight, found.out.num_channels, hidden)


def _mlp(plan: MlpPlan, hidden: int, weights: _Weights) -> Any:
    down = weights.matrix(plan.down)
    found = native().Mlp(len(plan.ups), _gating(plan), down=down, post_norm=weights.norm(plan.post_norm, hidden))
    for i, one in enumerate(plan.ups):
        found.ups[i] = weights.matrix(one)
        _check(one.weight, found.ups[i].width, hidden)
        _check(one.weight, found.ups[i].num_channels, down.width)
    _check(plan.down.weight, down.num_channels, hidden)
    if plan.scale is not None:
        found.scale = weights.matrix(plan.scale)
        _check(plan.scale.weight, found.scale.width, hidden)
        _check(plan.scale.weight, found.scale.num_channels, 1)
    return found


def _experts(plan: ExpertsPlan, hidden: int, weights: _Weights) -> Any:
    _check("experts of a token", min(plan.num_chosen, plan.number), plan.num_chosen)
    vectors = {"correction": plan.correction, "scales": plan.scales}
    found = _filled(
        native().Experts,
        plan,
        router=weights.matrix(plan.router),
        num_ups=len(plan.ups),
        gating=_gating(plan),
        down=weights.matrices(plan.down, plan.number),
        **{name: weights.norm(getattr(plan, name), hidden) for name in ("router_norm", "norm", "post_norm")},
        **{name: weights.vector(one, plan.number).data_ptr() for name, one in vectors.items() if one},
    )
    down = found.down.first
    for i, one in enumerate(plan.ups):
        found.ups[i] = weights.matrices(one, plan.number)
        _check(one.weight, found.ups[i].first.width, hidden)
        _check(one.weight, found.ups[i].first.num_channels, down.width)
    _check(plan.down.weight, down.num_channels, hidden)
    _check(plan.router.weight, found.router.num_channels, plan.number)
    _check(plan.router.weight, found.router.width, hidden)
    return found


def _check(name: str, size: int, expected: int) -> None:
    """Raises NotPlanned: a size is not the expected one, so that the C++ code would read beyond it."""
    if size != expected:
        raise NotPlanned(f"{name} has the size {size}, not {expected}")
