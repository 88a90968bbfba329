"""Standard streams that are closed, unread or not writable.

- Standard output whose reader has gone (``| head``): output is dropped, files are still written, and the exit code is
  141, as for SIGPIPE.
- Standard output that cannot be written (closed, or a full disk): likewise, with a one-line error and exit code 2.
- Standard error holds messages. Losing them neither ends the work nor changes the exit code.
- A closed stream (``>&-``) is opened on the null device; otherwise the next opened file would take its descriptor and
  receive what libraries print. Input is then empty.

A lost stream is no longer ``writable()``; code that generates only to print may stop there.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import IO, Any, TextIO

from outrider.errors import FileError

_SIGPIPE_CODE = 141  # 128 + SIGPIPE


def guard_streams() -> Callable[[], None]:
    """Make the standard streams of this process safe to write to. Streams that a caller has replaced are left alone.

    Returns:
        A function to call when the command ends. It raises FileError if standard output could not be written, and
        SystemExit if its reader has gone.
    """
    if sys.stdin is None:
        sys.stdin = open(_null(os.O_RDONLY), encoding="utf-8")
    failures: list[OSError] = []
    if sys.stdout is sys.__stdout__:
        sys.stdout = _with_guard(sys.stdout, os.O_RDONLY, failures)  # writing fails, as to a closed stream
    if sys.stderr is sys.__stderr__:
        sys.stderr = _with_guard(sys.stderr, os.O_WRONLY, [])

    def check() -> None:
        sys.stdout.flush()
        for error in failures:
            if isinstance(error, BrokenPipeError):
                raise SystemExit(_SIGPIPE_CODE)
            reason = "it is closed (> /dev/null discards it)" if error.errno == errno.EBADF else error.strerror
            raise FileError(f"cannot write to standard output: {reason}")

    return check


def _with_guard(stream: TextIO | None, flags: int, failures: list[OSError]) -> TextIO:
    """Wrap a stream in a guard.

    Args:
        flags: to open the null device with, if the stream is closed.
    """
    if stream is None:
        inner: IO[bytes] = open(_null(flags), "wb", buffering=0)
        return io.TextIOWrapper(io.BufferedWriter(_Guard(inner, failures)), "utf-8", line_buffering=True)
    assert isinstance(stream, io.TextIOWrapper)
    guard = io.BufferedWriter(_Guard(stream.buffer, failures))
    # Unbuffered (python -u) still flushes at each line end.
    is_eager = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(guard, stream.encoding, stream.errors, line_buffering=is_eager)


class _Guard(io.RawIOBase):
    """Writes to a stream until that fails, then to the null device.

    Args:
        failures: receives the error.
    """

    def __init__(self, inner: IO[bytes], failures: list[OSError]) -> None:
        self._inner, self._failures = inner, failures

    def write(self, data: Any) -> int:
        try:
            num_written = self._inner.write(data)
            self._inner.flush()
        except OSError as error:
            self._failures.append(error)
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())  # else buffered data would fail again at exit
            os.close(null)
            return len(data)
        return num_written

    def writable(self) -> bool:
        return not self._failures

    def fileno(self) -> int:
        return self._inner.fileno()

    def isatty(self) -> bool:
        return self._inner.isatty()


def _null(flags: int) -> int:
    """Open the null device on the lowest free descriptor: that of the closed stream."""
    descriptor = os.open(os.devnull, flags)
    os.set_inheritable(descriptor, True)  # as the standard streams are
    return descriptor
