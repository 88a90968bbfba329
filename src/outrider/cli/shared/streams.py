"""The standard streams, where nobody reads them or they cannot be written.

- Standard output whose reader has left (``| head``): what is printed is dropped, files are still written, and the exit
  code is 141, that of SIGPIPE.
- Standard output that cannot be written (closed, or a full disk): the same, with one line of error and exit code 2.
- Standard error holds messages. Losing them ends no work and changes no exit code.
- A closed stream (``>&-``) is opened on the null device, or the next file that is opened would take its place and get
  what libraries print. Input is then empty.

A stream that was lost is not ``writable()`` any more; who generates text only to print it may stop there.
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
    """Make the standard streams of this process safe to write to. Streams that a caller has put in their place are left
    alone.

    Returns:
        A function to be called when the command has ended. It raises FileError where standard output could not be
        written, and SystemExit where its reader has left.
    """
    if sys.stdin is None:
        sys.stdin = open(_null(os.O_RDONLY), encoding="utf-8")
    failures: list[OSError] = []
    if sys.stdout is sys.__stdout__:
        sys.stdout = _with_guard(sys.stdout, os.O_RDONLY, failures)  # writing to it fails, as to the closed stream
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
    """The stream behind a guard.

    Args:
        flags: with which the null device is opened in place of a closed stream.
    """
    if stream is None:
        inner: IO[bytes] = open(_null(flags), "wb", buffering=0)
        return io.TextIOWrapper(io.BufferedWriter(_Guard(inner, failures)), "utf-8", line_buffering=True)
    assert isinstance(stream, io.TextIOWrapper)
    guard = io.BufferedWriter(_Guard(stream.buffer, failures))
    # Unbuffered (python -u), it is flushed at least at the end of each line.
    is_eager = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(guard, stream.encoding, stream.errors, line_buffering=is_eager)


class _Guard(io.RawIOBase):
    """Writes to a stream until that fails, and from then on to the null device.

    Args:
        failures: takes the error.
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
            os.dup2(null, self.fileno())  # or what is in a buffer would fail again, at exit
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
    """The null device, on the lowest descriptor that is free: that of the stream that is closed."""
    descriptor = os.open(os.devnull, flags)
    os.set_inheritable(descriptor, True)  # as the standard streams are
    return descriptor
