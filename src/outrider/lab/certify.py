"""Certify: does this pair, with these options, on this machine, say what the target alone would say?

Four findings, each reported apart:

- *exact*: the acceptance rule on the pair's real probabilities, without randomness (outrider.lab.exact);
- *statistical*: texts of the real loop against the target's own conditional laws (outrider.lab.evidence);
- *controls*: known mistakes, made on purpose in the real loop, are found out by the same tests with no more tokens; if
  one is not, the tests are too weak here to certify anything (outrider.lab.wrong);
- *greedy*: at temperature 0 the text is that of plain decoding (outrider.lab.divergence).

How many tokens are looked at is settled before the first of them is drawn, by a pilot run whose texts are not tested;
so are the stakes. The tested sample is the first n tokens of texts 0, 1, 2 ... put in a row, wherever that ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from outrider.api import Decoder
from outrider.decode import decode
from outrider.drafters.model import ModelDrafter
from outrider.errors import OptionError, PromptError
from outrider.flow import Request, Sampling
from outrider.lab.certificate import Certificate, ControlReport, GreedyReport, StatisticalReport
from outrider.lab.divergence import Divergence, explain
from outrider.lab.evidence import (
    Accounts,
    Bet,
    Finding,
    Increments,
    Integers,
    detectable,
    holm,
    p_value,
    pit_tests,
    tokens_needed,
)
from outrider.lab.exact import check_exactly
from outrider.lab.observed import Observed, Written, joined, observe
from outrider.lab.wrong import CONTROLS, Control
from outrider.stop import RowText
from outrider.verify import GUMBEL, RULES

NUM_TESTS = 8
NUM_PILOT_TOKENS = 1024
LEAST_NUM_TOKENS = 200
_PILOT_TEXTS = 2**32  # the pilot's texts are counted from here, so that no seed is used twice
_NUM_CONTEXTS = 8  # of the exact layer
_MAX_PROMPT_ACCOUNTS = 16
_NUM_POSITIONS = 12  # 0, 1-2, 3-6, 7-14 ... share an account
_LOOKS = (1 / 8, 1 / 4, 1 / 2, 1)  # at a control's tokens; each has its share of the level
_SPARE = 1.2  # tokens wanted over tokens needed: the pilot's estimate is one
_BUDGET_SHARE = 0.25  # of the time for the tested tokens; the rest is for controls and the other layers


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be certified.

    Attributes:
        decoder: with its draft, rule and K.
        sampling: without a seed.
        prompts: token ids of each.
        level: probability of a false alarm of the statistical layer.
        seed: text i is written with seed + i.
    """

    decoder: Decoder
    sampling: Sampling
    prompts: Sequence[Sequence[int]]
    level: float
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.prompts and self.batch_size >= 1 and isinstance(self.decoder.num_draft_tokens, int)
        if not 0 < self.level < 1:
            raise OptionError("--alpha-level", self.level, "a number between 0 and 1")
        most = self.context_len - 3  # the exact layer looks two tokens ahead
        for index, ids in enumerate(self.prompts):
            if len(ids) >= most:
                raise PromptError(f"prompt {index} has {len(ids)} tokens, but here a prompt has less than {most}")

    @property
    def context_len(self) -> int:
        """What both models can take."""
        drafter = self.decoder.drafter
        own = self.decoder.target.context_len
        return min(own, drafter.lm.context_len) if isinstance(drafter, ModelDrafter) else own

    @property
    def num_draft_tokens(self) -> int:
        k = self.decoder.num_draft_tokens
        assert isinstance(k, int)
        return k

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    def prompt_of(self, text: int) -> int:
        return text % len(self.prompts)

    def request(self, text: int) -> Request:
        """The request of a text, ended by what ends texts of the decoder."""
        ids = self.prompts[self.prompt_of(text)]
        most = min(self.sampling.max_new_tokens, self.context_len - len(ids))
        sampling = replace(self.sampling, seed=self.seed + text, max_new_tokens=most)
        stop = RowText(None, () if sampling.ignore_eos else self.decoder.eos_ids, ())
        return Request(ids, sampling, stop)


