"""Plans: what the layers of a model compute, as data.

A plan names the parameters that each step uses. So it is checked against a model by its names alone, and weights may
come from anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

_Part = TypeVar("_Part", bound="Plan | LayerPlan | Mixer | MlpPlan | MatrixPlan | NormPlan | RopePlan | JointPlan")

MOST_TOKENS = 128
"""Tokens of a sequence that may see each other (token_block.h)."""

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2"]


class NotPlanned(Exception):
    """A model has no plan; the message says why."""


@dataclass(frozen=True, slots=True)
class NormPlan:
    """Normalization of rows.

    Attributes:
        kind: "rms" (Zhang and Sennrich 2019), or "layer" (Ba et al. 2016).
        weight: name of its factors.
        added: to these factors.
        bias: name, or None.
    """

    kind: Literal["rms", "layer"]
    weight: str
    epsilon: float
    added: float = 0.0
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """Product with a matrix.

    Attributes:
        weight: name of a matrix [O, I].
        bias: name, or None.
        part: this one of ``num_parts`` equal parts of its rows.
        is_transposed: it is stored as [I, O].
    """

    weight: str
    bias: str | None = None
    part: int = 0
    num_parts: int = 1
    is_transposed: bool = False


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
        scale: the factor of scores.
        cap: of scores, or None.
        rope: number of its RopePlan; None for none.
        window: tokens that a token sees, itself included; None for all.
        before_anchor: tokens that a token sees before the first one of its forward; None for all.
        sees_block: a token sees the later tokens of its forward, too.
        norms_whole_rows: ``query_norm`` and ``key_norm`` are those of all heads together.
        is_gated: the query of each head is followed by numbers whose logistic function multiplies the head's output.
    """

    num_heads: int
    num_groups: int
    head_width: int
    scale: float
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    query_norm: NormPlan | None = None
    key_norm: NormPlan | None = None
    cap: float | None = None
    rope: int | None = 0
    window: int | None = None
    before_anchor: int | None = None
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
        out_norm: of each head's output, before its gate; of Mamba-2, of each group's, after its gate.
        taps_bias: parameter, or None.
        skips: parameter: factors of the values that are added to the output; or None.
        least_step: the least softplus(step + bias).
    """

    kind: Literal["convolution", "delta", "mamba2"]
    conv_width: int
    num_taps: int
    taps: str
    inputs: tuple[MatrixPlan, ...]
    out: MatrixPlan
    num_heads: int = 0
    num_groups: int = 0
    key_width: int = 0
    value_width: int = 0
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
    """

    ups: tuple[MatrixPlan, ...]
    down: MatrixPlan
    activation: Activation


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decoder layer: a mixer of tokens, then an MLP, each added to the stream; one of them may lack.

    Attributes:
        mixer_norm: of the input of the mixer; None for none, as all norms.
        mixer_post_norm: of its output.
    """

    mixer: Mixer | None
    mlp: MlpPlan | None
    mixer_norm: NormPlan | None = None
    mixer_post_norm: NormPlan | None = None
    mlp_norm: NormPlan | None = None
    mlp_post_norm: NormPlan | None = None


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
class Plan:
    """A causal language model, or a head. Scales are factors; a cap c of numbers x means c * tanh(x / c).

    Attributes:
        place_embedding: name of the embeddings of ``num_places`` positions, or None.
        head: the matrix that gives logits.
        joint: the input of a head; None for a model.
    """

    layers: tuple[LayerPlan, ...]
    embedding: str
    last_norm: NormPlan
    head: MatrixPlan
    ropes: tuple[RopePlan, ...] = ()
    place_embedding: str | None = None
    num_places: int = 0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    joint: JointPlan | None = None


Families = Mapping[str, tuple[Callable[[Any], Plan], str]]
"""By Transformers' model_type: the function that makes a plan of a configuration, and the fields that only it reads."""

_PARTS = (LayerPlan, AttentionPlan, RecurrencePlan, MlpPlan, MatrixPlan, NormPlan, RopePlan, JointPlan)


def rename(plan: _Part, old: str, new: str) -> _Part:
    """Plan, or part of one, whose parameters have another beginning of their names."""

    def change(value: Any) -> Any:
        if isinstance(value, str):
            return new + value.removeprefix(old) if value.startswith(old) else value
        if isinstance(value, tuple):
            return tuple(map(change, value))
        return rename(value, old, new) if isinstance(value, _PARTS) else value

    return replace(plan, **{one.name: change(getattr(plan, one.name)) for one in fields(plan)})
