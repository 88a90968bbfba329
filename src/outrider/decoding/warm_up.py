"""Warm-up: a few rounds of every size that a use will need, so that every step has run once."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.decoding.measured_costs import CostArm, load_sizes, time_rounds, tokens_needed
from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule

_SHORTEST = 16


def warm_up(
    target: LM, drafter: Drafter, rule: Rule, sampling: Sampling, ks: Sequence[int], num_slots: int, num_tokens: int
) -> None:
    """Run a few rounds of every size.

    Args:
        ks: numbers of drafted tokens, 0 included, since a sequence may end with a round without drafts.
        num_slots: the most rows of a round.
        num_tokens: most tokens of a row, prompt included.
    """
    arms = [CostArm(target, drafter, k, max(ks)) for k in ks]
    most = min(num_tokens, target.context_len)
    for num_rows in load_sizes(num_slots):
        length = min(_SHORTEST, most // 2)
        while True:
            time_rounds(arms, rule, num_rows=num_rows, length=length, num_tokens=most, num_passes=1, sampling=sampling)
            # The shortest sequence that needs the next size of view.
            length = target.execution.round_length(length) + 1
            if length + tokens_needed(max(ks)) > most:
                break
