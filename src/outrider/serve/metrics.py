"""Prometheus metrics under Outrider's names; those of speculative decoding also under vLLM's, for its benchmark and
dashboards. The label ``model_name`` is the model's first name.

Source of the names: vLLM, docs/features/speculative_decoding (``vllm:spec_decode_*``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outrider.decoding.scheduler import Load
from outrider.records import Chunk, Stats, Timing
from outrider.requests.async_session import Arrived

_NEWEST = 0.1  # weight of the latest row in the moving average of row times
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SECONDS_A_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class Metrics(Collector):
    """The counts of the server, with the load of the engine and the size of the answers that clients have not read.
    For the event loop."""

    def __init__(self, load: Callable[[], Load], unread_bytes: Callable[[], int], model_name: str) -> None:
        self._load, self._unread_bytes, self._model_name = load, unread_bytes, model_name
        self.stats, self.timing = Stats(), Timing()
        self.row_s = 0.0  # moving average of how long a row keeps its slot
        self.num_prompt_tokens = self.num_cached_tokens = 0
        self.num_ended: Counter[str] = Counter()
        self.registry = CollectorRegistry()
        self.registry.register(self)
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._queue = self._histogram("request_queue_time", "Time from submission to a slot.")
        self._first = self._histogram("time_to_first_token", "Time from submission to the first tokens.")
        self._whole = self._histogram("e2e_request_latency", "Time from submission to the end.")
        about = "Mean time per token after the first ones."
        self._token = self._histogram("time_per_output_token", about, _SECONDS_A_TOKEN)

    def _histogram(self, name: str, about: str, bounds: tuple[float, ...] = _SECONDS) -> Histogram:
        one = Histogram(f"outrider:{name}_seconds", about, ["model_name"], buckets=bounds, registry=self.registry)
        return one.labels(self._model_name)

    def count(self, arrived: Arrived) -> None:
        """Count one round's results, before the chunks are appended to ``job.chunks``: a job without chunks is new.
        Only the round's first chunk carries its timing."""
        rows = [(ticket, ticket.states[number], item) for ticket, number, item in arrived if ticket.steps is None]
        chunks = [item for _, _, item in rows if isinstance(item, Chunk)]
        self.timing += sum((chunk.timing for chunk in chunks[:1]), Timing())
        self.stats += sum((chunk.stats for chunk in chunks), Stats())
        for ticket, job, item in rows:
            has_failed = isinstance(item, Exception)
            if not (has_failed or job.chunks):
                self.num_prompt_tokens += job.num_prompt_tokens
                self.num_cached_tokens += item.num_cached_tokens
                self._queue.observe(job.begun_s - ticket.submitted_s)
                self._first.observe(job.first_s - ticket.submitted_s)
            reason = "error" if has_failed else item.finish_reason
            if reason is None or ticket.num_open == 0:  # the cancelled ones have been counted
                continue
            self.count_end(reason)
            if job.first_s:
                self.row_s += _NEWEST * (job.last_s - job.begun_s - self.row_s)
            if not has_failed:
                self._whole.observe(job.last_s - ticket.submitted_s)
                if (num_tokens := len(job.origins)) > 1:
                    self._token.observe((job.last_s - job.first_s) / (num_tokens - 1))

    def count_end(self, reason: str, num_rows: int = 1) -> None:
        if num_rows:
            self.num_ended[reason] += num_rows

    def collect(self) -> Iterator[Metric]:
        # Each is read once, so that the counts of a scrape belong together.
        stats, load, times = self.stats, self._load(), self.timing.to_json()
        for key, about, value in (
            ("num_requests_running", "Sequences being generated.", load.num_running),
            ("num_requests_filling", "Sequences in prefill.", load.num_filling),
            ("num_requests_waiting", "Sequences waiting for a slot.", load.num_waiting),
            ("num_free_slots", "Free slots.", load.num_free_slots),
            ("unread_bytes", "Size of answers that clients have not read.", self._unread_bytes()),
        ):
            gauge = GaugeMetricFamily(f"outrider:{key}", about, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        yield self._counter("outrider:prompt_tokens", "Prompt tokens.", self.num_prompt_tokens)
        yield self._counter("outrider:cached_tokens", "Prompt tokens found in the cache.", self.num_cached_tokens)
        yield self._counter("outrider:generation_tokens", "Generated tokens.", stats.num_generated_tokens)
        ended = dict(sorted(self.num_ended.items()))
        yield self._counter("outrider:requests", "Sequences ended, by reason.", ended, "finished_reason")
        seconds = {part: times[part] for part in ("prefill", "draft", "verify", "rest")}
        yield self._counter("outrider:seconds", "Time of the engine, by phase.", seconds, "part")
        accepted = [sum(stats.acceptance_histogram[place + 1 :]) for place in range(len(stats.drafted_histogram) - 1)]
        for name in ("outrider:spec_decode_num", "vllm:spec_decode_num"):
            about = "Rounds of sequences in which tokens were drafted."
            yield self._counter(f"{name}_drafts", about, num_spec_steps(stats))
            yield self._counter(f"{name}_draft_tokens", "Drafted tokens.", stats.num_draft_tokens)
            about = "Accepted drafted tokens."
            yield self._counter(f"{name}_accepted_tokens", about, stats.num_accepted_draft_tokens)
            by_place = {str(place): num for place, num in enumerate(accepted)}
            about = "Accepted drafted tokens, by position."
            yield self._counter(f"{name}_accepted_tokens_per_pos", about, by_place, "position")

    def _counter(self, name: str, about: str, value: float | Mapping[str, float], *labels: str) -> Metric:
        family = CounterMetricFamily(name, about, labels=["model_name", *labels])
        for label, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            family.add_metric([self._model_name, *([label] if labels else [])], number)
        return family


def num_spec_steps(stats: Stats) -> float:
    """Rounds in which tokens were drafted."""
    return stats.num_rounds - sum(stats.drafted_histogram[:1])
