"""Certify: does this pair, with these options, on this machine, sample from the target's own distribution?

Four layers, each reported separately:

- *exact*: the acceptance rule on the pair's real probabilities, without randomness (outrider.certify.exact);
- *statistical*: output of the real loop against the target's own conditional distributions (outrider.certify.evidence);
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
from typing import Any

from outrider.certify.certificate import NEGLIGIBLE_TV, Certificate, ControlReport
from outrider.certify.controls import CONTROLS, Control
from outrider.certify.design import Design, num_tests
from outrider.certify.divergence import GreedyReport, Texts, against_plain, first_difference, plain_texts
from outrider.certify.evidence import Finding, rate_bound, tokens_needed, tokens_to_alarm
from outrider.certify.exact import ExactReport, check_exactly
from outrider.certify.observed import GeneratedText, ObservedTokens, UnenforcedConstraint, join, observe
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.errors import OptionError, PromptError
from outrider.measure.teacher_forcing import Text
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling
from outrider.records import Constraint, Request
from outrider.requests.hooks import ReadOptions, constraint_of
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL, REJECTION, RULES
from outrider.text.row_text import RowText

NUM_PILOT_TOKENS, LEAST_NUM_TOKENS = 1024, 200
_PILOT_TEXTS = 2**32  # first index of the pilot's sequences, so that no seed is used twice
_NUM_CONTEXTS = 8  # of the exact layer
_LOOKS = (1 / 8, 1 / 4, 1 / 2, 1)  # at a control's tokens; each uses its share of the level


@dataclass(frozen=True, slots=True)
class CertifyTask:
    """Pair, options and prompts to certify."""

    decoder: Decoder
    sampling: Sampling  # without a seed
    prompts: Sequence[Sequence[int]]
    level: float  # probability of a false alarm of the statistical layer
    batch_size: int
    seed: int  # of sequence 0; sequence i gets seed + i

    def __post_init__(self) -> None:
        assert self.prompts and self.batch_size >= 1
        if self.sampling.processor is not None:
            raise OptionError("processor", self.sampling.processor, "certificates know no functions: leave it out")
        if not 0 < self.level < 1:
            raise OptionError("--significance", self.level, "a number between 0 and 1")
        most = self.decoder.target.context_len - 3  # the exact layer looks two tokens ahead
        for index, num in enumerate(map(len, self.prompts)):
            if num >= most:
                raise PromptError(f"prompt {index} has {num} tokens, but a prompt must have fewer than {most} here")

    @property
    def num_draft_tokens(self) -> int:
        """Constant K for the controls."""
        k = self.decoder.num_draft_tokens
        return k if isinstance(k, int) else DEFAULT_NUM_DRAFT_TOKENS

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def effective_sampling(self) -> Sampling:
        """Sampling options with the decoder's end tokens: all that p depends on, except the constraint."""
        return self.sampling.without_masks().with_ends(self.decoder.eos_ids)

    def new_constraint(self, prompt_ids: Sequence[int]) -> Constraint | None:
        decoder, vocab_size = self.decoder, self.decoder.target.vocab_size
        options = ReadOptions.of(self.sampling, decoder.tokenizer, vocab_size)
        return constraint_of(options, decoder.tokenizer, vocab_size, decoder.eos_ids, prompt_ids)

    def request(self, text: int) -> Request:
        """Request of a sequence by index, with the decoder's end tokens."""
        ids = self.prompts[text % len(self.prompts)]
        most = min(self.sampling.max_new_tokens, self.decoder.target.context_len - len(ids))
        sampling = replace(self.effective_sampling, seed=self.seed + text, max_new_tokens=most)
        stop = RowText(None, () if sampling.ignore_eos else self.decoder.eos_ids, (), self.sampling.stop_token_ids)
        # As the decoder's own requests do, or mistakes would differ from it in their last rounds.
        beyond = not self.is_greedy
        return Request(ids, sampling, stop, drafts_beyond_end=beyond, constraint=self.new_constraint(ids))

    def eager(self, **changes: Any) -> CertifyTask:
        """The task with eager execution, for controls and their reference: capturing steps for each would dominate."""
        target, drafter = self.decoder.target.uncaptured(), self.decoder.drafter.with_models(LM.uncaptured)
        return replace(self, decoder=replace(self.decoder, target=target, drafter=drafter, **changes))


