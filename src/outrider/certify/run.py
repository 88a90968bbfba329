"""Certify: does this pair, with these options, on this machine, sample from the target's own distribution?

Four layers, each reported separately:

- *exact*: the acceptance rule on the pair's real probabilities, without randomness (outrider.certify.exact);
- *statistical*: output of the real loop against the target's own conditional distributions (outrider.stats.evidence);
- *controls*: deliberate mistakes in the real loop are detected by the same tests with no more tokens; if one is missed,
  the tests are too weak here to certify anything (outrider.certify.controls);
- *greedy*: at temperature 0 the output equals plain decoding (outrider.certify.divergence).

A pilot run, whose output is not tested, fixes the number of tokens and the stakes before the first tested token is
drawn. The tested sample is the first n tokens of sequences 0, 1, 2 ... in a row, wherever that ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from outrider.certify.certificate import NEGLIGIBLE_TV, Certificate, ControlReport
from outrider.certify.controls import CONTROLS, Control
from outrider.certify.design import Design, num_tests
from outrider.certify.divergence import GreedyReport, against_plain, first_difference, plain_texts
from outrider.certify.exact import ExactReport, check_exactly
from outrider.certify.job import CertifyTask, eager, generate_texts
from outrider.certify.observed import GeneratedText, ObservedTokens, join, observe
from outrider.errors import OptionError
from outrider.sampling.rules import GUMBEL, REJECTION, RULES
from outrider.scoring.teacher_forcing import Text
from outrider.stats.evidence import rate_bound, tokens_needed, tokens_to_alarm

NUM_PILOT_TOKENS = 1024
LEAST_NUM_TOKENS = 200
_PILOT_TEXTS = 2**32  # first index of the pilot's sequences, so that no seed is used twice
_NUM_CONTEXTS = 8  # of the exact layer
_LOOKS = (1 / 8, 1 / 4, 1 / 2, 1)  # at a control's tokens; each uses its share of the level
_MOST_CONTROL_LEVEL = 1e-3  # at a higher level a correct loop would sometimes raise an alarm
_SPARE = 1.2  # margin over the tokens needed, since the pilot only estimates them
_BUDGET_SHARE = 0.25  # of the time for the tested tokens; the rest is for controls and the other layers


class TokenSample:
    """Tokens generated on demand, with a control or without, in the order of the sequences."""

    def __init__(self, job: CertifyTask, control: Control | None = None, first_text: int = 0) -> None:
        self._job, self._control, self._next_text = job, control, first_text
        self._parts: list[ObservedTokens] = []
        self.written: list[GeneratedText] = []

    def first(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> ObservedTokens:
        """Observe the first tokens, generated as needed."""
        job = self._job
        num_there = sum(map(len, self._parts))
        while num_there < num_tokens:
            texts = range(self._next_text, self._next_text + self._num_texts(num_tokens - num_there))
            self._next_text = texts.stop
            first_step = 1 + max((one.last_step for one in self.written), default=-1)
            batch = [
                replace(one, first_step=first_step + one.first_step)
                for one in generate_texts(job, texts, self._control)
            ]
            decoder = job.decoder
            part = observe(
                decoder.target,
                decoder.drafter,
                job.effective_sampling,
                batch,
                seed=job.seed,
                batch_size=job.batch_size,
                new_constraint=job.new_constraint,
                num_draft_tokens=job.num_draft_tokens,
            )
            self.written += batch
            self._parts.append(part)
            on_tokens(min(len(part), num_tokens - num_there))
            num_there += len(part)
        return join(self._parts).first(num_tokens)

    def _num_texts(self, num_left: int) -> int:
        """Number of sequences to generate next for ``num_left`` tokens: at first one batch, then at most four, so that
        slots are refilled. (It does not affect which sequences are tested.)"""
        batch_size = self._job.batch_size
        num_tokens = sum(len(one.token_ids) for one in self.written)
        num_wanted = -(-num_left * len(self.written) // num_tokens) if num_tokens else 0
        return min(max(num_wanted, batch_size), 4 * batch_size)


@dataclass(frozen=True, slots=True)
class Pilot:
    """Pilot run, whose tokens are not tested.

    Attributes:
        observed: None at temperature 0.
        seconds: per token, to generate and score it.
    """

    written: Sequence[GeneratedText]
    observed: ObservedTokens | None
    seconds: float

    def num_tokens_for(self, budget_s: float) -> int:
        """Number of tokens to test within about this time."""
        return max(LEAST_NUM_TOKENS, int(_BUDGET_SHARE * budget_s / self.seconds))

    def num_tokens_to_detect(self, distance: float, level: float) -> int:
        """Number of tokens to test so that a total variation of ``distance`` is detected.

        Raises:
            OptionError: the draft is not that far from the target.
        """
        assert self.observed is not None
        drift = self.observed.drift
        needed = tokens_needed(self.observed.statistics["score"], drift, distance, level / num_tests(has_rounds=True))
        if needed is None:
            farthest = float(drift.distances.mean())
            raise OptionError(
                "--detect-tv",
                distance,
                f"the draft itself is no farther from the target than {farthest:.3f}: choose a smaller one",
            )
        return max(LEAST_NUM_TOKENS, math.ceil(_SPARE * needed))


def run_pilot(job: CertifyTask) -> Pilot:
    """Run the pilot."""
    # Warm up; if steps are captured for each size, with a whole batch, whose rows end one after the other. (Other
    # prompts may need further sizes, which makes the sample smaller.)
    first = _PILOT_TEXTS + (job.batch_size if job.decoder.target.execution.is_prepared else 1)
    generate_texts(job, range(_PILOT_TEXTS, first))
    began = time.perf_counter()
    if job.is_greedy:
        written = generate_texts(job, range(first, first + job.batch_size))
        num_tokens = sum(len(one.token_ids) for one in written)
        return Pilot(written, None, (time.perf_counter() - began) / num_tokens)
    sample = TokenSample(job, first_text=first)
    observed = sample.first(NUM_PILOT_TOKENS)
    num_tokens = sum(len(one.token_ids) for one in sample.written)  # may be more: whole batches are generated
    return Pilot(sample.written, observed, (time.perf_counter() - began) / num_tokens)


@dataclass(frozen=True, slots=True)
class Checks:
    """Findings of the layers before the statistical one.

    Attributes:
        plain: greedy texts of plain decoding, for all prompts.
    """

    exact: ExactReport
    greedy: Sequence[GreedyReport]
    plain: Sequence[Sequence[int]]


def run_checks(job: CertifyTask, pilot: Pilot) -> Checks:
    """Run the layers before the statistical one."""
    decoder, contexts = job.decoder, list(_contexts(job, pilot.written))
    rule = RULES[decoder.acceptance]
    exact = check_exactly(decoder.target, decoder.drafter, job.effective_sampling, rule, contexts, job.new_constraint)
    checks = [(task, _plain(task)) for task in _deterministic(job)]
    return Checks(exact, [check_greedily(*check) for check in checks], checks[0][1])


def certify(
    job: CertifyTask,
    pilot: Pilot,
    checks: Checks,
    num_tokens: int,
    *,
    wanted: float | None = None,
    controls: Sequence[Control] | None = None,
    on_tokens: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Certificate:
    """Run the layers that are left.

    Args:
        num_tokens: to be tested.
        wanted: total variation that must be detectable.
        controls: to run; None for all.
        on_tokens: called with the current stage, the number of tokens just generated, and their total.
    """
    selected = CONTROLS if controls is None else controls
    if pilot.observed is None:
        plain = checks.plain
        if job.decoder.target.execution.is_prepared:  # controls run eagerly; rounding must not count as their effect
            job = replace(job, decoder=eager(job.decoder))
            plain = _plain(job)
        found = [_greedy_control(job, plain, control) for control in selected]
        return Certificate(checks.exact, None, found, checks.greedy)
    num_distances = 2 * job.num_draft_tokens + 2
    design = Design.of(pilot.observed, num_tokens, job.level, len(job.prompts), num_distances=num_distances)

    def progress(what: str) -> Callable[[int], None]:
        return lambda done: on_tokens(what, done, num_tokens)

    sample = TokenSample(job)
    observed = sample.first(num_tokens, progress("sample"))
    statistical = design.report(observed, job.level, len(sample.written), wanted)
    found = []
    reference = _Reference(job)
    for control in selected:
        report, written = _control(job, design, control, progress(control.name))
        if not report.is_ok and statistical.detectable is not None:
            most = _distance_bound(reference.first(len(written)), written)
            if most < min(NEGLIGIBLE_TV, statistical.detectable):
                report = replace(report, excuse=f"deviates by less than {most:.2%} here (99% confidence)")
        found.append(report)
    return Certificate(checks.exact, statistical, found, checks.greedy)


def _contexts(job: CertifyTask, written: Sequence[GeneratedText]) -> Iterator[Text]:
    """Prefixes of sequences, of various lengths, each with its prompt given."""
    for i in range(_NUM_CONTEXTS):
        one = written[i % len(written)]
        num_prompt = len(one.prompt_ids)
        text = (*one.prompt_ids, *one.token_ids)[: job.decoder.target.context_len - 3]
        yield Text(text[: max(num_prompt, len(text) * (i + 1) // _NUM_CONTEXTS)], num_prompt)


def _deterministic(job: CertifyTask) -> Iterator[CertifyTask]:
    """Yield the tasks whose output must equal plain decoding."""
    yield replace(job, sampling=replace(job.sampling, temperature=0.0))
    if job.decoder.acceptance == GUMBEL.name and not job.is_greedy:
        yield job


def _plain(job: CertifyTask) -> list[list[int]]:
    """Output of plain decoding for all prompts."""
    requests = [job.request(index) for index in range(len(job.prompts))]
    return plain_texts(job.decoder.target, RULES[job.decoder.acceptance], requests, job.batch_size)


def check_greedily(job: CertifyTask, plain: Sequence[Sequence[int]], control: Control | None = None) -> GreedyReport:
    """Compare the output for all prompts with plain decoding."""
    indices = range(len(job.prompts))
    return against_plain(
        job.decoder.target,
        [job.request(index) for index in indices],
        plain,
        [one.token_ids for one in generate_texts(job, indices, control)],
        num_draft_tokens=job.num_draft_tokens,
        promise=job.decoder.target.execution.same_bytes,
    )


def _excuse(job: CertifyTask, control: Control) -> str | None:
    return control.excuse(
        k=job.num_draft_tokens,
        num_rows=job.batch_size,
        has_probs=not job.decoder.drafter.is_one_hot,
        has_cache=bool(job.decoder.target.layer_shapes),
        is_greedy=job.is_greedy,
    )


def _control(
    job: CertifyTask, design: Design, control: Control, on_tokens: Callable[[int], None]
) -> tuple[ControlReport, Sequence[GeneratedText]]:
    """Run a control until it is detected, or the tokens are used up. Also returns its output."""
    excuse = _excuse(job, control)
    if excuse is not None:
        return ControlReport(control.name, control.about, excuse), ()
    sample = TokenSample(job, control)
    report = ControlReport(control.name, control.about)
    level = min(job.level, _MOST_CONTROL_LEVEL) / len(_LOOKS)
    for share in _LOOKS:
        num_tokens = max(1, round(share * design.num_tokens))
        observed = sample.first(num_tokens, on_tokens)
        tests = design.tests(observed, level)
        best = min(tests, key=lambda test: test.p)
        is_forbidden = bool(observed.is_forbidden.any())
        is_caught = is_forbidden or best.is_alarm
        by, p = ("forbidden tokens", 0.0) if is_forbidden else (best.name, best.p)
        report = ControlReport(control.name, control.about, None, is_caught, num_tokens, by, p)
        if is_caught:
            return report, sample.written
    needed = tokens_to_alarm(best.p, design.num_tokens, level / num_tests(has_rounds=True))
    return replace(report, num_tokens_needed=needed), sample.written


class _Reference:
    """Output of the correct rule with the controls' K and seeds."""

    def __init__(self, job: CertifyTask) -> None:
        k = job.num_draft_tokens
        self._job = replace(job, decoder=replace(eager(job.decoder), acceptance=REJECTION.name, num_draft_tokens=k))
        self._written: list[GeneratedText] = []

    def first(self, num_texts: int) -> Sequence[GeneratedText]:
        """First sequences, generated as needed."""
        while len(self._written) < num_texts:
            begin = len(self._written)
            self._written += generate_texts(self._job, range(begin, begin + self._job.batch_size))
        return self._written[:num_texts]


