"""Plans: what the layers of a model compute, as data.

A plan names the parameters that each step uses. So it is checked against a model by its names alone, and weights may
come from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar

_Part = TypeVar("_Part")

MOST_TOKENS = 128
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
    weight: str | None  # name of its factors; None for ones
    epsilon: float
    added: float = 0.0  # to these factors
    bias: str | None = None  # name, or None
    factor: float = 1.0  # of them


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Product with a matrix."""

    weight: str  # name of a matrix [O, I]; or of those of all experts [E, O, I]
    bias: str | None = None  # name, or None
    part: Number = 0  # this one of ``num_parts`` equal parts of its rows
    num_parts: Count = 1
    is_transposed: bool = False  # it is stored as [I, O]. The parts of experts' matrices alternate then, row by row
    # Output scales, applied before the bias: numbers of rows and their factors, in turn; the last for all other rows:
    factors: tuple[tuple[Number, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary position embedding (Su et al. 2021)."""

    frequencies: tuple[float, ...]  # radians per position, of each pair of numbers
    scale: float = 1.0  # the factor of cosines and sines
    is_interleaved: bool = False  # pairs are neighbours; else a number of the first half and one of the second


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention (Vaswani et al. 2017), with keys and values that heads of a group share."""

    num_heads: Count
    num_groups: Count
    head_width: Count
    scale: float  # the factor of scores
    inputs: tuple[MatrixPlan, ...]  # matrices of queries, keys and values, in this order
    out: MatrixPlan
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    value_norm: NormPlan | None = None
    # Number of the earlier layer whose keys and values are read, so that ``inputs`` are queries alone; None for the
    # layer's own:
    source: Number | None = None
    values_are_keys: bool = False  # before norm and rope; ``inputs`` are those of queries and keys
    growth: float = 0.0  # queries are multiplied by 1 + growth * log(1 + floor(position / growth_span)), unless 0
    growth_span: Count = 1
    sinks: str | None = None  # name of the scores of a place without a value, for each head; or None
    cap: float | None = None  # of scores, or None
    rope: Number | None = 0  # number of its RopePlan; None for none
    window: Count | None = None  # tokens that a token sees, itself included; None for all
    before_anchor: Number | None = None  # tokens that a token sees before the first one of its forward; None for all
    sees_block: bool = False  # a token sees the later tokens of its forward, too
    norms_whole_rows: bool = False  # ``query_norm`` and ``key_norm`` are those of all heads together
    # The query of each head is followed by numbers whose logistic function multiplies the head's output:
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Recurrence over convolved queries, keys and values, whose state of each head decays; or a convolution alone."""

    # "delta", the gated delta rule (Yang et al. 2412.06464); "mamba2" (Dao and Gu 2405.21060); or "convolution", a
    # short one between two gates (LFM2):
    kind: Literal["convolution", "delta", "mamba2"]
    conv_width: Count  # channels of the convolution: queries, keys and values; of Mamba-2 values, keys and queries
    num_taps: Count  # tokens that it sees, the last one included
    taps: str  # its parameter [conv_width, 1, num_taps]
    # Matrices. Delta rule: of what is convolved; of the factors of what is added to the states; of steps; and of the
    # output's gate. Mamba-2: one, of the gate, of what is convolved, and of steps. Convolution: of the gate before it,
    # of its input, and of the gate after it:
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    num_heads: Number = 0
    num_groups: Number = 0
    key_width: Number = 0
    value_width: Number = 0
    # Parameters of the heads: the logarithm of a decay is -exp(rate) softplus(step + bias):
    rates: str = ""
    step_bias: str = ""
    # Norm of each head's output, before its gate; in Mamba-2 of each group's, after its gate; or None:
    out_norm: NormPlan | None = None
    taps_bias: str | None = None  # parameter, or None
    skips: str | None = None  # parameter: factors of the values that are added to the output; or None
    least_step: float = 0.0  # the least softplus(step + bias)

    @property
    def kept_width(self) -> int:
        """Numbers of a token that are kept by place."""
        return self.conv_width + 2 * self.num_heads


Mixer = AttentionPlan | RecurrencePlan


@dataclass(frozen=True, slots=True)
class MlpPlan:
    """Two-layer perceptron."""

    # Its first matrices: one; or two, the gate's and the one whose product the gate multiplies:
    ups: tuple[MatrixPlan, ...]
    down: MatrixPlan
    activation: Activation
    post_norm: NormPlan | None = None  # of its output, before that of experts is added
    scale: MatrixPlan | None = None  # gives the number whose logistic function multiplies the output


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """MLPs of which a router chooses some for each token (Shazeer et al. 2017)."""

    number: Count
    num_chosen: Count  # experts of a token
    router: MatrixPlan
    ups: tuple[MatrixPlan, ...]  # of all experts, as an MLP's
    down: MatrixPlan
    activation: Activation
    # Matrices before and after all experts, which are of another width; or None:
    latent: tuple[MatrixPlan, MatrixPlan] | None = None
    # Groups of experts whose two largest scores have the largest sums are chosen first (DeepSeek-V3):
    num_groups: Count = 1
    num_chosen_groups: Count = 1
    slope: float = 1.0
    # (gate, up) mean gate * logistic(slope * gate) * (up + 1), with numbers cut at the limit; None for the activation:
    limit: float | None = None
    is_sigmoid: bool = False  # scores are logistic functions of the router's numbers, not their softmax
    is_normalized: bool = True  # weights are divided by their sum and ``added``, then multiplied by ``scale``
    added: float = 0.0
    scale: float = 1.0
    correction: str | None = None  # name of what is added to scores for the choice alone, or None
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
    side: MlpPlan | None = None  # a third half, whose gate multiplies the layer's part of the model's sides
    scale: str | None = None  # name of the factor of the stream after the layer, or None
    is_parallel: bool = False  # the MLP reads what the mixer reads
    mixer_norm: NormPlan | None = None  # of the input of the mixer; None for none, as all norms
    mixer_post_norm: NormPlan | None = None  # of its output
    mlp_norm: NormPlan | None = None
    mlp_post_norm: NormPlan | None = None
    side_post_norm: NormPlan | None = None

    @property
    def recurrence(self) -> RecurrencePlan | None:
        return self.mixer if isinstance(self.mixer, RecurrencePlan) else self.beside


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Input of a head that drafts from states of its target: the norms of a token's embedding and of a state, side by
    side (Li et al. 2503.01840; DeepSeek-V3, 2412.19437, equation 21)."""

    embedding_norm: NormPlan
    state_norm: NormPlan
    # Gives the input of the first layer. None: that is the state, and the queries, keys and values of the first layer
    # are made of both:
    matrix: MatrixPlan | None = None
    adds_normed: bool = False  # without a matrix, the input of the first layer is the normed state


@dataclass(frozen=True, slots=True)
class SidesPlan:
    """Numbers of a token for each layer: (normed projection of the first layer's input + embedding) * scale."""

    embedding: str  # name of a matrix [V, layers * P]
    embedding_scale: float
    # [layers * P, H], whose result is multiplied by ``projection_scale`` before the norm of P numbers:
    projection: MatrixPlan
    projection_scale: float
    norm: NormPlan
    scale: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A causal language model, or a head. Scales are factors; a cap c of numbers x means c * tanh(x / c)."""

    layers: tuple[LayerPlan, ...]
    embedding: str
    last_norm: NormPlan
    head: MatrixPlan  # the matrix that gives logits
    ropes: tuple[RopePlan, ...] = ()
    place_embedding: str | None = None  # name of the embeddings of ``num_places`` positions, or None
    num_places: Number = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    joint: JointPlan | None = None  # the input of a head; None for a model
    sides: SidesPlan | None = None  # inputs of layers besides the stream, or None


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