def write(job: Job, texts: Sequence[int], control: Control | None = None) -> list[Written]:
    """Texts of the real loop, in one batch.

    Args:
        control: a mistake to make.
    """
    decoder = job.decoder
    requests = [job.request(text) for text in texts]
    rounds: list[list[tuple[int, ...]]] = [[] for _ in texts]
    if control is None:
        names = [one.name for one in fields(Sampling)]
        columns: dict[str, Any] = {name: [getattr(request.sampling, name) for request in requests] for name in names}
        for chunk in decoder.stream_many([list(request.prompt_ids) for request in requests], **columns):
            rounds[chunk.row].append(chunk.token_ids)
    else:
        target, drafter = control.wrap_target(decoder.target), control.wrap_drafter(decoder.drafter)
        for round_ in decode(target, drafter, requests, control.rule, num_draft_tokens=job.num_draft_tokens):
            for row in round_.rows:
                rounds[row.row].append(row.token_ids)
    return [
        Written(
            index=text,
            prompt=job.prompt_of(text),
            prompt_ids=tuple(request.prompt_ids),
            token_ids=tuple(token for ids in row for token in ids),
            places=tuple(place for ids in row for place in range(len(ids))),
        )
        for text, request, row in zip(texts, requests, rounds, strict=True)
    ]