def generate_texts(job: CertifyTask, texts: Sequence[int], control: Control | None = None) -> list[GeneratedText]:
    """Generate sequences, given by index, with the real loop, ``job.batch_size`` concurrently; when one ends, the next
    takes its slot. Steps of the loop are counted from 0. ``control`` is a mistake to inject."""
    requests = [job.request(text) for text in texts]
    rounds: list[list[tuple[int, int, Sequence[int]]]] = [[] for _ in texts]
    for row, slot, step, ids in _rounds(job, requests, control):
        rounds[row].append((slot, step, ids))
    return [
        GeneratedText(
            index=text,
            prompt=text % len(job.prompts),
            prompt_ids=tuple(request.prompt_ids),
            token_ids=tuple(token for *_, ids in own for token in ids),
            places=tuple(place for *_, ids in own for place in range(len(ids))),
            slot=own[0][0],
            first_step=own[0][1],
        )
        for text, request, own in zip(texts, requests, rounds, strict=True)
    ]


def _rounds(
    job: CertifyTask, requests: Sequence[Request], control: Control | None
) -> Iterator[tuple[int, int, int, Sequence[int]]]:
    """Yield row, slot, step of the loop, and tokens, of each round of each row."""
    step = 0
    if control is None:
        prompts = [list(request.prompt_ids) for request in requests]
        own, last_slot = [replace(job.sampling, seed=one.sampling.seed) for one in requests], -1
        for chunk in job.decoder.stream_many(prompts, own, num_slots=job.batch_size, is_repeatable=False):
            step += chunk.slot <= last_slot  # the chunks of a step are in the order of their slots
            last_slot = chunk.slot
            yield chunk.row, chunk.slot, step, chunk.token_ids
        return
    decoder = job.eager().decoder
    target, drafter = control.wrap_target(decoder.target), control.wrap_drafter(decoder.drafter)
    # In batches: a faulty cache must be wrong about its own sequence, not about an earlier one in its slot.
    num_rows = min(job.batch_size, control.most_rows or job.batch_size)
    for begin in range(0, len(requests), num_rows):
        batch = [*requests[begin : begin + num_rows]]
        for slot, one in enumerate(batch):
            if one.constraint is not None:  # a faulty loop may commit tokens that the constraint forbids
                batch[slot] = one = replace(one, constraint=UnenforcedConstraint(one.constraint))
            if control.keeps_seeds:
                batch[slot] = replace(one, sampling=replace(one.sampling, seed=job.seed + slot))
        for round_ in decode(target, drafter, batch, control.rule, num_draft_tokens=job.num_draft_tokens):
            yield from ((begin + one.row, one.row, step, one.token_ids) for one in round_.rows)
            step += 1


