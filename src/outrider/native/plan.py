"""Plans: what the layers of a model compute, as data.

A plan names the parameters that each step uses. So it is checked against a model by its names alone, and weights may
come from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

_Part = TypeVar("_Part")

MAX_TOKENS = 128
"""Tokens of a sequence that may see each other (token_block.h)."""

Count = int
"""At least 1 (bounds.py)."""
Number = int
"""At least 0."""

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]


class NotPlanned(Exception):
    """A model has no plan; the message says why."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Normalization of rows."""

    kind: Literal["rms", "layer"]  # "rms" (Zhang and Sennrich 2019), or "layer" (Ba et al. 2016)
    weight: str | None  # name; None for ones
    epsilon: float
    weight_offset: float = 0.0  # added to the weight
    bias: str | None = None  # name, or None
    factor: float = 1.0  # of the weight with its offset


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Product with a matrix."""

    weight: str  # name of a matrix [O, I], or of all experts' matrices [E, O, I]
    bias: str | None = None  # name, or None
    part: Number = 0  # index among ``num_parts`` equal parts of the rows
    num_parts: Count = 1
    is_transposed: bool = False  # stored as [I, O]; the parts of experts' matrices alternate then, row by row
    # Output scales as (num_rows, scale), applied before the bias; the last is that of all other rows:
    output_scales: tuple[tuple[Number, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary position embedding (Su et al. 2021)."""

    frequencies: tuple[float, ...]  # radians per position, of each pair of numbers
    scale: float = 1.0  # the factor of cosines and sines
    is_interleaved: bool = False  # pairs are neighbours; else a number of the first half and one of the second


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention (Vaswani et al. 2017) with shared key-value heads (Ainslie et al. 2023)."""

    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    scale: float  # the factor of scores
    inputs: tuple[MatrixPlan, ...]  # matrices of queries, keys and values, in this order
    out: MatrixPlan
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    value_norm: NormPlan | None = None
    source: Number | None = None  # layer whose keys and values are read; ``inputs`` are queries alone then
    values_are_keys: bool = False  # before norm and rope; ``inputs`` are queries and keys alone
    # Temperature tuning: queries * (1 + temperature_scale * log(1 + floor(position / temperature_floor_scale))):
    temperature_scale: float = 0.0
    temperature_floor_scale: Count = 1
    sinks: str | None = None  # name of the scores of attention sinks, one for each head; or None
    softcap: float | None = None  # of scores, or None
    rope: Number | None = 0  # number of its RopePlan; None for none
    window: Count | None = None  # tokens that a token sees, itself included; None for all
    before_anchor: Number | None = None  # tokens that a token sees before the first one of its forward; None for all
    is_bidirectional: bool = False  # a token sees the later tokens of its forward, too
    norms_whole_rows: bool = False  # ``query_norm`` and ``key_norm`` are of all heads together
    # The query of each head is followed by a gate, whose sigmoid multiplies the head's output:
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Recurrence over convolved queries, keys and values, whose state of each head decays; or a convolution alone."""

    # "delta": gated delta rule (Yang et al. 2412.06464); "mamba2" (Dao and Gu 2405.21060); "convolution": LFM2's:
    kind: Literal["convolution", "delta", "mamba2"]
    conv_width: Count  # channels of the convolution: queries, keys and values; of Mamba-2 values, keys and queries
    kernel_size: Count  # tokens that the convolution sees, the last one included
    conv_weight: str  # name of its kernels [conv_width, 1, kernel_size]
    # Input projections. Delta rule: (queries, keys and values), (beta), (dt) and (output gate). Mamba-2: (gate, values,
    # keys, queries and dt). Convolution: (gate before), (input) and (gate after):
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    num_heads: Number = 0
    num_groups: Number = 0
    key_width: Number = 0
    value_width: Number = 0
    # Parameters of the heads: the logarithm of a decay is -exp(a_log) softplus(dt + dt_bias):
    a_log: str = ""
    dt_bias: str = ""
    # Norm of each head's output, before its gate; in Mamba-2 of each group's, after its gate; or None:
    out_norm: NormPlan | None = None
    conv_bias: str | None = None  # name, or None
    skips: str | None = None  # name of D: factors of the values that are added to the output; or None
    dt_min: float = 0.0  # the least softplus(dt + dt_bias)


Mixer = AttentionPlan | RecurrencePlan


