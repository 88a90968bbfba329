"""Tensor parallelism: processes of one job (``torchrun``) that share each layer of a model.

The first process runs the program: options, prompts, drawing, files, output. The others follow it: they make the same
calls on a shared model and its caches, on their own shares (``in_all_processes``). All other code is that of one
process. An object that exists in all is a twin: its ``twin_key`` names it in the others, copies have the same, and
calls send its attributes ``TOLD``. Without a key it belongs to one process.

A call that fails ends the job, unless it fails in all: an error of the prompt does, and one raised by ``together``.
The job belongs to the process, as torch's process group does, and is kept by this module. Nothing here knows models.
"""

from __future__ import annotations

import atexit
import copyreg
import io
import itertools
import os
import pickle
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.errors import DeviceError, OutriderError, PromptError, RankError

if TYPE_CHECKING:
    from torch import Tensor

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Result = TypeVar("_Result")
_TIMEOUT = timedelta(days=365)  # the first process may be idle; a process that has died is noticed at once


def in_all_processes(function: _Function) -> _Function:
    """Decorator of a function of a twin: all processes call it. If it returns a new twin, this exists in all, too."""

    @wraps(function)
    def call(twin: Any, *arguments: Any, **options: Any) -> Any:
        if twin.twin_key is None or _ranks.is_within:  # the others make an inner call within the outer one
            return function(twin, *arguments, **options)
        return _ranks.call(call, (twin, *arguments), options)

    return call  # type: ignore[return-value]


class Ranks:
    """Processes that run together, seen from one of them.

    Attributes:
        rank: of this process, from 0.
        size: number of processes.
        is_interrupted: Ctrl-C was pressed; takes effect before the next call, while the others are idle.
        agreed: the error that all processes have raised last.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store
        self.is_interrupted = self._has_failed = False
        self.agreed: OutriderError | None = None
        self._lock = threading.Lock()
        self._thread: int | None = None  # of the current call
        self._keys = itertools.count()  # equal in all processes
        self._twins: dict[int, Any] = {}  # in all but the first
        self._ended: deque[int] = deque()  # twins that the others may forget

    @property
    def is_within(self) -> bool:
        """Whether this thread makes a call that all processes make."""
        return self._thread == threading.get_ident()

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: Any = None) -> Any:
        """Call a function in all processes. Raises KeyboardInterrupt: before the call."""
        with self._lock:
            if self.is_interrupted:
                raise KeyboardInterrupt
            call = function, arguments, options or {}
            self._tell(call)
            try:
                return self._run(*call)
            except BaseException as error:
                self._has_failed = not self._fails_in_all(error)
                raise

    def lead(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Results of a function in all processes. Raises OutriderError: the first one of those raised."""
        return self.call(_gathered, (function, arguments))

    def follow(self, module: Any = None) -> None:
        """Make the calls of the first process until it ends. Raises DistError: it was killed, or has failed.
        ``module``: a share that this process has loaded itself (see ``take_part``)."""
        import torch

        if module is not None:
            self.name(module)
        while True:
            received: list[Any] = [None]
            torch.distributed.broadcast_object_list(received, src=0, device=torch.device("cpu"))
            unpickler = pickle.Unpickler(io.BytesIO(received[0]))
            unpickler.persistent_load = self._twin  # type: ignore[method-assign]
            ended, is_inference, call = unpickler.load()
            for key in ended:
                self._twins.pop(key, None)
            if call is None:
                return
            try:
                with torch.inference_mode(is_inference), torch.no_grad():
                    self._run(*call)
            except OutriderError as error:
                if not self._fails_in_all(error):
                    raise

    def leave(self) -> None:
        """End the other processes if they are idle, and close the connections."""
        import torch.distributed as dist

        if self.rank == 0 and not self._has_failed:
            self._tell(None)
        dist.destroy_process_group()

    def fail(self) -> bool:
        """Record that this process has failed. Returns whether it is the first, which reports the reason."""
        return self.size == 1 or bool(self._store.add("failed", 1) == 1)

    def name(self, thing: Any) -> None:
        """Give a twin or a module its key, drawn in all processes in the same order."""
        thing.twin_key = key = next(self._keys)
        if self.rank:
            self._twins[key] = thing
        else:
            owner = getattr(thing, "weights", thing)  # of several LMs that are copies
            weakref.finalize(owner, self._ended.append, key).atexit = False

    def _fails_in_all(self, error: BaseException) -> bool:
        return error is self.agreed or isinstance(error, PromptError)

    def _tell(self, call: tuple[Any, ...] | None) -> None:
        """Send a call to the others; None to end."""
        import torch

        buffer = io.BytesIO()
        pickler = pickle.Pickler(buffer)
        pickler.persistent_id = _told  # type: ignore[method-assign]
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        pickler.dump((ended, torch.is_inference_mode_enabled(), call))
        torch.distributed.broadcast_object_list([buffer.getvalue()], src=0, device=torch.device("cpu"))

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...], options: Any) -> Any:
        self._thread = threading.get_ident()
        try:
            result = function(*arguments, **options)
            if getattr(result, "twin_key", 0) is None:
                self.name(result)
            return result
        finally:
            self._thread = None

    def _twin(self, told: tuple[int, dict[str, Any]]) -> Any:
        key, changes = told
        vars(self._twins[key]).update(changes)
        return self._twins[key]


