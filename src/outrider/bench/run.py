"""Measure arms in turn.

An arm is a decoder and its options under a name. All arms take the same cases (prompt and seed) one after the other,
and the order of the arms rotates from case to case, so that drift of the machine affects all equally.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.decoder import Decoder
from outrider.options import NumDraftTokens
from outrider.records import Chunk, Stats, Timing
from outrider.runtime.device_timer import Clock
from outrider.system.ranks import current_ranks
from outrider.text.tokenizer import Prompt

_NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate.

    Attributes:
        draft: name of the draft, None for plain decoding.
        num_draft_tokens: K, None for plain decoding.
    """

    name: str
    decoder: Decoder
    draft: str | None = None
    num_draft_tokens: NumDraftTokens | None = None

    @property
    def label(self) -> str:
        """For tables with a separate column for K."""
        return self.draft or self.decoder.target.name

    def stream(self, prompt: Prompt, options: dict[str, Any]) -> Generator[Chunk]:
        k = self.num_draft_tokens
        yield from self.decoder.stream(prompt, num_draft_tokens=k, is_repeatable=False, **options)


def arms_by_k(decoder: Decoder, draft: str, ks: Sequence[NumDraftTokens]) -> list[Arm]:
    """The decoder, whose draft goes by this name, at each K."""
    return [Arm(f"{draft}, K = {k}", decoder, draft, k) for k in ks]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to generate: the unit of pairing between the arms."""

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
    rejected_ratios: tuple[float, ...] = field(repr=False, default=())

    @property
    def num_tokens(self) -> int:
        return self.stats.num_generated_tokens

    @property
    def decode_s_per_token(self) -> float:
        return self.timing.decode_s / self.num_tokens

    @property
    def total_s_per_token(self) -> float:
        return self.timing.total_s / self.num_tokens


OnChunk = Callable[[Arm, Case, Chunk], None]


def measure(arm: Arm, case: Case, options: dict[str, Any], on_chunk: OnChunk | None = None) -> Measurement:
    """Generate once. The work of ``on_chunk`` (printing, say) is not timed."""
    [measurement] = race([arm], case, options, on_chunk)
    return measurement


def race(
    arms: Sequence[Arm], case: Case, options: dict[str, Any], on_chunk: OnChunk | None = None
) -> list[Measurement]:
    """Generate with all arms side by side, to the end. See ``racing``."""
    tallies = [_Tally() for _ in arms]
    with closing(racing(arms, case, options)) as chunks:
        for which, chunk in chunks:
            tallies[which].take(chunk)
            if on_chunk is not None:
                on_chunk(arms[which], case, chunk)
    return [
        Measurement(arm, case, one.stats, one.timing, one.text, tuple(one.ratios))
        for arm, one in zip(arms, tallies, strict=True)
    ]


def racing(arms: Sequence[Arm], case: Case, options: dict[str, Any]) -> Generator[tuple[int, Chunk]]:
    """Generate with all arms side by side, on one machine: the next round is always of the arm whose own clock is
    behind. So at any moment all have had the same time, and the one that has written most is ahead.

    A clock counts its own arm's rounds only, but they find the processor's caches full of the others' weights. So this
    is for watching; to measure, let each arm run alone (see ``interleave``).

    Yields:
        The index of an arm, and its next chunk.
    """
    device_clock = Clock(arms[0].decoder.target.device)
    streams = [arm.stream(case.prompt, {**options, "seed": case.seed}) for arm in arms]
    seconds = dict.fromkeys(range(len(arms)), 0.0)  # of those that have not ended
    last = 0
    try:
        while seconds:
            which = _furthest_behind(seconds)
            if which != last:
                device_clock.wait(device_clock.mark())  # for what the other has started ahead, which is not this one's
            last, chunk = which, next(streams[which], None)
            if chunk is None:
                del seconds[which]
                continue
            seconds[which] += chunk.timing.total_s
            yield which, chunk
    finally:
        for stream in streams:
            stream.close()


def _furthest_behind(seconds: Mapping[int, float]) -> int:
    """The arm whose clock shows least."""
    return next(iter(seconds)) if len(seconds) == 1 else current_ranks().shared(min(seconds, key=seconds.__getitem__))


@dataclass(slots=True)
class _Tally:
    """What an arm has given so far."""

    stats: Stats = Stats()
    timing: Timing = Timing()
    text: str = ""
    ratios: list[float] = field(default_factory=list)

    def take(self, chunk: Chunk) -> None:
        self.stats += chunk.stats
        self.timing += chunk.timing
        self.text += chunk.text
        if chunk.rejected_ratio is not None:
            self.ratios.append(chunk.rejected_ratio)


def warm_up(arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any]) -> None:
    """Let every arm run without measuring: memory is allocated and kernels are chosen on first use.

    Where steps are prepared for each size, this prepares the sizes that the cases will need: of the cases with the same
    capacity of the cache and the same initial view of it, the shortest and the longest are run. (The sizes that K =
    ``auto`` needs depend on the text.)
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


def interleave(
    arms: Sequence[Arm], cases: Sequence[Case], options: dict[str, Any], on_chunk: OnChunk | None = None
) -> Iterator[Measurement]:
    """Every arm on every case. The arm that goes first changes with the case."""
    for place, case in enumerate(cases):
        for turn in range(len(arms)):
            yield measure(arms[(place + turn) % len(arms)], case, options, on_chunk)


# How far p/q may be from 1 between two computations of the same logits. In bfloat16 a logit near 16 has steps of 1/8.
_ROUNDING = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}


def count_rejections(ratios: Sequence[float], dtype: torch.dtype) -> tuple[int, float | None]:
    """For a model that drafts for itself: how many rejections rounding explains, and the p/q farthest from 1."""
    num_rounding = sum(abs(ratio - 1) <= _ROUNDING[dtype] for ratio in ratios)
    return num_rounding, max(ratios, key=lambda ratio: abs(ratio - 1), default=None)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory in use so far: of the device where it is a CUDA device, else of the process.

    None on Windows, which does not report it.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB
