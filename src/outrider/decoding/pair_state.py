"""What was learned of a pair, kept from one generation to the next."""

from __future__ import annotations

import threading

from outrider.decoding.acceptance_estimates import PairEstimates
from outrider.decoding.cost_cache import round_costs
from outrider.decoding.cost_model import LiveCosts
from outrider.decoding.measured_costs import load_sizes
from outrider.drafters.base import Drafter
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


class Experience:
    """Of a target with a drafter: what adaptive schedules have learned, by the rule that judges the drafts. It may be
    used by several threads at once.

    Sampling options are no part of it: a row whose options let fewer drafts stand than usual shows that itself. The
    processes of one job learn the same, since they commit the same tokens and share the times of the first.
    """

    def __init__(self, target: LM, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter
        self._lock = threading.Lock()
        self._by_rule: dict[str, PairEstimates] = {}

    def is_of(self, target: LM, drafter: Drafter) -> bool:
        """Whether these are the very models, with their executions."""
        return target is self._target and drafter is self._drafter

    def under(self, rule: Rule, num_slots: int, num_tokens: int) -> PairEstimates:
        """What was learned under this rule. Costs at loads of up to ``num_slots`` rows that are not known yet are
        measured first, or taken from disk (``round_costs``).

        Args:
            num_tokens: of the longest row in the end.
        """
        with self._lock:
            learned = self._by_rule.get(rule.name)
            known = () if learned is None else learned.costs.measured
            new = {
                size: round_costs(self._target, self._drafter, rule, size, num_tokens)
                for size in load_sizes(num_slots)
                if size not in known
            }
            if learned is None:
                learned = self._by_rule[rule.name] = PairEstimates(LiveCosts(new))
            else:
                with learned.lock:
                    learned.costs.add(new)
            return learned
