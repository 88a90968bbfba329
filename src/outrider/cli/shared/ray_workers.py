"""Workers on a Ray cluster: processes with the models, perhaps on other machines.

The driver process reads prompts and writes rows, so files are the same with and without Ray, and the output file is the
only record of progress. Workers receive batches of prompts and send each row when it ends. If a worker is lost, other
workers get the prompts of its batch that have no row yet.

Ray Core: https://docs.ray.io/en/releases-2.60.0/ray-core/actors.html and .../ray-core/ray-generator.html.
(docs/internals/log/2026.md explains why it is not Ray Data.)
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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

# Slots idle at the end of a batch, so a batch refills each slot many times. Rows already sent survive the loss of a
# worker, so a long batch costs nothing else, except at the end of the job (see _batches).
_MOST_ROUNDS = 32
_MOST_LOSSES = 3  # of workers in succession, without a row in between

_Batch = dict[int, PromptLine]


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
            remedy = "rows cannot be streamed through Ray Client: start the command on the cluster, with --ray auto"
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
        OptionError: there is no such cluster.
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
        self._num_workers = room if num_workers is None else num_workers
        self._num_slots, self._num_prompts = num_slots, num_prompts
        actor = ray.remote(_RemoteWorker).options(num_cpus=num_cpus, num_gpus=num_gpus)
        self._new: Callable[[], Any] = lambda: actor.remote(setup, num_slots)
        self._actors = [self._new() for _ in range(self._num_workers)]
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

        answers = list(self._about)
        while answers:
            (answer,), answers = ray.wait(answers)
            with suppress(ray.exceptions.RayActorError):  # lost
                about: tuple[str, dict[str, Any]] = _get(answer)
                return about
        raise WorkerError("all workers were lost before they were ready")

    def _all(self, method: str, prompts: Prompts) -> Iterator[tuple[int, Any]]:
        """Hand prompts out in batches, and yield the results as they come, one per prompt.

        Raises:
            WorkerError: too many workers were lost in succession.
        """
        import ray

        running: dict[Any, tuple[Any, _Batch]] = {}  # by result stream: the worker, and its unfinished prompts

        def start(actor: Any, batch: _Batch) -> None:
            running[getattr(actor, method).remote(list(batch.items()))] = actor, batch

        for actor in self._actors:
            start(actor, {})  # ends when the worker is up: a pending one must not hold prompts
        fresh = self._batches(iter(prompts))
        todo = deque(islice(fresh, 1))
        idle: list[Any] = []
        num_losses = 0
        while todo or any(batch for _, batch in running.values()):
            (stream,), _ = ray.wait(list(running), num_returns=1)
            actor, batch = running[stream]
            try:
                results = _get(next(stream))
            except StopIteration:
                del running[stream]
                idle.append(actor)
            except ray.exceptions.RayError as error:
                num_losses += 1
                if num_losses > _MOST_LOSSES:
                    reason = " ".join(str(error).split())
                    raise WorkerError(f"{num_losses} workers were lost in succession: {reason}") from None
                del running[stream]
                if batch:
                    todo.appendleft(batch)
                ray.kill(actor)  # it may still run, with only its results lost
                self._actors[self._actors.index(actor)] = new = self._new()
                start(new, {})
            else:
                for index, result in results:
                    num_losses = 0
                    del batch[index]
                    yield index, result
            while idle and todo:
                start(idle.pop(), todo.popleft())
                if not todo:
                    todo.extend(islice(fresh, 1))

    def _batches(self, prompts: Iterator[tuple[int, PromptLine]]) -> Iterator[_Batch]:
        """Yield batches that shrink as fewer prompts are left, so that workers end at about the same time."""
        num_left = self._num_prompts
        while True:
            share = num_left // (2 * self._num_workers)
            batch = dict(islice(prompts, min(max(share, self._num_slots), _MOST_ROUNDS * self._num_slots)))
            if not batch:
                return
            num_left -= len(batch)
            yield batch


class _RemoteWorker:
    """A worker in its own process. Sends lengths in lists, since they are fast to compute, and each row alone, since
    the next may take long."""

    def __init__(self, setup: Setup, num_slots: int) -> None:
        self._worker = LocalWorker(setup, num_slots)

    def lengths(self, prompts: list[tuple[int, PromptLine]]) -> Iterator[list[tuple[int, Length | OutriderError]]]:
        yield list(self._worker.lengths(prompts))

    def rows(self, prompts: list[tuple[int, PromptLine]]) -> Iterator[list[tuple[int, tuple[dict[str, Any], Stats]]]]:
        for row in self._worker.rows(prompts):
            yield [row]

    def about(self) -> tuple[str, dict[str, Any]]:
        return self._worker.pair(), self._worker.origin()


def _get(answer: Any) -> Any:
    """Wait for a result. Raises errors of our own code, which would recur on any worker."""
    import ray

    try:
        return ray.get(answer)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


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
