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


class Attention(Structure):
    """A layer without it has no heads."""

    _fields_ = [
        *((name, c_int64) for name in ("num_heads", "num_groups", "head_width", "rope", "store", "norms_whole_rows")),
        ("reach", Reach),
        ("scale", c_double),
        ("cap", c_double),
        ("query_norm", Norm),
        ("key_norm", Norm),
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


class Mlp(Structure):
    """A layer without it has no ups."""

    _fields_ = [("num_ups", c_int64), ("activation", c_int64), ("ups", Matrix * 2), ("down", Matrix)]


NORMS = ("mixer_norm", "mixer_post_norm", "mlp_norm", "mlp_post_norm")


class Layer(Structure):
    _fields_ = [*((name, Norm) for name in NORMS), ("attention", Attention), ("recurrence", Recurrence), ("mlp", Mlp)]


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
