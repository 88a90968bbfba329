"""Programs to order: from disk, or from a process that compiles them while this one goes on.

The work of this process (to pack a call, to look on disk, to load what is made) is done in threads, and whoever orders
a program gets a future of it.
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
_HEAD_START_S = 0.3  # of a text that does not wait: it is to begin before anything else takes time
_IDLE_S = 20.0  # after which a process ends that has nothing to do; it holds some hundred megabytes
_NICENESS = 10  # of a process that compiles beside a text, on a single core


@dataclass(slots=True, eq=False)
class ProgramOrder:
    """A program that is wanted.

    Attributes:
        call: until it is packed, since it holds a cache.
        is_urgent: somebody waits for it.
        what: the step and its model.
        num_threads: of torch where it runs.
        program: to come.
        was_found: it was on disk.
        process: that makes it now.
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
    """Takes orders. What it has made belongs to those who ordered it.

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
            is_beside: texts are generated meanwhile.
            on_order: is shown every order.
        """
        self.num_orders = 0
        self._is_beside, self._on_order = is_beside, on_order
        self._num_compiling = 0
        self._threads = [self._look_up, *[self._compile] * num_processes]  # that have not been started
        self._changed = threading.Condition()
        self._open: list[ProgramOrder] = []
        self._new: list[ProgramOrder] = []
        self._to_compile: list[ProgramOrder] = []
        self._reported: set[str] = set()

    @property
    def num_open(self) -> int:
        """Orders of programs that are not there yet."""
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
        """Held during a step that does not wait: while something is compiled, it leaves one processor to that. (The
        threads of an operation wait for each other. Where one of them has no processor for a moment, all wait: a text
        is twenty times as slow then.)"""
        full = torch.get_num_threads()
        if self._num_compiling == 0 or full == 1:
            yield
            return
        with num_threads_here(full - 1):
            yield

    def hurry(self, program: Future[Program]) -> None:
        """Somebody waits for it now."""
        with self._changed:
            for order in self._open:
                if order.program is program:
                    order.is_urgent = True
                    if order.process is not None:
                        order.process.hurry()

    def _take(self, orders: list[ProgramOrder], timeout_s: float | None = None) -> ProgramOrder | None:
        """The first one, or the first that is urgent."""
        with self._changed:
            if not self._changed.wait_for(lambda: orders, timeout_s):
                return None
            order = next((one for one in orders if one.is_urgent), orders[0])
            orders.remove(order)
            return order

    # The two threads keep no order while they wait for the next: its model would stay in memory.

    def _look_up(self) -> None:
        while True:
            order = self._take(self._new)
            assert order is not None
            with self._failing(order):
                self._find(order)
            del order

    def _find(self, order: ProgramOrder) -> None:
        """A program that is on disk. The others are handed on."""
        if not order.is_urgent:
            time.sleep(max(0.0, order.ordered_s + _HEAD_START_S - time.monotonic()))
        assert order.call is not None
        packed, model = pack(order.call), order.lm.model
        order.call = None
        order.key = key_of(model, packed, order.num_threads)
        made = program_cache.find(order.key)
        if made is not None:
            order.was_found = True
            try:
                self._finish(order, made)
                return
            except Exception as error:  # whatever the loader makes of a file that another release has written
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
        """Returns the process, if it is still there."""
        assert order.job is not None
        num_made = self.num_orders - self.num_open
        _LOG.info("compiling %s (%d of %d programs are there)", order.what, num_made, self.num_orders)
        with self._changed:
            self._num_compiling += 1
        try:
            process = process or Process(self._is_beside)
            order.process = process
            if order.is_urgent:
                process.hurry()
            made = process.make(order.job)
        except Exception as error:  # it has ended, or there can be none here
            reason = f"cannot be started: {error}" if process is None else process.close()
            self._fail(order, f"the process that compiles {reason}")
            return None
        finally:
            order.process = None
            with self._changed:
                self._num_compiling -= 1
        if isinstance(made, str):
            self._fail(order, made)
            return process
        with self._failing(order):
            program_cache.keep(order.key, made)
            self._finish(order, made)
        if self._is_beside and not self._open:
            _LOG.info("nothing is left to compile (%d programs)", self.num_orders)
        return process

    @contextmanager
    def _failing(self, order: ProgramOrder) -> Iterator[None]:
        """What goes wrong here is why there is no program."""
        try:
            yield
        except Exception as error:  # what arbitrary models raise has no common type
            self._fail(order, reason_of(error))

    def _finish(self, order: ProgramOrder, made: CompiledProgram) -> None:
        # Programs call its functions by name.
        from outrider.kernels.library import check_threads

        check_threads(order.num_threads)
        program = LoadedProgram(made, weights_of(order.lm.model))
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
    """One that makes programs (worker.py)."""

    def __init__(self, is_beside: bool) -> None:
        self._connection, theirs = Pipe()
        self._output = tempfile.TemporaryFile()
        number = theirs.fileno()
        # It imports what this process has imported, and compiles without a pool of processes of its own.
        # (-P: nothing from the current folder, unless this process has it among its own.)
        paths = os.pathsep.join(map(os.path.abspath, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from outrider.compile.worker import serve; serve({number})"],
            env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # Ctrl-C is for this process; and the other one ends with all that it has started
        )
        theirs.close()
        with suppress(OSError):  # not everywhere is it allowed
            if is_beside and sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1:
                os.sched_setscheduler(self._process.pid, os.SCHED_IDLE, os.sched_param(0))
            elif is_beside:
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def hurry(self) -> None:
        """Somebody waits for it."""
        with suppress(OSError):
            if sys.platform == "linux" and os.sched_getscheduler(self._process.pid) == os.SCHED_IDLE:
                os.sched_setscheduler(self._process.pid, os.SCHED_OTHER, os.sched_param(0))

    def make(self, job: CompileJob) -> CompiledProgram | str:
        """A program, or why there is none. Raises EOFError, OSError: it has ended."""
        self._connection.send(job)
        answer: CompiledProgram | str = self._connection.recv()
        return answer

    def close(self) -> str:
        """End it; or tell how it has ended. (It ends when nobody can send it anything any more.)"""
        self._connection.close()
        code = self._process.wait()
        with self._output:
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").splitlines()
        if code < 0:
            return f"was ended by signal {-code} (the memory may be full)"
        return f"has failed: {lines[-1][:300] if lines else f'exit code {code}'}"


@lru_cache
def shared_service(waits: bool) -> CompileService:
    """The service of this process: one for steps that wait for their programs, one for those that go on meanwhile."""
    return CompileService(is_beside=not waits)