@dataclass(frozen=True, slots=True)
class MlpPlan:
    """Two-layer perceptron."""

    ups: tuple[MatrixPlan, ...]  # input projections: (up,) or (gate, up)
    down: MatrixPlan
    activation: Activation
    post_norm: NormPlan | None = None  # of its output, before that of experts is added
    output_gate: MatrixPlan | None = None  # of a shared expert: its sigmoid multiplies the output


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """MLPs of which a router chooses some for each token (Shazeer et al. 2017)."""

    num_experts: Count
    num_active: Count  # experts of a token
    router: MatrixPlan
    ups: tuple[MatrixPlan, ...]  # input projections of all experts: (up,) or (gate, up)
    down: MatrixPlan
    activation: Activation
    latent: tuple[MatrixPlan, MatrixPlan] | None = None  # before and after all experts, if they have another width
    # Groups of experts whose two largest scores have the largest sums are chosen first (DeepSeek-V3):
    num_groups: Count = 1
    num_active_groups: Count = 1
    alpha: float = 1.0
    # (gate, up) mean gate * sigmoid(alpha * gate) * (up + 1), with numbers cut at the limit; None for the activation:
    limit: float | None = None
    is_sigmoid: bool = False  # scores are sigmoids of the router's logits, not their softmax
    is_normalized: bool = True  # weights are divided by sum + ``sum_epsilon``, then multiplied by ``scale``
    sum_epsilon: float = 0.0
    scale: float = 1.0
    correction_bias: str | None = None  # name of a bias of scores for the choice alone, or None
    scales: str | None = None  # name of factors of the weights of each expert, or None
    # Norms of the inputs of router and experts; None for the input of the MLP:
    router_norm: NormPlan | None = None
    norm: NormPlan | None = None
    post_norm: NormPlan | None = None  # of what all experts of a token give


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decoder layer: a mixer of tokens, then an MLP, experts or the sum of both, each half added to the stream; one
    half may be missing."""

    mixer: Mixer | None
    mlp: MlpPlan | None
    experts: ExpertsPlan | None = None
    beside: RecurrencePlan | None = None  # a recurrence that reads what the attention reads, too
    per_layer_mlp: MlpPlan | None = None  # its gate multiplies the layer's per-layer embeddings
    scale: str | None = None  # name of the factor of the stream after the layer, or None
    is_parallel: bool = False  # the MLP reads what the mixer reads
    mixer_norm: NormPlan | None = None  # of the input of the mixer; None for none, as all norms
    mixer_post_norm: NormPlan | None = None  # of its output
    mlp_norm: NormPlan | None = None
    mlp_post_norm: NormPlan | None = None
    per_layer_post_norm: NormPlan | None = None

    @property
    def recurrence(self) -> RecurrencePlan | None:
        return self.mixer if isinstance(self.mixer, RecurrencePlan) else self.beside


@dataclass(frozen=True, slots=True)
class DraftInputPlan:
    """Input of a head that drafts from states of its target: the norms of a token's embedding and of a state, side by
    side (Li et al. 2503.01840; DeepSeek-V3, 2412.19437, equation 21)."""

    embedding_norm: NormPlan
    state_norm: NormPlan
    # Gives the first layer's input. None: that is the state, and its queries, keys and values are made of both:
    projection: MatrixPlan | None = None
    adds_normed: bool = False  # without a projection, the input of the first layer is the normed state


@dataclass(frozen=True, slots=True)
class PerLayerPlan:
    """Per-layer embeddings (Gemma 4): (normed projection of the first layer's input + embedding) * scale."""

    embedding: str  # name of a matrix [V, layers * P]
    embedding_scale: float
    projection: MatrixPlan  # [layers * P, H]; times ``projection_scale`` the input of the norm of P numbers
    projection_scale: float
    norm: NormPlan
    scale: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A causal language model, or a head. Scales are factors; a softcap c of numbers x means c * tanh(x / c)."""

    layers: tuple[LayerPlan, ...]
    embedding: str
    final_norm: NormPlan
    lm_head: MatrixPlan
    ropes: tuple[RopePlan, ...] = ()
    position_embedding: str | None = None  # name of the embeddings of ``num_positions`` positions, or None
    num_positions: Number = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    draft_input: DraftInputPlan | None = None  # of a head; None for a model
    per_layer: PerLayerPlan | None = None  # per-layer embeddings, or None


def parts(value: Any) -> Iterator[Any]:
    if is_dataclass(value):
        yield from parts(tuple(getattr(value, one.name) for one in fields(value)))
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from parts(one)


def weight_names(plan: Plan) -> set[str]:
    """Names of all weights of a plan."""
    values = ((one.name, getattr(part, one.name)) for part in parts(plan) for one in fields(part))
    return {value for name, value in values if isinstance(value, str) and value and name not in ("kind", "activation")}


def rename(plan: _Part, old: str, new: str) -> _Part:
    """Plan, or part of one, whose parameters have another beginning of their names."""

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return new + value.removeprefix(old) if value.startswith(old) else value
        if isinstance(value, tuple):
            return tuple(map(change, value))
        return rename(value, old, new) if is_dataclass(value) else value

    part: Any = plan
    renamed: _Part = replace(part, **{one.name: change(getattr(part, one.name)) for one in fields(part)})
    return renamed


def check_size(name: str, size: int, expected: int) -> None:
    """Raises NotPlanned: a size is not the expected one, so that the C++ code would read beyond it."""
    if size != expected:
        raise NotPlanned(f"{name} has the size {size}, not {expected}")
