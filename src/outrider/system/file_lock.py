"""A file that one process at a time writes to.

The lock is advisory (``flock``): it keeps out those who ask for it, and ends with the process that holds it, however
that ends. Windows has no such lock, nor have some network file systems: there a warning says so.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from outrider.errors import FileError

_LOG = logging.getLogger(__name__)


def open_locked(path: Path) -> FileIO:
    """Open a file to append to it, without a buffer, and keep other processes out until it is closed. A device or a
    pipe is opened as it is.

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
        stream.close()  # who had the lock before has removed the file meanwhile


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Let one process at a time do something; the others wait. Where files cannot be locked, all go on.

    Args:
        path: a file that is there only meanwhile.
    """
    try:
        import fcntl

        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            stream = FileIO(path, "a")
            fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
            if _is_at(path, stream):
                break
            stream.close()  # who had the lock before has removed the file meanwhile
    except (ImportError, OSError):
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        stream.close()


def is_regular(stream: FileIO) -> bool:
    """Whether it is a file on a disk, which can be read again and cut off; not a device or a pipe."""
    return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)


def _lock(stream: FileIO, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        _LOG.warning("%s cannot be locked on this system: see that no other run writes to it", path)
        return
    try:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileError(
            f"cannot write {path}: another run is writing to it: wait until it has ended, or choose another file"
        ) from None
    except OSError as error:
        _LOG.warning("%s cannot be locked (%s): see that no other run writes to it", path, error.strerror)


def _is_at(path: Path, stream: FileIO) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False
