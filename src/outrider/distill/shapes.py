"""Measured cost of draft shapes, before training.

The latency of a draft does not depend on the values of its weights, so random weights suffice. Yan et al. 2402.01528
find that depth matters far more than width, since layers run one after the other and each is too small to fill the
machine; this module measures whether that holds here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from outrider.compile.compiled_lm import compiled_lm
from outrider.decoding.measured_costs import CostArm, time_rounds
from outrider.distill.student import Shape, new_draft
from outrider.drafters.base import NoDrafter
from outrider.drafters.model import ModelDrafter
from outrider.models.loading import Checkpoint, build_lm
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.stats.speedup import expected_tokens

_NUM_PASSES = 4
_AT_ONCE = 6  # drafts in memory


@dataclass(frozen=True, slots=True)
class ShapeCost:
    """A shape and its cost on this machine.

    Attributes:
        draft_s: seconds per drafted token.
        break_even: smallest alpha at which its best K is as fast as plain decoding; None if no alpha suffices.
    """

    shape: Shape
    num_params: int
    draft_s: float
    break_even: float | None


def default_shapes(target: LM) -> list[Shape]:
    """Shapes of 1, 2, 4 ... layers up to half of the target's, at 1/4, 1/2, 3/4 and all of its width."""
    whole: Any = target.model.config
    config = whole.get_text_config(decoder=True)
    most, unit = max(1, config.num_hidden_layers // 2), config.hidden_size // config.num_attention_heads
    layers = [2**i for i in range(most.bit_length()) if 2**i <= most]
    widths = sorted({max(1, round(config.hidden_size * part / 4 / unit)) * unit for part in (1, 2, 3, 4)})
    return [Shape(*pair) for pair in product(layers, widths)]


def num_passes(num_shapes: int) -> int:
    """Number of calls of ``on_pass`` by ``measure_shapes``."""
    return -(-num_shapes // _AT_ONCE) * (_NUM_PASSES + 1)


def measure_shapes(
    target: LM,
    shapes: Sequence[Shape],
    *,
    num_rows: int = 1,
    length: int = 64,
    k: int = DEFAULT_NUM_DRAFT_TOKENS,
    on_pass: Callable[[], None] = lambda: None,
) -> list[ShapeCost]:
    """Time drafts of these shapes with random weights in rounds with the target, interleaved, in groups to bound the
    memory; compiled if the target is.

    Args:
        k: tokens drafted in a timed round.
        on_pass: called regularly, for a progress bar.
    """
    ks = [other for other in target.execution.favoured_k if other > 0]
    plain_s, others_s = 0.0, dict.fromkeys(ks, 0.0)
    found = []
    for begin in range(0, len(shapes), _AT_ONCE):
        part = shapes[begin : begin + _AT_ONCE]
        drafts = [_random_draft(target, shape) for shape in part]
        arms = [CostArm(target, ModelDrafter(draft), k) for draft in drafts]
        if begin == 0:
            # The rest of a round depends on the target only: time it with one draft.
            arms += [CostArm(target, ModelDrafter(drafts[0]), other) for other in ks]
            arms.append(CostArm(target, NoDrafter(), 0))
        timed = time_rounds(arms, REJECTION, num_rows=num_rows, length=length, num_passes=_NUM_PASSES, on_pass=on_pass)
        if begin == 0:
            plain_s = statistics.median(one.decode_s for one in timed.pop())
            for other, timings in zip(ks, timed[len(part) :], strict=True):
                others_s[other] = statistics.median(one.decode_s - one.draft_s for one in timings)
        for shape, draft, timings in zip(part, drafts, timed, strict=False):
            draft_s = statistics.median(one.draft_s for one in timings) / k
            num_params = sum(parameter.numel() for parameter in draft.model.parameters())
            found.append(ShapeCost(shape, num_params, draft_s, break_even(draft_s, others_s, plain_s)))
    return found


def _random_draft(target: LM, shape: Shape) -> LM:
    model = new_draft(target.model.config, shape, seed=0).to(target.device, target.dtype)
    lm = build_lm(Checkpoint(f"{shape.num_layers} x {shape.hidden_size}", model, None), target.vocab_size)
    return compiled_lm(lm) if target.execution.is_prepared else lm


def break_even(draft_s: float, others_s: Mapping[int, float], plain_s: float) -> float | None:
    """Smallest alpha at which speculation with the best K is as fast as plain decoding; None if none suffices.

    Args:
        draft_s: seconds per drafted token.
        others_s: K -> seconds of the rest of a round, mainly the verify.
        plain_s: seconds of a plain round.
    """

    def gain(alpha: float) -> float:
        tau = expected_tokens([alpha] * max(others_s))
        return max(tau[k] * plain_s / (k * draft_s + rest_s) for k, rest_s in others_s.items())

    if gain(1.0) < 1.0:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):  # the gain rises with alpha
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle) >= 1.0 else (middle, high)
    return high


def worth_training(costs: Sequence[ShapeCost], budget_s: float = math.inf) -> list[ShapeCost]:
    """Pareto front within the budget: skip a shape if an equal or larger one is faster."""
    within = [one for one in costs if one.draft_s <= budget_s]
    return [
        one
        for one in within
        if not any(
            other.num_params >= one.num_params and other.draft_s < one.draft_s for other in within if other is not one
        )
    ]
