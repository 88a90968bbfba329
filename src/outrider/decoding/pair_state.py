"""Acceptance and cost estimates of a pair, kept from one generation to the next."""

from __future__ import annotations

import threading

from outrider.decoding.acceptance_estimates import PairEstimates
from outrider.decoding.cost_cache import round_costs
from outrider.decoding.cost_model import LiveCosts
from outrider.decoding.measured_costs import load_sizes
from outrider.drafters.base import Drafter
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule


class PairState:
    """Acceptance and cost estimates of one pair, kept per rule. Thread-safe.

    Sampling options are not part of it, since each row has an estimate of its own (``RowEstimate``). The ranks of a job
    learn the same, since they commit the same tokens and share the times of the first rank.
    """

    def __init__(self, target: LM, drafter: Drafter) -> None:
        self._target, self._drafter = target, drafter
        self._lock = threading.Lock()
        self._by_rule: dict[str, PairEstimates] = {}

    def is_of(self, target: LM, drafter: Drafter) -> bool:
        """Whether these are its models, with their executions."""
        return target is self._target and drafter is self._drafter

    def estimates(self, rule: Rule, num_slots: int, num_tokens: int) -> PairEstimates:
        """The estimates under this rule. Missing costs for up to ``num_slots`` rows are measured first, or read from
        disk (``round_costs``).

        Args:
            num_tokens: final length of the longest row.
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
