"""Prometheus metrics under Outrider's names; those of speculative decoding also under vLLM's, for its benchmark and
dashboards.

Source of the names: vLLM, docs/features/speculative_decoding (``vllm:spec_decode_*``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.decoding.engine import Load
from outrider.records import Chunk, Stats, Timing
from outrider.requests.state import RequestState
from outrider.serve.pending import Times

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class _Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, about: str) -> HistogramMetricFamily:
        labels = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(labels, map(float, accumulate(self._counts)), strict=True))
        return HistogramMetricFamily(name, about, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """Written by the engine thread, read by any."""

    def __init__(self, load: Callable[[], Load], model_name: str) -> None:
        self._load, self._model_name = load, model_name
        self._stats, self._timing = Stats(), Timing()
        self._num_prompt_tokens = self._num_cached_tokens = 0
        self._num_ended: Counter[str] = Counter()
        self._queue, self._first, self._whole = _Histogram(_SECONDS), _Histogram(_SECONDS), _Histogram(_SECONDS)
        self._token = _Histogram(_SECONDS_A_TOKEN)

    def count_time(self, timing: Timing) -> None:
        """Add the time of a round."""
        self._timing += timing

    def count_queue(self, seconds: float) -> None:
        """Add the queue time of a row that got its slot."""
        self._queue.add(seconds)

    def count_first(self, chunk: Chunk, job: RequestState, times: Times) -> None:
        """Add the first chunk of a row."""
        self._num_prompt_tokens += job.num_prompt_tokens
        self._num_cached_tokens += chunk.num_cached_tokens
        self._first.add(times.first_s - times.submitted_s)

    def count_chunk(self, chunk: Chunk) -> None:
        self._stats += chunk.stats

    def count_end(self, reason: str, num_rows: int = 1) -> None:
        if num_rows:
            self._num_ended[reason] += num_rows

    def count_latency(self, num_tokens: int, times: Times) -> None:
        """Add the latencies of a finished row."""
        self._whole.add(times.last_s - times.submitted_s)
        if num_tokens > 1:
            self._token.add((times.last_s - times.first_s) / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        stats, timing, load = self._stats, self._timing, self._load()
        yield GaugeMetricFamily("outrider:num_requests_running", "Sequences being generated.", load.num_running)
        yield GaugeMetricFamily("outrider:num_requests_filling", "Sequences in prefill.", load.num_filling)
        yield GaugeMetricFamily("outrider:num_requests_waiting", "Sequences waiting for a slot.", load.num_waiting)
        yield GaugeMetricFamily("outrider:num_free_slots", "Free slots.", load.num_free_slots)
        yield CounterMetricFamily("outrider:prompt_tokens", "Prompt tokens.", self._num_prompt_tokens)
        yield CounterMetricFamily(
            "outrider:cached_tokens", "Prompt tokens found in the cache.", self._num_cached_tokens
        )
        yield CounterMetricFamily("outrider:generation_tokens", "Generated tokens.", stats.num_generated_tokens)
        ended = CounterMetricFamily("outrider:requests", "Sequences ended, by reason.", labels=["finished_reason"])
        for reason, count in sorted(self._num_ended.items()):
            ended.add_metric([reason], count)
        yield ended
        seconds = CounterMetricFamily("outrider:seconds", "Time of the engine, by phase.", labels=["part"])
        for part in ("prefill", "draft", "verify", "rest"):
            seconds.add_metric([part], timing.to_json()[part])
        yield seconds
        yield self._queue.family("outrider:request_queue_time_seconds", "Time from submission to a slot.")
        yield self._first.family("outrider:time_to_first_token_seconds", "Time from submission to the first tokens.")
        yield self._token.family("outrider:time_per_output_token_seconds", "Mean time per token after the first ones.")
        yield self._whole.family("outrider:e2e_request_latency_seconds", "Time from submission to the end.")
        yield from _spec_decode("outrider:spec_decode", stats, {})
        yield from _spec_decode("vllm:spec_decode", stats, {"model_name": self._model_name})


def _spec_decode(prefix: str, stats: Stats, labels: dict[str, str]) -> Iterator[Metric]:
    counts = {
        "num_drafts": ("Rounds of sequences in which tokens were drafted.", num_spec_steps(stats)),
        "num_draft_tokens": ("Drafted tokens.", stats.num_draft_tokens),
        "num_accepted_tokens": ("Accepted drafted tokens.", stats.num_accepted_draft_tokens),
    }
    for name, (about, count) in counts.items():
        family = CounterMetricFamily(f"{prefix}_{name}", about, labels=list(labels))
        family.add_metric(list(labels.values()), count)
        yield family
    by_place = CounterMetricFamily(
        f"{prefix}_num_accepted_tokens_per_pos", "Accepted drafted tokens, by position.", labels=[*labels, "position"]
    )
    for place in range(len(stats.drafted_histogram) - 1):
        num_accepted = sum(stats.acceptance_histogram[place + 1 :])
        by_place.add_metric([*labels.values(), str(place)], num_accepted)
    yield by_place


def num_spec_steps(stats: Stats) -> float:
    """Rounds in which tokens were drafted."""
    return stats.num_rounds - sum(stats.drafted_histogram[:1])
