"""Interleaved measurement of arms, and its summary.

An arm is a named decoder with its options. All arms run the same cases (prompt and seed) one after the other, and their
order rotates from case to case, so that drift of the machine affects all equally.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from outrider.decoder import Decoder
from outrider.measure.intervals import mean_std, paired_ratio
from outrider.options import NumDraftTokens
from outrider.records import Chunk, Interval, Stats, Timing
from outrider.runtime.execution import Clock
from outrider.system.provenance import sha256_of
from outrider.text.tokenizer import Prompt

_NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """A decoder and its options under a name. ``draft``: name of the draft; None for plain decoding.
    ``num_draft_tokens``: K; None for plain decoding."""

    name: str
    decoder: Decoder
    draft: str | None = None
    num_draft_tokens: NumDraftTokens | None = None

    def stream(self, prompt: Prompt, options: dict[str, Any]) -> Generator[Chunk]:
        k = self.num_draft_tokens
        yield from self.decoder.stream(prompt, num_draft_tokens=k, is_repeatable=False, **options)


def arms_by_k(decoder: Decoder, draft: str, ks: Sequence[NumDraftTokens]) -> list[Arm]:
    """Arms of one decoder and draft, one for each K."""
    return [Arm(f"{draft}, K = {k}", replace(decoder, num_draft_tokens=k), draft, k) for k in ks]


def names_of_drafts(arms: Sequence[Arm]) -> list[str]:
    return list(dict.fromkeys(arm.draft for arm in arms if arm.draft is not None))


@dataclass(frozen=True, slots=True)
class Case:
    """Prompt and seed: the unit of pairing between the arms."""

    index: int
    prompt: Prompt
    seed: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One arm on one case. Times in seconds."""

    arm: Arm
    case: Case
    stats: Stats
    timing: Timing
    text: str
    token_ids: tuple[int, ...]

    @property
    def decode_s_per_token(self) -> float:
        return self.timing.decode_s / self.stats.num_generated_tokens

    @property
    def total_s_per_token(self) -> float:
        return self.timing.total_s / self.stats.num_generated_tokens


OnChunk = Callable[[Arm, Case, Chunk], None]


def measure(arm: Arm, case: Case, options: dict[str, Any]) -> Measurement:
    return race([arm], case, options)[0]


def race(
    arms: Sequence[Arm], case: Case, options: dict[str, Any], on_chunk: OnChunk | None = None
) -> list[Measurement]:
    """Generate with all arms side by side, to the end (see ``race_arms``)."""
    found: list[list[Chunk]] = [[] for _ in arms]
    with closing(race_arms(arms, case, options)) as chunks:
        for which, chunk in chunks:
            found[which].append(chunk)
            if on_chunk is not None:
                on_chunk(arms[which], case, chunk)
    measured = []
    for arm, own in zip(arms, found, strict=True):
        stats, timing = sum((chunk.stats for chunk in own), Stats()), sum((chunk.timing for chunk in own), Timing())
        ids = tuple(token_id for chunk in own for token_id in chunk.token_ids)
        measured.append(Measurement(arm, case, stats, timing, "".join(chunk.text for chunk in own), ids))
    return measured


def race_arms(arms: Sequence[Arm], case: Case, options: dict[str, Any]) -> Generator[tuple[int, Chunk]]:
    """Generate with all arms side by side on one machine: the arm with the least time used runs the next round. So all
    have used the same time at any moment, and the one with the most tokens is ahead.

    Only an arm's own rounds are counted, but the others' weights fill the processor's caches. So this is a
    demonstration; to measure, run each arm alone (see ``interleave``). Yields the index of an arm, and its next
    chunk."""
    device_clock = Clock(arms[0].decoder.target.device)
    streams = [arm.stream(case.prompt, {**options, "seed": case.seed}) for arm in arms]
    seconds = dict.fromkeys(range(len(arms)), 0.0)  # of arms still running
    last = 0
    try:
        while seconds:
            which = min(seconds, key=seconds.__getitem__)  # furthest behind
            if which != last:
                device_clock.wait(device_clock.mark())  # for work that the other arm has queued
            last, chunk = which, next(streams[which], None)
            if chunk is None:
                del seconds[which]
                continue
            seconds[which] += chunk.timing.total_s
            yield which, chunk
    finally:
        for stream in streams:
            stream.close()