class TokenSample:
    """Tokens generated on demand, with a control or without, in the order of the sequences."""

    def __init__(self, job: CertifyTask, control: Control | None = None, first_text: int = 0) -> None:
        self._job, self._control, self._next_text = job, control, first_text
        self._next_step = self._num_told = 0
        self._parts: list[ObservedTokens] = []
        self.written: list[GeneratedText] = []

    def first(self, num_tokens: int, on_tokens: Callable[[int], None] = lambda _: None) -> ObservedTokens:
        """Observe the first tokens, generated as needed."""
        job = self._job
        while True:
            num_done = min(num_tokens, sum(map(len, self._parts)))
            on_tokens(num_done - self._num_told)
            self._num_told = num_done
            if num_done == num_tokens:
                return join(self._parts).part(slice(num_tokens))
            # At first one batch, then at most four, so that slots are refilled. (It does not affect which sequences are
            # tested.)
            num_written = sum(len(one.token_ids) for one in self.written)
            num_texts = -(-(num_tokens - num_done) * len(self.written) // num_written) if num_written else 0
            num_texts = min(max(num_texts, job.batch_size), 4 * job.batch_size)
            texts = range(self._next_text, self._next_text + num_texts)
            generated, first = generate_texts(job, texts, self._control), self._next_step
            batch = [replace(one, first_step=first + one.first_step) for one in generated]
            self._next_text = texts.stop
            self._next_step = 1 + max(one.first_step + int(one.rounds[-1]) for one in batch)
            how: dict[str, Any] = {"seed": job.seed, "batch_size": job.batch_size}
            how |= {"new_constraint": job.new_constraint, "num_draft_tokens": job.num_draft_tokens}
            pair = job.decoder.target, job.decoder.drafter
            self._parts.append(observe(*pair, job.effective_sampling, batch, **how))
            self.written += batch


@dataclass(frozen=True, slots=True)
class Pilot:
    """Pilot run, whose tokens are not tested."""

    written: Sequence[GeneratedText]
    observed: ObservedTokens | None  # None at temperature 0
    seconds: float  # per token, to generate and score it

    def num_tokens_for(self, budget_s: float) -> int:
        share = 0.25  # of the time for the tested tokens; the rest is for controls and the other layers
        return max(LEAST_NUM_TOKENS, int(share * budget_s / self.seconds))

    def num_tokens_to_detect(self, distance: float, level: float) -> int:
        """Number of tokens to test so that a total variation of ``distance`` is detected. Raises OptionError: the draft
        is not that far from the target, or nothing is random."""
        if self.observed is None:
            raise OptionError("--detect-tv", distance, "temperature 0 is deterministic; leave it out")
        drift = self.observed.drift
        needed = tokens_needed(self.observed.statistic("score"), drift, distance, level / num_tests(has_rounds=True))
        if needed is None:
            farthest = f"the draft itself is no farther from the target than {drift.distances.mean():.3f}"
            raise OptionError("--detect-tv", distance, f"{farthest}: choose a smaller one")
        return max(LEAST_NUM_TOKENS, math.ceil(1.2 * needed))  # a margin: the pilot only estimates the number


def run_pilot(job: CertifyTask) -> Pilot:
    # Warm up; if steps are captured for each size, with a whole batch, whose rows end one after the other. (Other
    # prompts may need further sizes, which makes the sample smaller.)
    first = _PILOT_TEXTS + (job.batch_size if job.decoder.target.execution.is_prepared else 1)
    generate_texts(job, range(_PILOT_TEXTS, first))
    began = time.perf_counter()
    if job.is_greedy:
        observed, written = None, generate_texts(job, range(first, first + job.batch_size))
    else:
        sample = TokenSample(job, first_text=first)
        observed, written = sample.first(NUM_PILOT_TOKENS), sample.written
    num_tokens = sum(len(one.token_ids) for one in written)  # may be more: whole batches are generated
    return Pilot(written, observed, (time.perf_counter() - began) / num_tokens)


Checks = tuple[ExactReport, list[GreedyReport], list[list[int]]]
"""Findings of the layers before the statistical one; and greedy texts of plain decoding, for all prompts."""


def run_checks(job: CertifyTask, pilot: Pilot) -> Checks:
    """Run the layers before the statistical one."""
    contexts = []  # prefixes of sequences, of various lengths, each with its prompt given
    for i in range(_NUM_CONTEXTS):
        one = pilot.written[i % len(pilot.written)]
        num_prompt = len(one.prompt_ids)
        text = (*one.prompt_ids, *one.token_ids)[: job.decoder.target.context_len - 3]
        contexts.append(Text(text[: max(num_prompt, len(text) * (i + 1) // _NUM_CONTEXTS)], num_prompt))
    decoder, rule = job.decoder, RULES[job.decoder.acceptance]
    how = job.effective_sampling, rule, contexts, job.new_constraint
    exact = check_exactly(decoder.target, decoder.drafter, *how)
    # The tasks whose output must equal plain decoding.
    tasks = [replace(job, sampling=replace(job.sampling, temperature=0.0))]
    tasks += [job] if rule.name == GUMBEL.name and not job.is_greedy else []
    plain = [_plain(task) for task in tasks]
    return exact, [*map(check_greedily, tasks, plain)], plain[0]


def _plain(job: CertifyTask) -> list[list[int]]:
    decoder, requests = job.decoder, [*map(job.request, range(len(job.prompts)))]
    return plain_texts(decoder.target, RULES[decoder.acceptance], requests, job.batch_size)


def check_greedily(job: CertifyTask, plain: Texts, control: Control | None = None) -> GreedyReport:
    """Compare the output for all prompts with plain decoding."""
    indices = range(len(job.prompts))
    texts = [one.token_ids for one in generate_texts(job, indices, control)]
    return against_plain(job.decoder.target, [*map(job.request, indices)], plain, texts, job.num_draft_tokens)


def certify(
    job: CertifyTask,
    pilot: Pilot,
    num_tokens: int,
    *,
    checks: Checks | None = None,
    wanted: float | None = None,
    controls: Sequence[Control] | None = None,
    on_tokens: Callable[[int], None] = lambda done: None,
) -> Certificate:
    """Run the layers that are left.

    Args:
        num_tokens: to be tested.
        checks: of ``run_checks``, which is run here without them.
        wanted: total variation that must be detectable.
        controls: None for all.
        on_tokens: called with the number of tokens just done: ``num_tokens`` in all for the sample and each control,
            also for one that is detected early. At temperature 0 it is not called.
    """
    exact, greedy, plain = checks or run_checks(job, pilot)
    selected = CONTROLS if controls is None else controls
    if pilot.observed is None:
        if job.decoder.target.execution.is_prepared:  # controls run eagerly; rounding must not count as their effect
            job = job.eager()
            plain = _plain(job)
        return Certificate(exact, None, [_greedy_control(job, plain, control) for control in selected], greedy)
    num_distances = 2 * job.num_draft_tokens + 2
    design = Design.of(pilot.observed, num_tokens, job.level, len(job.prompts), num_distances=num_distances)
    sample = TokenSample(job)
    observed = sample.first(num_tokens, on_tokens)
    statistical = design.report(observed, job.level, len(sample.written), wanted)
    found = []
    # Output of the correct rule with the controls' K and seeds, generated as needed.
    reference = job.eager(acceptance=REJECTION.name, num_draft_tokens=job.num_draft_tokens)
    correct: list[GeneratedText] = []
    for control in selected:
        report, written = run_control(job, design, control, num_tokens, on_tokens)
        if not report.is_ok and statistical.detectable is not None:
            while len(correct) < len(written):
                correct += generate_texts(reference, range(len(correct), len(correct) + job.batch_size))
            most = _distance_bound(correct[: len(written)], written)
            if most < min(NEGLIGIBLE_TV, statistical.detectable):
                report = replace(report, excuse=f"deviates by less than {most:.2%} here (99% confidence)")
        on_tokens(num_tokens - report.num_tokens)
        found.append(report)
    return Certificate(exact, statistical, found, greedy)


def excuse_of(job: CertifyTask, control: Control) -> str | None:
    """Reason why a control is ineffective here; None if it is effective."""
    if job.batch_size < control.least_rows:
        return f"correct for batches of fewer than {control.least_rows} sequences"
    if job.num_draft_tokens < control.least_k:
        return f"correct for fewer than {control.least_k} drafted tokens"
    if control.needs_probs and job.decoder.drafter.is_one_hot:
        return "correct for a draft without probabilities"
    if control.needs_cache and not job.decoder.target.layer_shapes:
        return "the target has no cache"
    return "correct at temperature 0" if job.is_greedy and not control.is_wrong_greedily else None


def run_control(
    job: CertifyTask, design: Design, control: Control, num_tokens: int, on_tokens: Callable[[int], None]
) -> tuple[ControlReport, Sequence[GeneratedText]]:
    """Run a control until it is detected, or the tokens are used up. Also returns its output."""
    report = ControlReport(control.name, control.about, excuse_of(job, control))
    if report.excuse is not None:
        return report, ()
    sample = TokenSample(job, control)
    level = min(job.level, 1e-3) / len(_LOOKS)  # at a higher level a correct loop would sometimes raise an alarm
    for num_seen in (max(1, round(share * num_tokens)) for share in _LOOKS):
        observed = sample.first(num_seen, on_tokens)
        best = min(design.tests(observed, level), key=lambda test: test.p)
        if observed["is_forbidden"].any():
            best = Finding("forbidden tokens", 0.0, 0.0)
        report = replace(report, is_caught=best.is_alarm, num_tokens=num_seen, by=best.name, p=best.p)
        if best.is_alarm:
            return report, sample.written
    needed = tokens_to_alarm(best.p, num_tokens, level / num_tests(has_rounds=True))
    return replace(report, num_tokens_needed=needed), sample.written


def _distance_bound(correct: Sequence[GeneratedText], written: Sequence[GeneratedText]) -> float:
    """Upper bound, with probability POWER, on a mistake's mean total variation up to the first difference from the
    correct rule with the same noise: under any coupling, two distributions give the same token no more often than they
    agree (the coupling inequality)."""
    pairs = zip(correct, written, strict=True)
    at = [(first_difference(a.token_ids, b.token_ids), len(a.token_ids)) for a, b in pairs]
    apart = [index + 1 for index, _ in at if index is not None]
    return rate_bound(len(apart), sum(apart) + sum(num for index, num in at if index is None))


def _greedy_control(job: CertifyTask, plain: Texts, control: Control) -> ControlReport:
    report = ControlReport(control.name, control.about, excuse_of(job, control))
    if report.excuse is not None:
        return report
    found = check_greedily(job, plain, control)
    # Deterministic; require as many tokens as above temperature 0.
    num, needed = found.num_tokens, math.ceil(rate_bound(0, 1) / NEGLIGIBLE_TV)
    excuse = f"it changes none of {num} tokens" if not found.differences and num >= needed else None
    is_caught = not found.is_ok
    return replace(report, excuse=excuse, is_caught=is_caught, num_tokens=num, by="text", num_tokens_needed=needed)
