"""Prometheus metrics under Outrider's names; those of speculative decoding also under vLLM's, for its benchmark and
dashboards. The label ``model_name`` tells the models of a server apart.

Source of the names: vLLM, docs/features/speculative_decoding (``vllm:spec_decode_*``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

    def add_to(self, family: HistogramMetricFamily, model_name: str) -> None:
        bounds = [*map(str, self._bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        family.add_metric([model_name], buckets, self._sum)


class ModelMetrics:
    """The counts of one model. Written by the engine thread, read by any."""

    def __init__(self, load: Callable[[], Load], model_name: str) -> None:
        self.load, self.model_name = load, model_name
        self.stats, self.timing = Stats(), Timing()
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_ended: Counter[str] = Counter()
        self.queue, self.first, self.whole = _Histogram(_SECONDS), _Histogram(_SECONDS), _Histogram(_SECONDS)
        self.token = _Histogram(_SECONDS_A_TOKEN)

    def count_time(self, timing: Timing) -> None:
        """Add the time of a round."""
        self.timing += timing

    def count_queue(self, seconds: float) -> None:
        """Add the queue time of a row that got its slot."""
        self.queue.add(seconds)

    def count_first(self, chunk: Chunk, job: RequestState, times: Times) -> None:
        """Add the first chunk of a row."""
        self.num_prompt_tokens += job.num_prompt_tokens
        self.num_cached_tokens += chunk.num_cached_tokens
        self.first.add(times.first_s - times.submitted_s)

    def count_chunk(self, chunk: Chunk) -> None:
        self.stats += chunk.stats

    def count_end(self, reason: str, num_rows: int = 1) -> None:
        if num_rows:
            self.num_ended[reason] += num_rows

    def count_latency(self, num_tokens: int, times: Times) -> None:
        """Add the latencies of a finished row."""
        self.whole.add(times.last_s - times.submitted_s)
        if num_tokens > 1:
            self.token.add((times.last_s - times.first_s) / (num_tokens - 1))


class Metrics(Collector):
    """Those of all models of a server."""

    def __init__(self, models: Sequence[ModelMetrics]) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        # Each is read once, so that the counts of a scrape belong together.
        found = [(one.model_name, one, one.stats, one.load()) for one in self._models]

        def gauge(name: str, about: str, value: Callable[[Load], float]) -> Metric:
            family = GaugeMetricFamily(f"outrider:{name}", about, labels=["model_name"])
            for model, _, _, load in found:
                family.add_metric([model], value(load))
            return family

        def counter(name: str, about: str, value: Callable[[ModelMetrics, Stats], float]) -> Metric:
            family = CounterMetricFamily(f"outrider:{name}", about, labels=["model_name"])
            for model, one, stats, _ in found:
                family.add_metric([model], value(one, stats))
            return family

        def histogram(name: str, about: str, value: Callable[[ModelMetrics], _Histogram]) -> Metric:
            family = HistogramMetricFamily(f"outrider:{name}_seconds", about, labels=["model_name"])
            for model, one, _, _ in found:
                value(one).add_to(family, model)
            return family

        yield gauge("num_requests_running", "Sequences being generated.", lambda load: load.num_running)
        yield gauge("num_requests_filling", "Sequences in prefill.", lambda load: load.num_filling)
        yield gauge("num_requests_waiting", "Sequences waiting for a slot.", lambda load: load.num_waiting)
        yield gauge("num_free_slots", "Free slots.", lambda load: load.num_free_slots)
        yield counter("prompt_tokens", "Prompt tokens.", lambda one, _: one.num_prompt_tokens)
        yield counter("cached_tokens", "Prompt tokens found in the cache.", lambda one, _: one.num_cached_tokens)
        yield counter("generation_tokens", "Generated tokens.", lambda _, stats: stats.num_generated_tokens)
        ended, seconds = (
            CounterMetricFamily(f"outrider:{name}", about, labels=["model_name", label])
            for name, about, label in (
                ("requests", "Sequences ended, by reason.", "finished_reason"),
                ("seconds", "Time of the engine, by phase.", "part"),
            )
        )
        for model, one, _, _ in found:
            for reason, count in sorted(one.num_ended.items()):
                ended.add_metric([model, reason], count)
            times = one.timing.to_json()
            for part in ("prefill", "draft", "verify", "rest"):
                seconds.add_metric([model, part], times[part])
        yield ended
        yield seconds
        yield histogram("request_queue_time", "Time from submission to a slot.", lambda one: one.queue)
        yield histogram("time_to_first_token", "Time from submission to the first tokens.", lambda one: one.first)
        yield histogram("time_per_output_token", "Mean time per token after the first ones.", lambda one: one.token)
        yield histogram("e2e_request_latency", "Time from submission to the end.", lambda one: one.whole)
        all_stats = {model: stats for model, _, stats, _ in found}
        yield from _spec_decode("outrider:spec_decode", all_stats)
        yield from _spec_decode("vllm:spec_decode", all_stats)


def _spec_decode(prefix: str, all_stats: Mapping[str, Stats]) -> Iterator[Metric]:
    """Counts of drafts, by model."""
    counts: dict[str, tuple[str, Callable[[Stats], float]]] = {
        "num_drafts": ("Rounds of sequences in which tokens were drafted.", num_spec_steps),
        "num_draft_tokens": ("Drafted tokens.", lambda stats: stats.num_draft_tokens),
        "num_accepted_tokens": ("Accepted drafted tokens.", lambda stats: stats.num_accepted_draft_tokens),
    }
    for name, (about, count) in counts.items():
        family = CounterMetricFamily(f"{prefix}_{name}", about, labels=["model_name"])
        for model, stats in all_stats.items():
            family.add_metric([model], count(stats))
        yield family
    by_place = CounterMetricFamily(
        f"{prefix}_num_accepted_tokens_per_pos",
        "Accepted drafted tokens, by position.",
        labels=["model_name", "position"],
    )
    for model, stats in all_stats.items():
        for place in range(len(stats.drafted_histogram) - 1):
            by_place.add_metric([model, str(place)], sum(stats.acceptance_histogram[place + 1 :]))
    yield by_place


def num_spec_steps(stats: Stats) -> float:
    """Rounds in which tokens were drafted."""
    return stats.num_rounds - sum(stats.drafted_histogram[:1])
