"""Compiles steps in the background: loads programs from disk, or has another process compile them.

Threads of this process pack calls, look on disk and load programs; callers get futures.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import Pipe
from typing import Any

import torch

from outrider.compile import program_cache
from outrider.compile.own_threads import num_threads_here
from outrider.compile.pickling import code_of, key_of, pack, weights_of
from outrider.compile.program_cache import CompiledProgram, LoadedProgram
from outrider.compile.worker import CompileJob, reason_of
from outrider.errors import CompileError
from outrider.runtime.execution import Call, Program

_LOG = logging.getLogger(__name__)
_HEAD_START_S = 0.3  # for requests that do not wait: they start before compiling takes time
_IDLE_S = 20.0  # after which an idle process ends; it holds some hundred megabytes
_NICENESS = 10  # of a process that compiles during generation, on a single core


@dataclass(slots=True, eq=False)
class ProgramOrder:
    """Order for a program.

    Attributes:
        call: until it is packed, since it holds a cache.
        is_urgent: a caller waits for it.
        what: the step and its model.
        num_threads: of torch where the program runs.
        program: future result.
        was_found: it was on disk.
        process: compiles it now.
    """

    call: Call | None
    is_urgent: bool
    what: str
    lm: Any
    num_threads: int
    program: Future[Program] = field(default_factory=Future)
    was_found: bool = False
    ordered_s: float = field(default_factory=time.monotonic)
    job: CompileJob | None = None
    process: Process | None = None
    key: str = ""

    @classmethod
    def of(cls, call: Call, is_urgent: bool, num_threads: int = 1) -> ProgramOrder:
        return cls(call, is_urgent, f"{call.step.__name__.strip('_')} of {call.lm.name}", call.lm, num_threads)


class CompileService:
    """Compiles steps in other processes. Callers own the programs.

    Attributes:
        num_orders: so far.
    """

    def __init__(
        self,
        *,
        num_processes: int = 1,
        is_beside: bool = False,
        on_order: Callable[[ProgramOrder], None] = lambda order: None,
    ) -> None:
        """
        Args:
            is_beside: sequences are generated meanwhile.
            on_order: called with every order.
        """
        self.num_orders = 0
        self._is_beside, self._on_order = is_beside, on_order
        self._num_compiling = 0
        self._threads = [self._look_up, *[self._compile] * num_processes]  # not yet started
        self._changed = threading.Condition()
        self._open: list[ProgramOrder] = []
        self._new: list[ProgramOrder] = []
        self._to_compile: list[ProgramOrder] = []
        self._reported: set[str] = set()

    @property
    def num_open(self) -> int:
        """Number of programs that are ordered and not ready."""
        return len(self._open)

    def order(self, call: Call, *, is_urgent: bool) -> ProgramOrder:
        order = ProgramOrder.of(call, is_urgent, torch.get_num_threads())
        self._on_order(order)
        with self._changed:
            while self._threads:
                threading.Thread(target=self._threads.pop(), name="outrider-compile", daemon=True).start()
            self.num_orders += 1
            self._open.append(order)
            self._new.append(order)
            self._changed.notify_all()
        return order

    @contextmanager
    def room(self) -> Iterator[None]:
        """Run an eager step on one thread fewer while something is compiled. (The threads of an operation wait for each
        other: where one of them has no core for a moment, all wait, and generation is twenty times slower.)"""
        full = torch.get_num_threads()
        if self._num_compiling == 0 or full == 1:
            yield
            return
        with num_threads_here(full - 1):
            yield

    def hurry(self, program: Future[Program]) -> None:
        """Raise the priority of a program: a caller waits for it now."""
        with self._changed:
            for order in self._open:
                if order.program is program:
                    order.is_urgent = True
                    if order.process is not None:
                        order.process.hurry()

    def _take(self, orders: list[ProgramOrder], timeout_s: float | None = None) -> ProgramOrder | None:
        """Remove and return the first urgent order, else the first."""
        with self._changed:
            if not self._changed.wait_for(lambda: orders, timeout_s):
                return None
            order = next((one for one in orders if one.is_urgent), orders[0])
            orders.remove(order)
            return order

    # The two threads keep no order while they wait for the next: it would keep its model in memory.

    def _look_up(self) -> None:
        while True:
            order = self._take(self._new)
            assert order is not None
            with self._failing(order):
                self._find(order)
            del order

    def _find(self, order: ProgramOrder) -> None:
        """Load a program from disk, or queue it for compilation."""
        if not order.is_urgent:
            time.sleep(max(0.0, order.ordered_s + _HEAD_START_S - time.monotonic()))
        assert order.call is not None
        packed, model = pack(order.call), order.lm.model
        order.call = None
        order.key = key_of(model, packed, order.num_threads)
        compiled = program_cache.find(order.key)
        if compiled is not None:
            order.was_found = True
            try:
                self._finish(order, compiled)
                return
            except Exception as error:  # a loader may raise anything for a file of another release
                order.was_found = False
                _LOG.warning("a program on disk cannot be loaded (%s): compiling it again", type(error).__name__)
        order.job = CompileJob(packed, code_of(model), order.num_threads)
        with self._changed:
            self._to_compile.append(order)
            self._changed.notify_all()

    def _compile(self) -> None:
        process: Process | None = None
        while True:
            order = self._take(self._to_compile, None if process is None else _IDLE_S)
            if order is None:
                assert process is not None
                process.close()
                process = None
                continue
            with self._failing(order):
                process = self._make(order, process)
            del order

    def _make(self, order: ProgramOrder, process: Process | None) -> Process | None:
        """Compile a program. Returns the process if it is still alive."""
        assert order.job is not None
        num_ready = self.num_orders - self.num_open
        _LOG.info("compiling %s (%d of %d programs ready)", order.what, num_ready, self.num_orders)
        with self._changed:
            self._num_compiling += 1
        try:
            process = process or Process(self._is_beside)
            order.process = process
            if order.is_urgent:
                process.hurry()
            compiled = process.make(order.job)
        except Exception as error:  # it has ended, or could not be started
            reason = f"cannot be started: {error}" if process is None else process.close()
            self._fail(order, f"the compile process {reason}")
            return None
        finally:
            order.process = None
            with self._changed:
                self._num_compiling -= 1
        if isinstance(compiled, str):
            self._fail(order, compiled)
            return process
        with self._failing(order):
            program_cache.keep(order.key, compiled)
            self._finish(order, compiled)
        if self._is_beside and not self._open:
            _LOG.info("all %d programs are ready", self.num_orders)
        return process

    @contextmanager
    def _failing(self, order: ProgramOrder) -> Iterator[None]:
        """Report an error as the reason why there is no program."""
        try:
            yield
        except Exception as error:  # errors of arbitrary models have no common type
            self._fail(order, reason_of(error))

    def _finish(self, order: ProgramOrder, compiled: CompiledProgram) -> None:
        # Programs call functions of this library by name.
        from outrider.kernels.library import check_threads

        check_threads(order.num_threads)
        program = LoadedProgram(compiled, weights_of(order.lm.model))
        self._close(order)
        order.program.set_result(program)

    def _fail(self, order: ProgramOrder, reason: str) -> None:
        message = f"{order.lm.name} cannot be compiled here: {reason}"
        if not (order.is_urgent or message in self._reported):
            self._reported.add(message)
            _LOG.warning("%s; it runs eagerly", message)
        self._close(order)
        order.program.set_exception(CompileError(message))

    def _close(self, order: ProgramOrder) -> None:
        order.call = order.job = order.lm = None
        with self._changed:
            self._open.remove(order)


class Process:
    """Process that compiles programs (worker.py)."""

    def __init__(self, is_beside: bool) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()
        number = theirs.fileno()
        # It has this process's import path, and compiles without a process pool of its own.
        # (-P: not the current folder, unless it is on that path.)
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from outrider.compile.worker import serve; serve({number})"],
            env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C is for this process alone; the other ends with all its children
        )
        theirs.close()
        with suppress(OSError):  # not allowed everywhere
            if is_beside and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
            elif is_beside:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def hurry(self) -> None:
        """Raise its priority: a caller waits for it."""
        with suppress(OSError):
            if sys.platform == "linux" and os.sched_getscheduler(self._process.pid) == os.SCHED_IDLE:
                os.sched_setscheduler(self._process.pid, os.SCHED_OTHER, os.sched_param(0))

    def make(self, job: CompileJob) -> CompiledProgram | str:
        """Compile a program; return it, or the reason why there is none. Raises EOFError, OSError: the process died."""
        self._connection.send(job)
        answer: CompiledProgram | str = self._connection.recv()
        return answer

    def close(self) -> str:
        """End the process and say how it ended. (It exits when its connection is closed.)"""
        self._connection.close()
        code = self._process.wait()
        with self._output:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines()
        if code < 0:
            return f"was killed by signal {-code} (the memory may be full)"
        return f"failed: {lines[-1][:300] if lines else f'exit code {code}'}"


@lru_cache
def shared_service(waits: bool) -> CompileService:
    """Service of this process: one for steps that wait for their programs, one for those that run eagerly meanwhile."""
    return CompileService(is_beside=not waits)
