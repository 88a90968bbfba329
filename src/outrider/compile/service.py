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
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing import Pipe
from queue import Empty, SimpleQueue
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
_HEAD_START_S = 0.3  # before the first program: importing the compiler would delay the first tokens
_IDLE_S = 20.0  # after which an idle process ends; it holds some hundred megabytes


@dataclass(slots=True, eq=False)
class ProgramOrder:
    """Order for a program.

    Attributes:
        call: until it is packed, since it holds a cache.
        what: the step and its model.
        num_threads: of torch where the program runs.
        program: future result.
        was_found: it was on disk.
    """

    call: Call | None
    what: str
    lm: Any
    num_threads: int
    program: Future[Program] = field(default_factory=Future)
    was_found: bool = False
    job: CompileJob | None = None
    key: str = ""

    @classmethod
    def of(cls, call: Call, num_threads: int = 1) -> ProgramOrder:
        return cls(call, f"{call.step.__name__.strip('_')} of {call.lm.name}", call.lm, num_threads)


class CompileService:
    """Compiles steps in other processes, in order. Callers own the programs.

    Attributes:
        num_orders: so far.
        num_open: those that are not ready.
    """

    def __init__(
        self, *, num_processes: int = 1, on_order: Callable[[ProgramOrder], None] = lambda order: None
    ) -> None:
        """
        Args:
            on_order: called with every order.
        """
        self.num_orders = self.num_open = 0
        self._on_order = on_order
        self._threads = [self._look_up, *[self._compile] * num_processes]  # not yet started
        self._lock = threading.Lock()
        self._new: SimpleQueue[ProgramOrder] = SimpleQueue()
        self._to_compile: SimpleQueue[ProgramOrder] = SimpleQueue()
        self._is_beside = self._has_failed = False  # sequences are generated meanwhile; a program could not be made
        self._reported: set[str] = set()

    def order(self, call: Call) -> ProgramOrder:
        order = ProgramOrder.of(call, torch.get_num_threads())
        self._on_order(order)
        with self._lock:
            while self._threads:
                threading.Thread(target=self._threads.pop(), name="outrider-compile", daemon=True).start()
            self.num_orders += 1
            self.num_open += 1
        self._new.put(order)
        return order

    @contextmanager
    def room(self) -> Iterator[None]:
        """Run an eager step on one thread fewer while something is compiled. (The threads of an operation wait for each
        other: where one of them has no core for a moment, all wait, and generation is twenty times slower.)"""
        self._is_beside = True
        full = torch.get_num_threads()
        if self.num_open == 0 or full == 1:
            yield
            return
        with num_threads_here(full - 1):
            yield

    def report(self, error: BaseException) -> None:
        """Log, once, why there is no program."""
        if str(error) not in self._reported:
            self._reported.add(str(error))
            _LOG.warning("%s; it runs eagerly", error)

    # The threads keep no order while they wait for the next: it would keep its model in memory.

    def _look_up(self) -> None:
        time.sleep(_HEAD_START_S)
        while True:
            order = self._new.get()
            with self._failing(order):
                self._find(order)
            del order

    def _find(self, order: ProgramOrder) -> None:
        """Load a program from disk, or queue it for compilation."""
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
        self._to_compile.put(order)

    def _compile(self) -> None:
        process: Process | None = None
        while True:
            try:
                order = self._to_compile.get(timeout=None if process is None else _IDLE_S)
            except Empty:
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
        try:
            process = process or Process()
            compiled = process.make(order.job)
        except Exception as error:  # it has ended, or could not be started
            reason = f"cannot be started: {error}" if process is None else process.close()
            self._fail(order, f"the compile process {reason}")
            return None
        if isinstance(compiled, str):
            self._fail(order, compiled)
            return process
        with self._failing(order):
            program_cache.keep(order.key, compiled)
            self._finish(order, compiled)
        if self._is_beside and self.num_open == 0 and not self._has_failed:
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
        error = CompileError(f"{order.lm.name} cannot be compiled here: {reason}")
        self._has_failed = True
        self._close(order)
        order.program.set_exception(error)

    def _close(self, order: ProgramOrder) -> None:
        order.call = order.job = order.lm = None
        with self._lock:
            self.num_open -= 1


class Process:
    """Process that compiles programs (worker.py)."""

    def __init__(self) -> None:
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
def shared_service() -> CompileService:
    """Service of this process."""
    return CompileService()
