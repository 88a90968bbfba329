"""Prometheus metrics under Outrider's names; those of speculative decoding also under vLLM's, for its benchmark and
dashboards. The label ``model_name`` is the model's first name.

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

from outrider.decoding.scheduler import Load
from outrider.records import Chunk, Stats, Timing
from outrider.serve.pending import TicketRow

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


class Metrics(Collector):
    """The counts of the server. Written by the engine thread, read by any.

    Args:
        load: tells the load of the engine.
    """

    def __init__(self, load: Callable[[], Load], model_name: str) -> None:
        self._load, self._model_name = load, model_name
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

    def count_first(self, chunk: Chunk, row: TicketRow) -> None:
        """Add the first chunk of a row."""
        self.num_prompt_tokens += row.job.num_prompt_tokens
        self.num_cached_tokens += chunk.num_cached_tokens
        self.first.add(row.first_s - row.submitted_s)

    def count_chunk(self, chunk: Chunk) -> None:
        self.stats += chunk.stats

    def count_end(self, reason: str, num_rows: int = 1) -> None:
        if num_rows:
            self.num_ended[reason] += num_rows

    def count_latency(self, row: TicketRow) -> None:
        """Add the latencies of a finished row."""
        num_tokens = len(row.job.origins)
        self.whole.add(row.last_s - row.submitted_s)
        if num_tokens > 1:
            self.token.add((row.last_s - row.first_s) / (num_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        # Each is read once, so that the counts of a scrape belong together.
        name, stats, load = self._model_name, self.stats, self._load()

        def gauge(key: str, about: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"outrider:{key}", about, labels=["model_name"])
            family.add_metric([name], value)
            return family

        def counter(key: str, about: str, value: float) -> Metric:
            family = CounterMetricFamily(f"outrider:{key}", about, labels=["model_name"])
            family.add_metric([name], value)
            return family

        def histogram(key: str, about: str, values: _Histogram) -> Metric:
            family = HistogramMetricFamily(f"outrider:{key}_seconds", about, labels=["model_name"])
            values.add_to(family, name)
            return family

        yield gauge("num_requests_running", "Sequences being generated.", load.num_running)
        yield gauge("num_requests_filling", "Sequences in prefill.", load.num_filling)
        yield gauge("num_requests_waiting", "Sequences waiting for a slot.", load.num_waiting)
        yield gauge("num_free_slots", "Free slots.", load.num_free_slots)
        yield counter("prompt_tokens", "Prompt tokens.", self.num_prompt_tokens)
        yield counter("cached_tokens", "Prompt tokens found in the cache.", self.num_cached_tokens)
        yield counter("generation_tokens", "Generated tokens.", stats.num_generated_tokens)
        ended, seconds = (
            CounterMetricFamily(f"outrider:{key}", about, labels=["model_name", label])
            for key, about, label in (
                ("requests", "Sequences ended, by reason.", "finished_reason"),
                ("seconds", "Time of the engine, by phase.", "part"),
            )
        )
        for reason, count in sorted(self.num_ended.items()):
            ended.add_metric([name, reason], count)
        times = self.timing.to_json()
        for part in ("prefill", "draft", "verify", "rest"):
            seconds.add_metric([name, part], times[part])
        yield ended
        yield seconds
        yield histogram("request_queue_time", "Time from submission to a slot.", self.queue)
        yield histogram("time_to_first_token", "Time from submission to the first tokens.", self.first)
        yield histogram("time_per_output_token", "Mean time per token after the first ones.", self.token)
        yield histogram("e2e_request_latency", "Time from submission to the end.", self.whole)
        yield from _spec_decode("outrider:spec_decode", name, stats)
        yield from _spec_decode("vllm:spec_decode", name, stats)


def _spec_decode(prefix: str, model_name: str, stats: Stats) -> Iterator[Metric]:
    """Counts of drafts."""
    counts: dict[str, tuple[str, Callable[[Stats], float]]] = {
        "num_drafts": ("Rounds of sequences in which tokens were drafted.", num_spec_steps),
        "num_draft_tokens": ("Drafted tokens.", lambda stats: stats.num_draft_tokens),
        "num_accepted_tokens": ("Accepted drafted tokens.", lambda stats: stats.num_accepted_draft_tokens),
    }
    for name, (about, count) in counts.items():
        family = CounterMetricFamily(f"{prefix}_{name}", about, labels=["model_name"])
        family.add_metric([model_name], count(stats))
        yield family
    by_place = CounterMetricFamily(
        f"{prefix}_num_accepted_tokens_per_pos",
        "Accepted drafted tokens, by position.",
        labels=["model_name", "position"],
    )
    for place in range(len(stats.drafted_histogram) - 1):
        by_place.add_metric([model_name, str(place)], sum(stats.acceptance_histogram[place + 1 :]))
    yield by_place


def num_spec_steps(stats: Stats) -> float:
    """Rounds in which tokens were drafted."""
    return stats.num_rounds - sum(stats.drafted_histogram[:1])
