"""Files with one writing process at a time.

The lock is advisory (``flock``): it excludes those who ask for it, and ends with the process that holds it. Windows and
some network file systems have no such lock: there a warning says so.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from outrider.errors import FileError

_LOG = logging.getLogger(__name__)


def open_locked(path: Path) -> FileIO:
    """Open a file to append to it, unbuffered, and exclude other processes until it is closed. Devices and pipes are
    opened without a lock.

    Raises:
        FileError: it cannot be opened, or another process has it.
    """
    while True:
        try:
            stream = FileIO(path, "a")
        except OSError as error:
            raise FileError(f"cannot write {path}: {error.strerror}") from None
        if not is_regular(stream):
            return stream
        try:
            _lock(stream, path)
            if _is_at(path, stream):
                return stream
        except BaseException:
            stream.close()
            raise
        stream.close()  # the previous holder has removed the file


@contextmanager
def alone(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time run the context; the others wait. If files cannot be locked, none waits.

    Args:
        path: a lock file, removed at the end.
        on_wait: called before this process waits.
    """
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            stream = FileIO(path, "a")
            try:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            if _is_at(path, stream):
                break
            stream.close()  # the previous holder has removed the file
    except (ImportError, OSError):
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        stream.close()


def is_regular(stream: FileIO) -> bool:
    """Whether it is a regular file, which can be read again and truncated; not a device or a pipe."""
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _lock(stream: FileIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        _LOG.warning("%s cannot be locked on this system: make sure that no other run writes to it", path)
        return
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(
            f"cannot write {path}: another run is writing to it: wait until it has ended, or choose another file"
        ) from None
    except OSError as error:
        _LOG.warning("%s cannot be locked (%s): make sure that no other run writes to it", path, error.strerror)


def _is_at(path: Path, stream: FileIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False
