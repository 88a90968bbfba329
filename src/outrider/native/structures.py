"""Structures of the C++ forward (kernels/model.h), in the same order."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int64, c_void_p


class Norm(Structure):
    """``functions.h``"""

    _fields_ = [("kind", c_int64), ("epsilon", c_double), ("weight", c_void_p), ("bias", c_void_p)]


class Matrix(Structure):
    """``products.h``"""

    _fields_ = [
        *((name, c_void_p if name == "data" else c_int64) for name in ("data", "form", "num_channels", "width")),
        *((name, c_void_p) for name in ("scales", "bias")),
    ]


class Rope(Structure):
    """``model.h``, as all that follow"""

    _fields_ = [("width", c_int64), ("is_interleaved", c_int64), ("scale", c_double), ("frequencies", c_void_p)]


class Reach(Structure):
    _fields_ = [(name, c_int64) for name in ("window", "before_anchor", "sees_block")]


SIZES_OF_ATTENTION = (
    *("num_heads", "num_groups", "head_width", "rope", "store", "is_shared", "values_are_keys", "norms_whole_rows"),
)


class Attention(Structure):
    """A layer without it has no heads."""

    _fields_ = [
        *((name, c_int64) for name in SIZES_OF_ATTENTION),
        ("reach", Reach),
        *((name, c_double) for name in ("scale", "cap", "growth", "growth_span")),
        *((name, Norm) for name in ("query_norm", "key_norm", "value_norm")),
        ("sinks", c_void_p),
        ("is_gated", c_int64),
        ("num_inputs", c_int64),
        ("inputs", Matrix * 3),
        ("out", Matrix),
    ]


class Recurrence(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("kind", "num_heads", "num_groups", "key_width", "value_width")),
        *((name, c_int64) for name in ("num_taps", "conv_width")),
        *((name, c_void_p) for name in ("taps", "conv_bias", "rates", "step_bias", "skips")),
        ("least_step", c_double),
        ("out_norm", Norm),
        *((name, c_int64) for name in ("ring", "states", "num_inputs")),
        ("inputs", Matrix * 4),
        ("out", Matrix),
    ]


class Gating(Structure):
    _fields_ = [("activation", c_int64), ("slope", c_double), ("limit", c_double)]


class Mlp(Structure):
    """A layer without it has no ups."""

    _fields_ = [
        ("num_ups", c_int64),
        ("gating", Gating),
        ("ups", Matrix * 2),
        ("down", Matrix),
        ("post_norm", Norm),
        ("scale", Matrix),
    ]


class ExpertMatrices(Structure):
    _fields_ = [("first", Matrix), ("rows_apart", c_int64), ("bytes_apart", c_int64)]


class Experts(Structure):
    """A layer without it has none."""

    _fields_ = [
        *((name, c_int64) for name in ("number", "num_chosen", "is_sigmoid", "is_normalized")),
        ("added", c_double),
        ("scale", c_double),
        *((name, Norm) for name in ("router_norm", "norm", "post_norm")),
        ("router", Matrix),
        ("correction", c_void_p),
        ("scales", c_void_p),
        ("num_ups", c_int64),
        ("gating", Gating),
        ("ups", ExpertMatrices * 2),
        ("down", ExpertMatrices),
    ]


NORMS = ("mixer_norm", "mixer_post_norm", "mlp_norm", "mlp_post_norm", "side_post_norm")


class Layer(Structure):
    _fields_ = [
        *((name, Norm) for name in NORMS),
        ("attention", Attention),
        ("recurrence", Recurrence),
        ("mlp", Mlp),
        ("experts", Experts),
        ("side", Mlp),
        ("scale", c_double),
        ("is_parallel", c_int64),
    ]


class Sides(Structure):
    _fields_ = [
        ("width", c_int64),
        ("embedding", Matrix),
        ("projection", Matrix),
        *((name, c_double) for name in ("embedding_scale", "projection_scale", "scale")),
        ("norm", Norm),
    ]


class Joint(Structure):
    _fields_ = [
        ("is_there", c_int64),
        ("embedding_norm", Norm),
        ("state_norm", Norm),
        ("matrix", Matrix),
        ("adds_normed", c_int64),
    ]


SIZES = ("num_layers", "hidden", "num_ropes", "num_digits")
SCALES = ("embedding_scale", "residual_scale", "logit_scale", "logit_cap")


class Model(Structure):
    _fields_ = [
        *((name, c_int64) for name in SIZES),
        *((name, c_double) for name in SCALES),
        ("embedding", Matrix),
        ("head", Matrix),
        ("place_embedding", c_void_p),
        ("num_places", c_int64),
        ("last_norm", Norm),
        ("joint", Joint),
        ("sides", Sides),
        ("ropes", POINTER(Rope)),
        ("layers", POINTER(Layer)),
    ]


class Batch(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_rows", "num_columns")),
        *((name, c_void_p) for name in ("ids", "places", "states", "offsets")),
        ("stores", POINTER(c_void_p)),
        ("anchors", c_void_p),
        *((name, c_int64) for name in ("is_ahead", "is_final", "bits", "row_places", "num_wanted")),
        ("logits", c_void_p),
        ("num_features", c_int64),
        ("feature_layers", POINTER(c_int64)),
        ("features", c_void_p),
        ("broken", c_void_p),
    ]
