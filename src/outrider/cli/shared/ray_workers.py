"""Workers on a Ray cluster: processes with the models, perhaps on other machines.

The driver process reads prompts and writes rows, so files are the same with and without Ray, and the output file is the
only record of progress. Workers receive batches of prompts, and send the rows of a batch when the batch ends. Ray
starts a lost worker again, and repeats the worker's batch.

Ray Core: https://docs.ray.io/en/releases-2.60.0/ray-core/fault_tolerance/actors.html.
(docs/internals/log/2026.md explains why it is not Ray Data.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import typer

from outrider.cli.shared.pair_options import PairOptions
from outrider.cli.shared.workers import Length, LocalWorker, Prompts, Setup
from outrider.errors import DeviceError, MissingExtra, OptionError, OutriderError, WorkerError
from outrider.offline.prompt_row import PromptLine
from outrider.records import Stats
from outrider.system.ranks import current_ranks

# Slots idle at the end of a batch, so a batch refills each slot several times; but a batch is lost with its worker.
_MOST_ROUNDS = 8
_MAX_RESTARTS = 3  # of a worker

_Batch = list[tuple[int, PromptLine]]


@dataclass(frozen=True)
class RayOptions:
    """Options for workers on Ray."""

    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="With --prompts: run on this Ray cluster. auto: the cluster of this machine. local: all CPU cores of "
            "this machine, without a cluster.",
            rich_help_panel="Machine",
        ),
    ] = None
    ray_workers: Annotated[
        int | None,
        typer.Option(
            help="Number of workers, each with its own models. Default: as many as fit.",
            rich_help_panel="Machine",
        ),
    ] = None

    def check(self, pair: PairOptions) -> None:
        """Raises OptionError."""
        if self.ray is None:
            if self.ray_workers is not None:
                raise OptionError("--ray-workers", self.ray_workers, "it needs a cluster: add --ray ADDRESS")
            return
        if current_ranks().size > 1:
            raise OptionError("--ray", self.ray, "each Ray worker is one process: leave out torchrun")
        if self.ray.startswith("ray://"):
            remedy = "Ray Client is not supported: start the command on the cluster, with --ray auto"
            raise OptionError("--ray", self.ray, remedy)
        if self.ray_workers is not None and self.ray_workers < 1:
            raise OptionError("--ray-workers", self.ray_workers, "a whole number >= 1")
        for name, device in (("--device", pair.device), ("--draft-device", pair.draft_device or "")):
            if device.startswith("cuda:"):
                raise OptionError(name, device, "a Ray worker sees only its own GPU: give cuda")


@contextmanager
def open_ray_workers(options: RayOptions, setup: Setup, num_slots: int, num_prompts: int) -> Iterator[RayWorkers]:
    """Open workers that end with the context, or with this process.

    Args:
        num_slots: prompts generated concurrently by each worker.
        num_prompts: prompts to do.

    Raises:
        MissingExtra: Ray is not installed.
        OptionError: there is no such cluster, or it has no room for so many workers.
        DeviceError: no node can hold a worker.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no telemetry from a cluster started here
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    try:
        ray.init(address=options.ray, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise OptionError("--ray", options.ray, f"{reason} (local: this machine, without a cluster)") from None
    try:
        yield RayWorkers(setup, num_slots, options.ray_workers, num_prompts)
    finally:
        ray.shutdown()


class RayWorkers:
    """Implements ``Workers`` on Ray.

    Args:
        num_workers: None for as many as fit.
    """

    def __init__(self, setup: Setup, num_slots: int, num_workers: int | None, num_prompts: int) -> None:
        import ray

        num_cpus, num_gpus = max(1, setup.pair.threads or 1), _num_gpus(setup.pair.device)
        room = _room(num_cpus, num_gpus)
        if not room:
            wanted = f"{num_cpus} CPU cores" + (" and a GPU" if num_gpus else "")
            raise DeviceError(f"no node of the Ray cluster has {wanted} for a worker: lower --threads, or --device cpu")
        if num_workers is not None and num_workers > room:
            raise OptionError("--ray-workers", num_workers, f"the cluster has room for {room}")
        self._num_workers = num_workers or room
        self._num_slots, self._num_prompts = num_slots, num_prompts
        retried = {"max_restarts": _MAX_RESTARTS, "max_task_retries": _MAX_RESTARTS}
        actor = ray.remote(_RemoteWorker).options(num_cpus=num_cpus, num_gpus=num_gpus, **retried)
        self._actors = [actor.remote(setup, num_slots) for _ in range(self._num_workers)]
        # Requested first: after Ctrl-C it would wait for the current batch.
        self._about = [actor.about.remote() for actor in self._actors]

    def lengths(self, prompts: Prompts) -> Iterator[tuple[int, Length | OutriderError]]:
        return self._all("lengths", prompts)

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, tuple[dict[str, Any], Stats]]]:
        return self._all("rows", prompts)

    def pair(self) -> str:
        return self._first_about()[0]

    def origin(self) -> dict[str, Any]:
        """Provenance of a worker, with this process's command."""
        return self._first_about()[1] | {"argv": sys.argv[1:]}

    def _first_about(self) -> tuple[str, dict[str, Any]]:
        """Pair and provenance from the first worker that answers."""
        import ray

        (answer, *_), _ = ray.wait(self._about)
        with _own_errors():
            about: tuple[str, dict[str, Any]] = ray.get(answer)
        return about

    def _all(self, method: str, prompts: Prompts) -> Iterator[tuple[int, Any]]:
        """Hand prompts out in batches, and yield the results of each batch when the batch ends.

        Raises:
            WorkerError: a worker was lost too often, or could not start.
        """
        import ray

        batches = self._batches(iter(prompts))
        batch, num_running = next(batches, None), 0
        # A worker that still waits for a place must not hold prompts.
        answers = {about: (actor, False) for about, actor in zip(self._about, self._actors, strict=True)}
        while batch is not None or num_running:
            (answer, *_), _ = ray.wait(list(answers))
            actor, is_batch = answers.pop(answer)
            with _own_errors():
                results = ray.get(answer)
            num_running -= is_batch
            if batch is not None:
                answers[getattr(actor, method).remote(batch)] = actor, True
                batch, num_running = next(batches, None), num_running + 1
            if is_batch:
                yield from results

    def _batches(self, prompts: Iterator[tuple[int, PromptLine]]) -> Iterator[_Batch]:
        """Yield batches that shrink as fewer prompts are left, so that workers end at about the same time."""
        num_left = self._num_prompts
        while True:
            share = num_left // (2 * self._num_workers)
            batch = list(islice(prompts, min(max(share, self._num_slots), _MOST_ROUNDS * self._num_slots)))
            if not batch:
                return
            num_left -= len(batch)
            yield batch