def _distance_bound(correct: Sequence[GeneratedText], written: Sequence[GeneratedText]) -> float:
    """Upper bound, with probability POWER, on a mistake's mean total variation up to the first difference from the
    correct rule with the same noise: under any coupling, two distributions give the same token no more often than they
    agree (the coupling inequality)."""
    num_apart = num_tokens = 0
    for a, b in zip(correct, written, strict=True):
        at = first_difference(a.token_ids, b.token_ids)
        num_apart += at is not None
        num_tokens += len(a.token_ids) if at is None else at + 1
    return rate_bound(num_apart, num_tokens)


def _greedy_control(job: CertifyTask, plain: Sequence[Sequence[int]], control: Control) -> ControlReport:
    excuse = _excuse(job, control)
    if excuse is not None:
        return ControlReport(control.name, control.about, excuse)
    found = check_greedily(job, plain, control)
    # Deterministic; require as many tokens as above temperature 0.
    needed = math.ceil(rate_bound(0, 1) / NEGLIGIBLE_TV)
    if not found.differences and found.num_tokens >= needed:
        excuse = f"it changes none of {found.num_tokens} tokens"
    is_caught, num_tokens = not found.is_ok, found.num_tokens
    return ControlReport(control.name, control.about, excuse, is_caught, num_tokens, "text", num_tokens_needed=needed)