_ranks = Ranks()


def current_ranks() -> Ranks:
    """Job that this process has joined; a job of one until then."""
    return _ranks


def together(function: Callable[[], _Result]) -> _Result:
    """Result of a function. Within a call of all processes, raises the first OutriderError of any, in all."""
    if not _ranks.is_within:
        return function()
    import torch.distributed as dist

    errors: list[OutriderError | None] = [None] * _ranks.size
    try:
        result, raised = function(), None
    except OutriderError as error:
        raised = error
    dist.all_gather_object(errors, raised)
    _ranks.agreed = next(filter(None, errors), None)
    if _ranks.agreed is not None:
        raise _ranks.agreed
    return result


def any_process(flags: Tensor) -> Tensor:
    """Conditions that hold in this process; within a call of all processes, in any. bool [...]"""
    if not _ranks.is_within:
        return flags
    import torch
    import torch.distributed as dist

    found = flags.to(torch.uint8)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.bool()


def check_equal(function: Callable[..., Any], *arguments: Any) -> None:
    """Raises RankError: a function has different results in the processes."""
    if len(set(_ranks.lead(function, arguments))) > 1:
        remedy = "check that all have the same files and versions"
        raise RankError(f"the processes of this job have generated different tokens, or would: {remedy}")


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
            found = f"{os.environ['LOCAL_WORLD_SIZE']} processes and {num_devices} CUDA devices"
            raise DeviceError(f"there are {found} here: torchrun --nproc-per-node {num_devices}")
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_cuda else "gloo", timeout=_TIMEOUT)
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(*address)  # type: ignore[attr-defined]  # torchrun's own
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    own_store = dist.PrefixStore(f"outrider {attempt}", store)  # type: ignore[attr-defined]
    _ranks = Ranks(dist.get_rank(), dist.get_world_size(), own_store)
    return _ranks


def take_part(module: Any = None) -> Ranks:
    """Join the job. Only the first process returns: the others follow it, and exit when it does. ``module``: a shared
    model in memory, the first of the job; each process has loaded its share itself."""
    is_new = _ranks.size == 1
    ranks = join()
    if ranks.rank:
        ranks.follow(module)
        sys.exit()
    if ranks.size > 1 and is_new:
        atexit.register(ranks.leave)
    if module is not None and "twin_key" not in vars(module):
        if not is_new:
            raise DeviceError("only one shared model in memory is possible, and no other beside it: give names")
        ranks.name(module)
    return ranks


def _told(thing: Any) -> tuple[int, dict[str, Any]] | None:
    key = getattr(thing, "twin_key", None)
    return None if key is None else (key, {name: getattr(thing, name) for name in getattr(thing, "TOLD", ())})


def _reduced(tensor: Tensor) -> Any:
    # By way of the CPU, to the device that each process has.
    return tensor.__reduce_ex__(2) if tensor.device.type == "cpu" else (_on, (tensor.cpu(), tensor.device.type))


def _on(tensor: Tensor, device: str) -> Tensor:
    return tensor.to(device)


def _gathered(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    import torch.distributed as dist

    results: list[Any] = [None] * _ranks.size
    dist.all_gather_object(results, together(partial(function, *arguments)))
    return results
