"""Checks a constraint in a limited process before it is read here.

A few hundred bytes can keep llguidance busy for hours: it decides whether a string can match all patterns of a schema
by expanding them, and none of its limits (``LLParserLimits``) counts that work. Nor can it be interrupted. So a process
with limited processor time and memory reads each constraint first, and can be killed at any time.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import lru_cache
from types import TracebackType

from outrider.errors import ConstraintNotRead

_MOST_CPU_S = 2  # ordinary constraints take 0.1, most of it for the start of Python
_MOST_MEMORY = 2**30
_MOST_S = 60.0  # for a machine so busy that the process gets no processor time

# Imports nothing of this package, which would take longer than all the rest, and is nice to other requests. The hard
# limit on time is above the soft one, since it ends the process by the same signal as others do. Windows has no such
# limits, and macOS none of memory: there the caller's limit of time remains.
_PROGRAM = """
import contextlib, os, sys
with contextlib.suppress(AttributeError, OSError):
    os.nice(10)
import llguidance
grammar = sys.stdin.buffer.read().decode()
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1]) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
print("limited", flush=True)
llguidance.LLMatcher.validate_grammar_with_warnings(grammar)
"""
# Exit codes at a limit: of time, of memory (in llguidance or in Python), of the stack.
_ENDS_BY_LIMITS = (-24, -6, 1, -11)  # SIGXCPU, SIGABRT, an error of Python, SIGSEGV: Windows knows only the third


class Reading:
    """Checks grammars. Another thread may stop it, which kills the process at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def __enter__(self) -> Reading:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def can_be_read(self, grammar: str) -> bool:
        """Whether llguidance can validate a grammar, in its own format, within the limits.

        Raises:
            ConstraintNotRead: it was stopped; or the machine is too busy.
        """
        verdict = _verdict(grammar)
        if not verdict:
            verdict.append(self._read(grammar))
        return verdict[0]

    def _read(self, grammar: str) -> bool:
        with self._begin() as process:
            try:
                said, _ = process.communicate(grammar.encode(), timeout=_MOST_S)
            except subprocess.TimeoutExpired:
                raise ConstraintNotRead(f"the constraint was not read within {_MOST_S:g} seconds: try again") from None
            finally:
                process.kill()  # no effect if it has ended
        if process.returncode == 0:
            return True
        if said and process.returncode in _ENDS_BY_LIMITS:
            return False
        raise ConstraintNotRead(
            f"the process that reads constraints has ended (status {process.returncode}): try again"
        )

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-c", _PROGRAM, str(_MOST_CPU_S), str(_MOST_MEMORY)]
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_stopped:
                raise ConstraintNotRead("the request for the constraint was cancelled")
            try:
                self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
            except OSError as error:
                raise ConstraintNotRead(
                    f"no process can be started to read the constraint ({error.strerror})"
                ) from None
            return self._process


@lru_cache(maxsize=64)
def _verdict(grammar: str) -> list[bool]:
    """Cell for the result of checking a grammar, filled once it is known."""
    return []