class _RemoteWorker:
    """A worker in its own process. A batch is sent whole, so that no row comes twice when Ray repeats a batch."""

    def __init__(self, setup: Setup, num_slots: int) -> None:
        self._worker = LocalWorker(setup, num_slots)

    def lengths(self, prompts: _Batch) -> list[tuple[int, Length | OutriderError]]:
        return list(self._worker.lengths(prompts))

    def rows(self, prompts: _Batch) -> list[tuple[int, tuple[dict[str, Any], Stats]]]:
        return list(self._worker.rows(prompts))

    def about(self) -> tuple[str, dict[str, Any]]:
        return self._worker.pair(), self._worker.origin()


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of our own code, which would recur on any worker, as they were raised there.

    Raises:
        WorkerError: a worker ended otherwise, and Ray has given up.
    """
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a worker ended: {' '.join(str(error).split())}") from None


def _num_gpus(device: str) -> int:
    """GPUs per worker."""
    import ray

    if device == "auto":
        return int(ray.cluster_resources().get("GPU", 0) > 0)
    return int(device == "cuda")


def _room(num_cpus: int, num_gpus: int) -> int:
    """Number of workers that fit on the cluster's nodes."""
    import ray

    num_workers = 0
    for node in ray.nodes():
        if node["Alive"]:
            has = node["Resources"]
            num_workers += int(
                min(has.get("CPU", 0) // num_cpus, has.get("GPU", 0) // num_gpus if num_gpus else float("inf"))
            )
    return num_workers
