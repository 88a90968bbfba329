"""Workers on a Ray cluster: processes with the models, perhaps on other machines.

The driver process reads prompts and writes rows, so files are the same with and without Ray. A lost worker ends the
job, and the same command goes on after the rows in the output file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from outrider.cli.shared.options import MACHINE_PANEL, field_of
from outrider.cli.shared.pair_options import PairOptions
from outrider.errors import DeviceError, MissingExtra, OptionError, WorkerError
from outrider.system.ranks import current_ranks

if TYPE_CHECKING:
    from outrider.cli.shared.prompt_job import Length, Prompts, Setup
    from outrider.records import Stats

_MOST_ROUNDS = 8  # prompts per slot in a batch: slots idle at its end, and its rows are written then


@dataclass(frozen=True)
class RayOptions:
    """Options for workers on Ray."""

    ray: str | None = field_of(
        MACHINE_PANEL,
        None,
        "With --prompts: run on this Ray cluster. auto: the cluster of this machine. local: all CPU cores of this "
        "machine, without a cluster.",
        metavar="ADDRESS",
    )
    ray_workers: int | None = field_of(
        MACHINE_PANEL,
        None,
        "Number of workers, each with its own models. Default: as many as fit.",
        min=1,
        metavar="N",
    )

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
        for name, device in (("--device", pair.device), ("--draft-device", pair.draft_device or "")):
            if device.startswith("cuda:"):
                raise OptionError(name, device, "a Ray worker sees only its own GPU: give cuda")


@contextmanager
def open_ray_workers(options: RayOptions, setup: Setup, num_slots: int, num_prompts: int) -> Iterator[RayWorkers]:
    """Open workers for so many prompts, which end with the context, or with this process; each generates ``num_slots``
    at a time. Raises MissingExtra: Ray is not installed; OptionError: there is no such cluster, or no room in it for so
    many workers; DeviceError: no node can hold a worker."""
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


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise errors of our own code as they were raised in the worker. Raises WorkerError: a worker ended otherwise."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise WorkerError(f"a worker ended: {' '.join(str(error).split())}") from None


class RayWorkers:
    """Implements ``Workers`` on Ray: batches of prompts go to actors that are free; as many as fit, unless a number is
    given."""

    def __init__(self, setup: Setup, num_slots: int, num_workers: int | None, num_prompts: int) -> None:
        import ray

        num_cpus, has_gpu = max(1, setup.pair.threads or 1), setup.pair.device == "cuda"
        if setup.pair.device == "auto":
            has_gpu = ray.cluster_resources().get("GPU", 0) > 0
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [one.get("GPU", 0) if has_gpu else 2**31 for one in nodes]
        room = sum(int(min(one.get("CPU", 0) // num_cpus, num)) for one, num in zip(nodes, gpus, strict=True))
        if not room:
            wanted = f"{num_cpus} CPU cores" + (" and a GPU" if has_gpu else "")
            raise DeviceError(f"no node of the Ray cluster has {wanted} for a worker: lower --threads, or --device cpu")
        if num_workers is not None and num_workers > room:
            raise OptionError("--ray-workers", num_workers, f"the cluster has room for {room}")
        self._num_slots, self._num_prompts = num_slots, num_prompts
        actor = ray.remote(_RemoteWorker).options(num_cpus=num_cpus, num_gpus=int(has_gpu))
        self._actors = [actor.remote(setup, num_slots) for _ in range(num_workers or room)]
        # Now: after Ctrl-C they would wait for the current batch.
        self._about = [one.about.remote() for one in self._actors]

    def lengths(self, prompts: Prompts) -> Iterator[Length]:
        return self._all("lengths", prompts)

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, dict[str, Any], Stats]]:
        return self._all("rows", prompts)

    def pair(self) -> str:
        return self._first()[0]

    def origin(self) -> dict[str, Any]:
        return self._first()[1] | {"argv": sys.argv[1:]}

    def _first(self) -> tuple[str, dict[str, Any]]:
        import ray

        (answer, *_), _ = ray.wait(self._about)  # of the first worker that answers
        with _own_errors():
            about: tuple[str, dict[str, Any]] = ray.get(answer)
        return about

    def _all(self, method: str, prompts: Prompts) -> Iterator[Any]:
        import ray

        # Each worker gets several batches, so that all end at about the same time.
        share = self._num_prompts // (4 * len(self._actors))
        size = min(max(share, self._num_slots), _MOST_ROUNDS * self._num_slots)
        remaining, num_running = iter(prompts), 0
        batch = list(islice(remaining, size))
        # A worker gets its first batch when it answers: one that still waits for a place must not hold prompts.
        answers = {about: (actor, False) for about, actor in zip(self._about, self._actors, strict=True)}
        while batch or num_running:
            (answer, *_), _ = ray.wait(list(answers))
            actor, is_batch = answers.pop(answer)
            with _own_errors():
                results = ray.get(answer)
            num_running -= is_batch
            if batch:
                answers[getattr(actor, method).remote(batch)] = actor, True
                batch, num_running = list(islice(remaining, size)), num_running + 1
            if is_batch:
                yield from results


class _RemoteWorker:
    """A worker in its own process. Results of a batch are sent together."""

    def __init__(self, setup: Setup, num_slots: int) -> None:
        from outrider.cli.shared.prompt_job import LocalWorker

        self._worker = LocalWorker(setup, num_slots)

    def lengths(self, prompts: Prompts) -> list[Length]:
        return list(self._worker.lengths(prompts))

    def rows(self, prompts: Prompts) -> list[tuple[int, dict[str, Any], Stats]]:
        return list(self._worker.rows(prompts))

    def about(self) -> tuple[str, dict[str, Any]]:
        return self._worker.pair(), self._worker.origin()
