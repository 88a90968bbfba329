"""The laws by which engines accept drafted tokens, and what a recording says of each.

All are lossless, and at temperature 0 they are the same. At higher temperatures they differ in how many tokens stand:

- *ratio*: drafts are sampled from q and stand with min(1, p/q): sum min(p, q) on average;
- *greedy*: drafts are the draft's likeliest tokens, q is one-hot: p at the argmax of q;
- *match*: drafts are sampled, and stand if the target, sampling for itself, draws the same: sum p q.

Engines that sample drafts do so under options of their own, which change q and thereby tau. Which engine does what was
read in its source (engines.py cites it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.drafters.model import ModelDrafter
from outrider.options import Sampling
from outrider.replay.log_format import Header, Record
from outrider.replay.plan import Costs, choices
from outrider.replay.replay import MATCH, ExpectedRounds, replay, summarise
from outrider.runtime.lm import LM

KS = tuple(range(1, 9))
"""The K that are compared."""


@dataclass(frozen=True, slots=True)
class Law:
    """How drafts are made and accepted.

    Attributes:
        name: "ratio", "greedy" or "match".
        about: in words, for a README.
        acceptance: of ``outrider.replay.replay.LAWS``.
        is_greedy: the draft takes its likeliest token.
        draft_sampling: from the options of a request to those under which the draft is sampled.
    """

    name: str
    about: str
    acceptance: str = "rejection"
    is_greedy: bool = False
    draft_sampling: Callable[[Sampling], Sampling] = lambda sampling: sampling

    def expected(
        self, records: Iterable[Record], header: Header, draft: LM, ks: Sequence[int]
    ) -> dict[int, ExpectedRounds]:
        """tau of each K on recorded texts.

        Raises:
            OptionError: the recording lacks the probabilities needed.
        """
        drafter = ModelDrafter(draft, self.is_greedy)
        sampling = self.draft_sampling(header.sampling)
        replayed = replay(records, header, drafter, self.acceptance, ks, draft_sampling=sampling)
        return dict(summarise(replayed, ks).expected)


RATIO = Law("ratio", "sum min(p, q): drafts are sampled under the request's options and stand with min(1, p/q)")
RATIO_BY_TEMPERATURE = Law(
    "ratio",
    "sum min(p, q): drafts are sampled at the request's temperature, without its filters, and stand with min(1, p/q)",
    draft_sampling=lambda sampling: Sampling(temperature=sampling.temperature),
)
RATIO_OF_TEN = Law(
    "ratio",
    "sum min(p, q): drafts are sampled from the draft's ten likeliest tokens at the request's temperature and stand "
    "with min(1, p/q)",
    draft_sampling=lambda sampling: Sampling(temperature=sampling.temperature, top_k=10),
)
GREEDY = Law("greedy", "p at the draft's argmax: drafts are the draft's likeliest tokens", is_greedy=True)
EQUALITY = Law("match", "sum p q: a sampled draft stands if the target, sampling for itself, draws the same", MATCH)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a law promises for a pair.

    Attributes:
        tau: by K.
        speed_up: over plain decoding, by K; empty where the costs of rounds are not known.
        k_by_rows: (rows, K), ascending: the best K for so many texts at once, 0 for none; empty where not measured.
    """

    tau: Mapping[int, ExpectedRounds]
    speed_up: Mapping[int, float]
    k_by_rows: Sequence[tuple[int, int]] = ()

    @property
    def best_k(self) -> int | None:
        """The fastest, with the least K among equals; None where nothing is known of costs."""
        return max(self.speed_up, key=lambda k: (self.speed_up[k], -k), default=None)

    def merit(self, k: int | None) -> float:
        """By which laws are compared: at this K, or at the best one."""
        k = k or self.best_k or max(self.tau)
        if k in self.speed_up:
            return self.speed_up[k]
        tau = self.tau[k].tau if k in self.tau else None
        return 0.0 if tau is None else tau.value


def by_draft_cost(expected: Mapping[int, ExpectedRounds], draft_cost: float | None) -> Outlook:
    """The outlook if a draft step takes ``draft_cost`` of the time of a target step, and a verify as much as a step, as
    it is where reading the weights takes the time: tau / (K c + 1). None leaves the speed-up open."""
    taus = {k: one.tau for k, one in expected.items() if one.tau is not None}
    speed_up = {} if draft_cost is None else {k: tau.value / (k * draft_cost + 1) for k, tau in taus.items()}
    return Outlook(expected, speed_up)


def by_measured_costs(expected: Mapping[int, ExpectedRounds], costs: Sequence[Costs]) -> Outlook:
    """The outlook from timed rounds of one draft at several numbers of rows, the least of them first."""
    found = []
    for one in costs:
        (name,) = one.drafts
        found.append(choices(one, {(name, k): result.prompts for k, result in expected.items()}))
    k_by_rows = [
        (one.setting.num_rows, best[0].k if best[0].speed_up.value > 1 else 0)
        for one, best in zip(costs, found, strict=True)
    ]
    return Outlook(expected, {one.k: one.speed_up.value for one in found[0]}, k_by_rows)
