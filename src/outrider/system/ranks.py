"""The processes of one job (``torchrun``): each holds a share of the target, and all run the same program.

They reach the same decisions without communication, since noise is a pure function of the seed, and an all-reduce gives
the same bits in every process: the ring of gloo and the algorithms of NCCL send each finished sum to all unchanged
(https://github.com/NVIDIA/nccl/issues/434, 855 and 1497). All other inputs of decisions (a random seed, a measured
time, a terminal, a file that one process writes) come from the first process: ``shared`` and ``of_first``.
``Agreement`` checks every round that the processes agree, since the output would be wrong otherwise.

The job belongs to the process, as torch's process group does, and is kept by this module. Nothing here knows models.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import DeviceError, OutriderError, RankError

if TYPE_CHECKING:
    from torch import Tensor

_Value = TypeVar("_Value")
_TIMEOUT = timedelta(hours=2)  # others wait while the first writes to a slow reader; a dead process is noticed at once
_LAST_WORDS_S = 10.0  # for the first process to finish writing when the job ends


class Ranks:
    """Processes that run together, seen from one of them.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        is_interrupted: Ctrl-C was pressed; takes effect where all processes can act alike (``Agreement.check``).
        has_begun: a round was run.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size = rank, size
        self.is_interrupted = self.has_begun = False
        self._store = store

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def shared(self, value: _Value) -> _Value:
        """Broadcast the first process's value. Every process must call it."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, device=_cpu())
        return values[0]

    def of_first(self, make: Callable[[], _Value]) -> _Value:
        """Call ``make`` in the first process and broadcast its result. Every process must call this. Raises
        OutriderError: raised by ``make``, in all processes."""
        if self.size == 1:
            return make()
        value: Any = None
        failure: OutriderError | None = None
        if self.is_first:
            try:
                value = make()
            except OutriderError as error:
                failure = error
        value, failure = self.shared((value, failure))
        if failure is not None:
            raise failure
        result: _Value = value
        return result

    def of_all(self, value: _Value) -> list[_Value]:
        """Gather the values of all processes, by rank. Every process must call it."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def own_path(self, path: Path) -> Path:
        """Path that this process writes: the file in the first process, the null device in the others."""
        return path if self.is_first else Path(os.devnull)

    def fail(self) -> bool:
        """Record that this process has failed. Returns whether it is the first, which reports the reason."""
        return self.size == 1 or bool(self._store.add("failed", 1) == 1)

    def leave(self) -> None:
        """Close the connections, so that no process waits for this one; the first may finish its writing."""
        import torch.distributed as dist

        if self.is_first:
            self._store.set("first has left", "")
        dist.destroy_process_group()
        end = time.monotonic() + _LAST_WORDS_S
        with suppress(dist.DistError):  # the store may be gone too
            # Polled, since a wait would block the store for the other threads.
            while time.monotonic() < end and not self._store.check(["first has left"]):
                time.sleep(0.02)


_ranks = Ranks()


def current_ranks() -> Ranks:
    """Job that this process has joined; a job of one until then."""
    return _ranks


def is_one_of_several() -> bool:
    """Whether torchrun has started this process and others."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ["WORLD_SIZE"] != "1"


def join() -> Ranks:
    """Join the job if torchrun has started one. Each process takes the CUDA device of its local rank. Raises
    DeviceError: there are fewer CUDA devices than processes."""
    global _ranks
    if _ranks.size > 1 or not is_one_of_several():
        return _ranks
    import torch
    import torch.distributed as dist

    has_cuda = torch.cuda.is_available()
    if has_cuda:
        local_rank, num_devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local_rank >= num_devices:
            raise DeviceError(
                f"there are {os.environ['LOCAL_WORLD_SIZE']} processes and {num_devices} CUDA devices here: "
                f"torchrun --nproc-per-node {num_devices}"
            )
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo", timeout=_TIMEOUT)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address)  # type: ignore[attr-defined]  # torchrun's own
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    _ranks = Ranks(
        dist.get_rank(),
        dist.get_world_size(),
        dist.PrefixStore(f"outrider {attempt}", store),  # type: ignore[attr-defined]
    )
    return _ranks


def has_lost_others(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, means that another process does not answer."""
    import torch.distributed as dist

    while error is not None:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


class Agreement:
    """Running checksum of requests, decisions and committed tokens, compared between the processes of a job. It costs
    one more all-reduce per round, and nothing in a process that is alone."""

    def __init__(self) -> None:
        self._checksum = 0

    def note(self, value: object) -> None:
        """Add a value that must be equal in all processes; its ``repr`` is compared at the next check."""
        if current_ranks().size > 1:
            self._checksum = zlib.crc32(repr(value).encode(), self._checksum)

    def check(self, report: Tensor) -> None:
        """Compare with the other processes, at the end of a round.

        Args:
            report: of the round, on the host: see ``Judged``.

        Raises:
            RankError: they differ.
            KeyboardInterrupt: one of them was interrupted; raised in all, at the same round.
        """
        ranks = current_ranks()
        if ranks.size == 1:
            return
        import torch
        import torch.distributed as dist

        ranks.has_begun = True
        self._checksum = zlib.crc32(report.numpy().tobytes(), self._checksum)
        # The maxima of x and of -x: all processes agree if they belong to one x.
        extremes = torch.tensor([self._checksum, -self._checksum, ranks.is_interrupted])
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
        largest, smallest, is_interrupted = extremes.tolist()
        if largest != -smallest:
            raise RankError(
                "the processes of this job have generated different tokens, so the output would be wrong: check that "
                "all have the same files, versions and kind of device"
            )
        if is_interrupted:
            raise KeyboardInterrupt


def _cpu() -> Any:
    import torch

    return torch.device("cpu")
