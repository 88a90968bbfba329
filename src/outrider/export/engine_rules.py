"""Acceptance rules of engines, and the tau that a recording predicts for each.

All are lossless, and equal at temperature 0. At higher temperatures they differ in how many tokens are accepted:

- *ratio*: drafts are sampled from q and accepted with probability min(1, p/q): sum min(p, q) on average;
- *greedy*: drafts are the draft's argmax, q is one-hot: p at the argmax of q.

Engines that sample drafts do so under options of their own, which change q and thereby tau. The rules were read in
the engines' sources (engines.py cites them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outrider.drafters.base import Drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.options import Sampling
from outrider.replay.log import Header, Record
from outrider.replay.plan import Costs, choices
from outrider.replay.replay import ExpectedRounds, replay, summarise
from outrider.runtime.lm import LM

KS = tuple(range(1, 9))
"""The K that are compared."""


@dataclass(frozen=True, slots=True)
class EngineRule:
    """How an engine drafts and accepts.

    Attributes:
        name: "ratio" or "greedy".
        about: description for the README.
        acceptance: one of ``outrider.replay.replay.PREDICTED_RULES``.
        is_greedy: the draft takes its argmax.
        draft_sampling: maps a request's options to those of the draft.
    """

    name: str
    about: str
    acceptance: str = "rejection"
    is_greedy: bool = False
    draft_sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling

    def expected(
        self,
        records: Iterable[Record],
        header: Header,
        drafter: Drafter,
        ks: Sequence[int],
        target: LM | None = None,
    ) -> dict[int, ExpectedRounds]:
        """Expected rounds of each K on recorded sequences.

        Args:
            drafter: a draft model, or a head.
            target: of the recording; needed for a head, whose drafts are forced along it.

        Raises:
            OptionError: the recording lacks the probabilities needed.
        """
        sampling = self.draft_sampling(header.sampling)
        if drafter.lm is not None:
            drafter = ModelDrafter(drafter.lm, DraftOptions(is_greedy=self.is_greedy))
        elif self.is_greedy:
            sampling = replace(sampling, temperature=0.0)
        replayed = replay(records, header, drafter, self.acceptance, ks, target=target, draft_sampling=sampling)
        return dict(summarise(replayed, ks).expected)


RATIO = EngineRule(
    "ratio",
    "sum min(p, q): drafts are sampled under the request's options and accepted with probability min(1, p/q)",
)
RATIO_BY_TEMPERATURE = EngineRule(
    "ratio",
    "sum min(p, q): drafts are sampled at the request's temperature, without its filters, and accepted with "
    "probability min(1, p/q)",
    draft_sampling=lambda sampling: Sampling(temperature=sampling.temperature),
)
RATIO_OF_TEN = EngineRule(
    "ratio",
    "sum min(p, q): drafts are sampled from the draft's ten likeliest tokens at the request's temperature and accepted "
    "with probability min(1, p/q)",
    draft_sampling=lambda sampling: Sampling(temperature=sampling.temperature, top_k=10),
)
GREEDY = EngineRule("greedy", "p at the draft's argmax: drafts are greedy", is_greedy=True)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Predicted performance of a pair under an acceptance rule.

    Attributes:
        tau: by K.
        speed_up: over plain decoding, by K; empty if the costs of rounds are not known.
        k_by_rows: (rows, K), ascending: the best K for each batch size, 0 for none; empty if not measured.
    """

    tau: Mapping[int, ExpectedRounds]
    speed_up: Mapping[int, float]
    k_by_rows: Sequence[tuple[int, int]] = ()

    @property
    def best_k(self) -> int | None:
        """Fastest K, the smallest among equals; None without costs."""
        return max(self.speed_up, key=lambda k: (self.speed_up[k], -k), default=None)

    def merit(self, k: int | None) -> float:
        """Speed-up (tau without costs) at this K, or at the best one, for comparing rules."""
        k = k or self.best_k or max(self.tau)
        if k in self.speed_up:
            return self.speed_up[k]
        tau = self.tau[k].tau if k in self.tau else None
        return 0.0 if tau is None else tau.value


def by_draft_cost(
    expected: Mapping[int, ExpectedRounds], draft_cost: float | None, *, is_at_once: bool = False
) -> Outlook:
    """Predict with c = ``draft_cost`` and v = 1, as in memory-bound decoding: tau / (K c + 1). None: tau only.

    Args:
        is_at_once: a step drafts all tokens of a round: tau / (c + 1).
    """
    taus = {k: one.tau for k, one in expected.items() if one.tau is not None}
    speed_up = (
        {}
        if draft_cost is None
        else {k: tau.value / ((1 if is_at_once else k) * draft_cost + 1) for k, tau in taus.items()}
    )
    return Outlook(expected, speed_up)


def by_measured_costs(expected: Mapping[int, ExpectedRounds], costs: Sequence[Costs]) -> Outlook:
    """Predict from timed rounds of one draft at several batch sizes, ascending."""
    found = []
    for one in costs:
        (name,) = one.drafts
        found.append(choices(one, {(name, k): result.prompts for k, result in expected.items()}))
    k_by_rows = [
        (one.setting.num_rows, best[0].k if best[0].speed_up.value > 1 else 0)
        for one, best in zip(costs, found, strict=True)
    ]
    return Outlook(expected, {one.k: one.speed_up.value for one in found[0]}, k_by_rows)