class Sample:
    """Tokens of one way to write, in the order of the texts, as many as are asked for."""

    def __init__(self, job: Job, control: Control | None = None, first_text: int = 0) -> None:
        self._job, self._control, self._next_text = job, control, first_text
        self._parts: list[Observed] = []
        self.written: list[Written] = []

    def first(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> Observed:
        """The first tokens, written where they are not there yet."""
        job = self._job
        num_there = sum(map(len, self._parts))
        while num_there < num_tokens:
            texts = range(self._next_text, self._next_text + job.batch_size)
            self._next_text += job.batch_size
            batch = write(job, texts, self._control)
            decoder = job.decoder
            part = observe(
                decoder.target, decoder.drafter, job.sampling, batch, seed=job.seed, batch_size=job.batch_size
            )
            self.written += batch
            self._parts.append(part)
            on_tokens(min(len(part), num_tokens - num_there))
            num_there += len(part)
        return joined(self._parts).first(num_tokens)


@dataclass(frozen=True, slots=True)
class Design:
    """What was settled before the tested tokens were drawn.

    Attributes:
        num_tokens: n.
        level: of each single test, the least that Holm's procedure may hold it against.
    """

    num_tokens: int
    level: float
    score: Bet
    surprise: Bet
    places: Accounts
    positions: Accounts
    prompts: Accounts
    surprise_places: Accounts

    @classmethod
    def of(cls, job: Job, pilot: Observed, num_tokens: int) -> Design:
        level = job.level / NUM_TESTS

        def accounts(shares: dict[int, float], like: Increments = pilot.score) -> Accounts:
            each = level / len(shares)  # the others' money counts for little
            return Accounts({kind: Bet.for_sample(like, num_tokens * share, each) for kind, share in shares.items()})

        def seen(kinds: Integers) -> dict[int, float]:
            values, counts = np.unique(kinds, return_counts=True)
            return dict(zip(values.tolist(), (counts / len(kinds)).tolist(), strict=True))

        num_groups = min(len(job.prompts), _MAX_PROMPT_ACCOUNTS)
        return cls(
            num_tokens=num_tokens,
            level=level,
            score=Bet.for_sample(pilot.score, num_tokens, level),
            surprise=Bet.for_sample(pilot.surprise, num_tokens, level),
            places=accounts(seen(pilot.places)),
            positions=accounts(seen(_position_kinds(pilot))),
            prompts=accounts(dict.fromkeys(range(num_groups), 1 / num_groups)),
            surprise_places=accounts(seen(pilot.places), pilot.surprise),
        )

    def tests(self, observed: Observed, level: float) -> list[Finding]:
        """All tests of the tokens, with thresholds under which any of them is an alarm with probability ``level``."""
        score, surprise = observed.score, observed.surprise
        split = [
            ("score-by-place", self.places.log_wealth(score, observed.places)),
            ("score-by-position", self.positions.log_wealth(score, _position_kinds(observed))),
            ("score-by-prompt", self.prompts.log_wealth(score, observed.prompts % _MAX_PROMPT_ACCOUNTS)),
            ("likelihood-by-place", self.surprise_places.log_wealth(surprise, observed.places)),
        ]
        found = [
            Finding("score", score.z, p_value(self.score.log_wealth(score))),
            Finding("likelihood", surprise.z, p_value(self.surprise.log_wealth(surprise))),
            *pit_tests(observed.pits),
            *(Finding(name, wealth, p_value(wealth)) for name, wealth in split),
        ]
        assert len(found) == NUM_TESTS
        return holm(found, level)


def _position_kinds(observed: Observed) -> Integers:
    kinds: Integers = np.minimum(np.log2(observed.positions + 1).astype(np.int64), _NUM_POSITIONS)
    return kinds


@dataclass(frozen=True, slots=True)
class Pilot:
    """A look at tokens that will not be tested.

    Attributes:
        observed: None at temperature 0.
        seconds: for each of them, to write and to judge it.
    """

    written: Sequence[Written]
    observed: Observed | None
    seconds: float

    def num_tokens_for(self, budget_s: float) -> int:
        """How many tokens to test if all is to take about so long."""
        return max(LEAST_NUM_TOKENS, int(_BUDGET_SHARE * budget_s / self.seconds))

    def num_tokens_to_detect(self, distance: float, level: float) -> int:
        """How many tokens to test so that so large a total variation is found out.

        Raises:
            OptionError: the draft is not that far from the target.
        """
        assert self.observed is not None
        drift = self.observed.drift
        needed = tokens_needed(self.observed.score, drift, distance, level / NUM_TESTS)
        if needed is None:
            farthest = float(drift.distances.mean())
            raise OptionError(
                "--detect-tv",
                distance,
                f"the draft itself is no farther from the target than {farthest:.3f}: ask for less",
            )
        return max(LEAST_NUM_TOKENS, math.ceil(_SPARE * needed))


def fly(job: Job) -> Pilot:
    """The pilot run."""
    write(job, range(_PILOT_TEXTS, _PILOT_TEXTS + 1))  # for warming up
    began = time.perf_counter()
    first = _PILOT_TEXTS + 1
    if job.is_greedy:
        written = write(job, range(first, first + job.batch_size))
        return Pilot(written, None, (time.perf_counter() - began) / sum(len(one.token_ids) for one in written))
    sample = Sample(job, first_text=first)
    observed = sample.first(NUM_PILOT_TOKENS)
    return Pilot(sample.written, observed, (time.perf_counter() - began) / NUM_PILOT_TOKENS)


def certify(
    job: Job,
    pilot: Pilot,
    num_tokens: int,
    *,
    wanted: float | None = None,
    on_tokens: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Certificate:
    """All layers.

    Args:
        num_tokens: to be tested.
        wanted: the total variation that must be detectable.
        on_tokens: told what is being done, how many tokens of it were just written, and of how many.
    """
    decoder = job.decoder
    contexts = list(_contexts(job, pilot.written))
    exact = check_exactly(decoder.target, decoder.drafter, job.sampling, RULES[decoder.acceptance], contexts)
    greedy = [check_greedily(job, sampling) for sampling in _deterministic(job)]
    if pilot.observed is None:
        controls = [_greedy_control(job, control) for control in CONTROLS]
        return Certificate(exact, None, controls, greedy)
    design = Design.of(job, pilot.observed, num_tokens)

    def telling(what: str) -> Callable[[int], None]:
        return lambda done: on_tokens(what, done, num_tokens)

    sample = Sample(job)
    observed = sample.first(num_tokens, telling("sample"))
    statistical = _statistical(design, job, observed, len(sample.written), wanted)
    controls = [_control(job, design, control, telling(control.name)) for control in CONTROLS]
    return Certificate(exact, statistical, controls, greedy)


def _contexts(job: Job, written: Sequence[Written]) -> Iterator[tuple[int, ...]]:
    """Prefixes of texts, here and there."""
    for i in range(_NUM_CONTEXTS):
        one = written[i % len(written)]
        text = (*one.prompt_ids, *one.token_ids)[: job.context_len - 3]
        yield text[: max(len(one.prompt_ids), len(text) * (i + 1) // _NUM_CONTEXTS)]


def _deterministic(job: Job) -> list[Sampling]:
    """Options under which the text is that of plain decoding."""
    found = [replace(job.sampling, temperature=0.0)]
    if job.decoder.acceptance == GUMBEL.name and not job.is_greedy:
        found.append(job.sampling)
    return found


def check_greedily(job: Job, sampling: Sampling, control: Control | None = None) -> GreedyReport:
    """Texts of all prompts against plain decoding, each explained where they differ."""
    there = replace(job, sampling=sampling)
    plain = replace(there, decoder=job.decoder.plain())
    differences: list[Divergence] = []
    num_tokens = 0
    for begin in range(0, len(job.prompts), job.batch_size):
        texts = range(begin, min(begin + job.batch_size, len(job.prompts)))
        for want, got in zip(write(plain, texts), write(there, texts, control), strict=True):
            num_tokens += len(want.token_ids)
            found = explain(
                job.decoder.target,
                want.prompt,
                want.prompt_ids,
                want.token_ids,
                got.token_ids,
                there.request(want.index).sampling,
                job.num_draft_tokens,
            )
            if found is not None:
                differences.append(found)
    return GreedyReport(len(job.prompts), num_tokens, differences, sampling.temperature > 0)


def _statistical(
    design: Design, job: Job, observed: Observed, num_texts: int, wanted: float | None
) -> StatisticalReport:
    place_kinds = sorted(set(observed.places.tolist()))
    parts = [observed.score[observed.places == place] for place in place_kinds]
    grid = np.linspace(0.0, 1.0, 101)
    shares = np.searchsorted(np.sort(observed.pits), grid, side="right") / len(observed)
    return StatisticalReport(
        num_tokens=len(observed),
        num_texts=num_texts,
        num_forbidden=int(observed.is_forbidden.sum()),
        num_at_edge=int(observed.is_at_edge.sum()),
        alpha=1 - float(observed.drift.distances.mean()),
        detectable=detectable(observed.score, observed.drift, design.score, design.level),
        wanted=wanted,
        tests=design.tests(observed, job.level),
        places=[(len(part.values), part.z) for part in parts],
        pit_histogram=np.histogram(observed.pits, bins=20, range=(0.0, 1.0))[0].tolist(),
        pit_excess=(shares - grid).tolist(),
    )


def _excuse(job: Job, control: Control) -> str | None:
    return control.excuse(
        k=job.num_draft_tokens,
        has_probs=isinstance(job.decoder.drafter, ModelDrafter),
        has_cache=bool(job.decoder.target.layer_shapes),
        is_greedy=job.is_greedy,
    )


def _control(job: Job, design: Design, control: Control, on_tokens: Callable[[int], None]) -> ControlReport:
    """Make a mistake until it is found out, or the tokens are used up."""
    excuse = _excuse(job, control)
    if excuse is not None:
        return ControlReport(control, excuse)
    sample = Sample(job, control)
    report = ControlReport(control)
    for share in _LOOKS:
        num_tokens = max(1, round(share * design.num_tokens))
        observed = sample.first(num_tokens, on_tokens)
        tests = design.tests(observed, job.level / len(_LOOKS))
        best = min(tests, key=lambda test: test.p)
        is_forbidden = bool(observed.is_forbidden.any())
        is_caught = is_forbidden or best.is_alarm
        by, p = ("forbidden tokens", 0.0) if is_forbidden else (best.name, best.p)
        report = ControlReport(control, None, is_caught, num_tokens, by, p)
        if is_caught:
            break
    return report


def _greedy_control(job: Job, control: Control) -> ControlReport:
    excuse = _excuse(job, control)
    if excuse is not None:
        return ControlReport(control, excuse)
    report = check_greedily(job, job.sampling, control)
    return ControlReport(control, None, not report.is_ok, report.num_tokens, "text")