def warm_up(arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any]) -> None:
    """Run every arm without measuring: the first use allocates memory and selects kernels.

    If steps are captured for each size, this captures the sizes that the cases need: it runs the shortest and the
    longest case for each cache capacity and initial view of the cache. (The sizes that K = ``auto`` needs depend on the
    output.)
    """
    for arm in arms:
        lm = arm.decoder.target
        if not lm.execution.is_prepared:
            few = min(_NUM_WARM_UP_TOKENS, options["max_new_tokens"])
            measure(arm, cases[0], {**options, "max_new_tokens": few})
            continue
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for i, case in enumerate(cases):
            length = len(arm.decoder.encode(case.prompt))
            end = min(length + options["max_new_tokens"], lm.context_len)
            sizes = lm.execution.round_length(end), lm.execution.round_length(length)
            groups.setdefault(sizes, []).append((length, i))
        for i in {i for group in groups.values() for _, i in (min(group), max(group))}:
            measure(arm, cases[i], {**options, "ignore_eos": True, "stop": ()})


def interleave(arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any]) -> Iterator[Measurement]:
    """Every arm on every case. The arm that goes first changes with the case."""
    for place, case in enumerate(cases):
        for turn in range(len(arms)):
            yield measure(arms[(place + turn) % len(arms)], case, options)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory so far: of a CUDA device, else of the process. None on Windows, which does not report it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """Summary of an arm over all cases.

    Attributes:
        ms_per_token: of decoding, mean and standard deviation over the cases.
        total_ms_per_token: including the prefill.
        prefill_ms: of one prompt.
        speed_up: of decoding, over the baseline arm on the same cases; None for the baseline itself.
        total_speed_up: including the prefill.
        texts: token ids of the output of each case.
    """

    arm: Arm
    num_cases: int
    ms_per_token: tuple[float, float | None]
    total_ms_per_token: tuple[float, float | None]
    prefill_ms: tuple[float, float | None]
    tokens_per_s: float
    speed_up: Interval | None
    total_speed_up: Interval | None
    stats: Stats
    timing: Timing
    texts: Sequence[tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        means = ((name, getattr(self, name)) for name in ("ms_per_token", "total_ms_per_token", "prefill_ms"))
        means_json = {name: {"mean": mean, "std": std} for name, (mean, std) in means}
        ratios = ((name, getattr(self, name)) for name in ("speed_up", "total_speed_up"))
        ratios_json = {name: ratio and ratio.to_json() for name, ratio in ratios}
        arm = {"name": self.arm.name, "draft": self.arm.draft, "k": self.arm.num_draft_tokens}
        sums = {"stats": self.stats.to_json(), "time_s": self.timing.to_json(), "texts_sha256": sha256_of(self.texts)}
        counts = {"num_cases": self.num_cases, **means_json, "tokens_per_s": self.tokens_per_s}
        return {**arm, **counts, **ratios_json, **sums}


def summarise(measurements: Sequence[Measurement], arms: Sequence[Arm]) -> list[ArmSummary]:
    """Summarise each arm; the first is the baseline of the others.

    Only cases that all arms have completed count (the measurement may have been interrupted); without any the result is
    empty.
    """
    groups = [{m.case.index: m for m in measurements if m.arm == arm} for arm in arms]
    done = sorted(set.intersection(*map(set, groups)))
    found: list[ArmSummary] = []
    base: list[list[float]] = []
    for group in [[group[index] for index in done] for group in groups] if done else []:
        timing, stats = sum((m.timing for m in group), Timing()), sum((m.stats for m in group), Stats())
        times_s = [[m.decode_s_per_token for m in group], [m.total_s_per_token for m in group]]
        prefill_s = [m.timing.prefill_s for m in group]
        own_ms, total_ms, prefill_ms = (mean_std([1e3 * s for s in each]) for each in (*times_s, prefill_s))
        ratio, total = (paired_ratio(*pair) for pair in zip(base, times_s, strict=True)) if base else (None, None)
        speed, texts = stats.num_generated_tokens / timing.decode_s, [m.token_ids for m in group]
        means = own_ms, total_ms, prefill_ms
        found.append(ArmSummary(group[0].arm, len(group), *means, speed, ratio, total, stats, timing, texts))
        base = base or times_s
    return found
