"""Costs of drafts of several shapes, before training: which sizes could pay on this machine?

    python benchmarks/shapes.py [TARGET] [--shape 2x192 ...] [--budget-ms 1.5] [--batch-size 1] [--context 64]

The latency of a draft does not depend on the values of its weights, so random weights suffice. Yan et al. 2402.01528
find that depth matters far more than width, since layers run one after the other and each is too small to fill the
machine; this script measures whether that holds here.

For each shape: milliseconds for a drafted token, and the alpha at which the shape would just be as fast as plain
decoding (-: impossible). A shape is worth training if it is within the budget, and no shape of the same size or larger
is faster. Rounds are those of the real loop, arms in turn. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from rich.console import Console

from outrider.api import load
from outrider.decoding.schedule import expected_tokens
from outrider.distill.student import Shape, new_draft
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.model import model_drafter
from outrider.measure.round_costs import CostArm, time_rounds, tokens_needed
from outrider.measure.tables import new_table
from outrider.models.loading import Checkpoint, build_lm
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from outrider.system.provenance import provenance

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
    return [*product(layers, widths)]


def measure_shapes(
    target: LM,
    shapes: Sequence[Shape],
    *,
    num_rows: int = 1,
    length: int = 64,
    k: int = DEFAULT_NUM_DRAFT_TOKENS,
) -> list[ShapeCost]:
    """Time drafts of these shapes with random weights in rounds with the target, interleaved, in groups to bound the
    memory; captured if the target is.

    Args:
        k: tokens drafted in a timed round.
    """
    ks = [other for other in target.execution.favoured_k if other > 0]
    plain_s, others_s = 0.0, dict.fromkeys(ks, 0.0)
    found = []
    for begin in range(0, len(shapes), _AT_ONCE):
        part = shapes[begin : begin + _AT_ONCE]
        drafts = [_random_draft(target, shape) for shape in part]
        arms = [CostArm(target, model_drafter(draft), k) for draft in drafts]
        if begin == 0:
            # The rest of a round depends on the target only: time it with one draft.
            arms += [CostArm(target, model_drafter(drafts[0]), other) for other in ks]
            arms.append(CostArm(target, NO_DRAFTER, 0))
        timed = time_rounds(arms, REJECTION, num_rows=num_rows, length=length, num_passes=_NUM_PASSES)
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
    execution = "captured" if target.execution.is_prepared else "eager"
    name = " x ".join(map(str, shape))
    return build_lm(Checkpoint(name, model, None, execution=execution), target.vocab_size)


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


def parse_shape(text: str) -> Shape:
    """Shape of "2x192": layers and width."""
    num_layers, hidden_size = map(int, text.lower().split("x"))
    return num_layers, hidden_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="fable")
    parser.add_argument("--shape", action="append", type=parse_shape, help="LAYERSxWIDTH")
    parser.add_argument("--budget-ms", type=float, default=math.inf, help="maximum milliseconds per drafted token")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence when rounds are timed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    target = load(arguments.target, device=arguments.device, dtype=arguments.dtype).target
    if arguments.context + tokens_needed(max(target.execution.favoured_k)) > target.context_len:
        parser.error(f"--context {arguments.context}: {target.name} accepts {target.context_len} tokens")
    shapes = arguments.shape or default_shapes(target)
    costs = measure_shapes(target, shapes, num_rows=arguments.batch_size, length=arguments.context)
    best = worth_training(costs, arguments.budget_ms / 1e3)
    columns = "layers x width", "parameters", "ms/token", "alpha needed", "worth it"
    table = new_table(f"Drafts for {target.name}", *columns)
    for cost in costs:
        needed = "-" if cost.break_even is None else f"{cost.break_even:.2f}"
        numbers = f"{cost.num_params / 1e6:.2f} M", f"{1e3 * cost.draft_s:.3f}", needed
        name = " x ".join(map(str, cost.shape))
        table.add_row(name, *numbers, "yes" if cost in best else "")
    Console(width=100).print(table)
    rows = [asdict(cost) | {"is_worth_training": cost in best} for cost in costs]
    print(json.dumps({"shapes": rows, "provenance": provenance(str(target.device))}))


if __name__ == "__main__":
    main()
