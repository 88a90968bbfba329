"""Plans: what the layers of a model compute, as data.

A plan names the parameters that each step uses. So it is checked against a model by its names alone, and weights may
come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """Normalization of rows.

    Attributes:
        kind: "rms" (Zhang and Sennrich 2019), or "layer" (Ba et al. 2016).
        weight: name of its factors; None for ones.
        added: to these factors.
        factor: of them.
        bias: name, or None.
    """

    kind: Literal["rms", "layer"]
    weight: str | None
    epsilon: float
    added: float = 0.0
    bias: str | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Product with a matrix.

    Attributes:
        weight: name of a matrix [O, I]; or of those of all experts [E, O, I].
        bias: name, or None.
        part: this one of ``num_parts`` equal parts of its rows.
        is_transposed: it is stored as [I, O]. The parts of experts' matrices alternate then, row by row.
        factors: of its results, before the bias: a number of rows and their factor, in turn; the last is that of all
            rows that are left.
    """

    weight: str
    bias: str | None = None
    part: Number = 0
    num_parts: Count = 1
    is_transposed: bool = False
    factors: tuple[tuple[Number, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RopePlan:
    """Rotary position embedding (Su et al. 2021).

    Attributes:
        frequencies: radians per position, of each pair of numbers.
        scale: the factor of cosines and sines.
        is_interleaved: pairs are neighbours; else a number of the first half and one of the second.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    is_interleaved: bool = False


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention (Vaswani et al. 2017), with keys and values that heads of a group share.

    Attributes:
        inputs: matrices of queries, keys and values, in this order.
        source: number of the earlier layer whose keys and values are read, so that ``inputs`` are queries alone; None
            for the layer's own.
        values_are_keys: before norm and rope; ``inputs`` are those of queries and keys.
        growth: queries are multiplied by 1 + growth * log(1 + floor(position / growth_span)), unless 0.
        sinks: name of the scores of a place without a value, for each head; or None.
        scale: the factor of scores.
        cap: of scores, or None.
        rope: number of its RopePlan; None for none.
        window: tokens that a token sees, itself included; None for all.
        before_anchor: tokens that a token sees before the first one of its forward; None for all.
        sees_block: a token sees the later tokens of its forward, too.
        norms_whole_rows: ``query_norm`` and ``key_norm`` are those of all heads together.
        is_gated: the query of each head is followed by numbers whose logistic function multiplies the head's output.
    """

    num_heads: Count
    num_groups: Count
    head_width: Count
    scale: float
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    value_norm: NormPlan | None = None
    source: Number | None = None
    values_are_keys: bool = False
    growth: float = 0.0
    growth_span: Count = 1
    sinks: str | None = None
    cap: float | None = None
    rope: Number | None = 0
    window: Count | None = None
    before_anchor: Number | None = None
    sees_block: bool = False
    norms_whole_rows: bool = False
    is_gated: bool = False


@dataclass(frozen=True, slots=True)
class RecurrencePlan:
    """Recurrence over convolved queries, keys and values, whose state of each head decays; or a convolution alone.

    Attributes:
        kind: "delta", the gated delta rule (Yang et al. 2412.06464); "mamba2" (Dao and Gu 2405.21060); or
            "convolution", a short one between two gates (LFM2).
        conv_width: channels of the convolution: queries, keys and values; of Mamba-2 values, keys and queries.
        num_taps: tokens that it sees, the last one included.
        taps: its parameter [conv_width, 1, num_taps].
        inputs: matrices. Delta rule: of what is convolved; of the factors of what is added to the states; of steps;
            and of the output's gate. Mamba-2: one, of the gate, of what is convolved, and of steps. Convolution: of the
            gate before it, of its input, and of the gate after it.
        rates, step_bias: parameters of the heads: the logarithm of a decay is -exp(rate) softplus(step + bias).
        out_norm: of each head's output, before its gate; of Mamba-2, of each group's, after its gate; or None.
        taps_bias: parameter, or None.
        skips: parameter: factors of the values that are added to the output; or None.
        least_step: the least softplus(step + bias).
    """

    kind: Literal["convolution", "delta", "mamba2"]
    conv_width: Count
    num_taps: Count
    taps: str
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    num_heads: Number = 0
    num_groups: Number = 0
    key_width: Number = 0
    value_width: Number = 0
    rates: str = ""
    step_bias: str = ""
    out_norm: NormPlan | None = None
    taps_bias: str | None = None
    skips: str | None = None
    least_step: float = 0.0

    @property
    def kept_width(self) -> int:
        """Numbers of a token that are kept by place."""
        return self.conv_width + 2 * self.num_heads


Mixer = AttentionPlan | RecurrencePlan


@dataclass(frozen=True, slots=True)
class MlpPlan:
    """Two-layer perceptron.

    Attributes:
        ups: its first matrices: one; or two, the gate's and the one whose product the gate multiplies.
        post_norm: of its output, before that of experts is added.
        scale: gives the number whose logistic function multiplies the output.
    """

    ups: tuple[MatrixPlan, ...]
    down: MatrixPlan
    activation: Activation
    post_norm: NormPlan | None = None
    scale: MatrixPlan | None = None


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """MLPs of which a router chooses some for each token (Shazeer et al. 2017).

    Attributes:
        num_chosen: experts of a token.
        num_groups, num_chosen_groups: of the groups of experts, those whose two largest scores have the largest sums
            are chosen first (DeepSeek-V3).
        ups: of all experts, as an MLP's.
        latent: matrices before and after all experts, which are of another width; or None.
        limit: (gate, up) mean gate * logistic(slope * gate) * (up + 1), with numbers cut at the limit; None for the
            activation.
        is_sigmoid: scores are logistic functions of the router's numbers, not their softmax.
        is_normalized: weights are divided by their sum and ``added``, then multiplied by ``scale``.
        correction: name of what is added to scores for the choice alone, or None.
        scales: name of factors of the weights of each expert, or None.
        router_norm: of the router's input; None for the input of the MLP, as ``norm``, that of the experts.
        post_norm: of what all experts of a token give.
    """

    number: Count
    num_chosen: Count
    router: MatrixPlan
    ups: tuple[MatrixPlan, ...]
    down: MatrixPlan
    activation: Activation
    latent: tuple[MatrixPlan, MatrixPlan] | None = None
    num_groups: Count = 1
    num_chosen_groups: Count = 1
    slope: float = 1.0
    limit: float | None = None
    is_sigmoid: bool = False
    is_normalized: bool = True
    added: float = 0.0
    scale: float = 1.0
    correction: str | None = None
    scales: str | None = None
    router_norm: NormPlan | None = None
    norm: NormPlan | None = None
    post_norm: NormPlan | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decoder layer: a mixer of tokens, then an MLP, experts or the sum of both, each half added to the stream; one
    half may be missing.

    Attributes:
        beside: a recurrence that reads what the attention reads, too.
        side: a third half, whose gate multiplies the layer's part of the model's sides.
        scale: name of the factor of the stream after the layer, or None.
        is_parallel: the MLP reads what the mixer reads.
        mixer_norm: of the input of the mixer; None for none, as all norms.
        mixer_post_norm: of its output.
    """

    mixer: Mixer | None
    mlp: MlpPlan | None
    experts: ExpertsPlan | None = None
    beside: RecurrencePlan | None = None
    side: MlpPlan | None = None
    scale: str | None = None
    is_parallel: bool = False
    mixer_norm: NormPlan | None = None
    mixer_post_norm: NormPlan | None = None
    mlp_norm: NormPlan | None = None
    mlp_post_norm: NormPlan | None = None
    side_post_norm: NormPlan | None = None

    @property
    def recurrence(self) -> RecurrencePlan | None:
        return self.mixer if isinstance(self.mixer, RecurrencePlan) else self.beside


@dataclass(frozen=True, slots=True)
class JointPlan:
    """Input of a head that drafts from states of its target: the norms of a token's embedding and of a state, side by
    side (Li et al. 2503.01840; DeepSeek-V3, 2412.19437, equation 21).

    Attributes:
        matrix: gives the input of the first layer. None: that is the state, and the queries, keys and values of the
            first layer are made of both.
        adds_normed: without a matrix, the input of the first layer is the normed state.
    """

    embedding_norm: NormPlan
    state_norm: NormPlan
    matrix: MatrixPlan | None = None
    adds_normed: bool = False


@dataclass(frozen=True, slots=True)
class SidesPlan:
    """Numbers of a token for each layer: (normed projection of the first layer's input + embedding) * scale.

    Attributes:
        embedding: name of a matrix [V, layers * P].
        projection: [layers * P, H], whose result is multiplied by ``projection_scale`` before the norm of P numbers.
    """

    embedding: str
    embedding_scale: float
    projection: MatrixPlan
    projection_scale: float
    norm: NormPlan
    scale: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A causal language model, or a head. Scales are factors; a cap c of numbers x means c * tanh(x / c).

    Attributes:
        place_embedding: name of the embeddings of ``num_places`` positions, or None.
        head: the matrix that gives logits.
        joint: the input of a head; None for a model.
        sides: inputs of layers besides the stream, or None.
    """

    layers: tuple[LayerPlan, ...]
    embedding: str
    last_norm: NormPlan
    head: MatrixPlan
    ropes: tuple[RopePlan, ...] = ()
    place_embedding: str | None = None
    num_places: Number = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    joint: JointPlan | None = None
    sides: SidesPlan | None = None


Families = Mapping[str, tuple[Callable[[Any], Plan], str]]
"""By Transformers' model_type: the function that makes a plan of a configuration, and the fields that only it reads."""


def parts(value: Any) -> Iterator[Any]:
    """All plans within a plan, and the plan."""
    if is_dataclass(value):
        yield from parts(tuple(getattr(value, one.name) for one in fields(value)))
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from parts(one)


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
