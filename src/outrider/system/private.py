"""A folder of files that are run, not only read: compiled programs and kernels.

Whoever can write such a file can do all that the user may do, so one is used only if nobody but the user or root can
have written it. A damaged one would end the process, so each begins with a checksum of the rest. The folder is of
bounded size: what was not used for the longest time goes first.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from outrider.system.files import write_whole
from outrider.system.ranks import current_ranks

_LOG = logging.getLogger(__name__)
_CHECKSUM_BYTES = 32  # of SHA-256


@dataclass(frozen=True, slots=True)
class PrivateFolder:
    """
    Attributes:
        path: made when something is kept, for this user alone.
        most_bytes: after which files are removed.
    """

    path: Path
    most_bytes: int

    def read(self, name: str) -> bytes | None:
        """What was kept under this name, if it is there, whole and to be trusted. It counts as used.

        It is the open file that is looked at and read: by its path, another could come to be in its place.
        """
        try:
            if not self._is_trusted():
                return None
            stream = open(self.path / name, "rb", opener=_not_through_a_link)
        except OSError:
            return None
        doubt = doubt_about(os.fstat(stream.fileno()), os.geteuid())
        with stream:
            if doubt is not None:
                _warn_once(f"{self.path / name} is not run, for {doubt}: remove it")
                return None
            with suppress(OSError):  # root's file, say
                os.utime(stream.fileno())
            checksum, data = stream.read(_CHECKSUM_BYTES), stream.read()
        if hashlib.sha256(data).digest() == checksum:
            return data
        _LOG.warning("%s is damaged: making it again", self.path / name)
        return None

    def keep(self, name: str, data: bytes) -> None:
        """Keep what can be made again, with its checksum; where that is not possible, go on without."""
        if not current_ranks().is_first:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted():
                write_whole(self.path / name, hashlib.sha256(data).digest() + data, mode=0o600)
                self._make_room()
        except OSError as error:
            _LOG.warning("cannot keep %s: %s", self.path / name, error.strerror)

    def _is_trusted(self) -> bool:
        doubt = doubt_about(self.path.stat(), os.geteuid())
        if doubt is not None:
            _warn_once(f"{self.path} is not used, for {doubt}, and what is in it would be run: remove it")
        return doubt is None

    def _make_room(self) -> None:
        files = []
        for path in self.path.iterdir():  # what a write that was cut short has left, too
            with suppress(FileNotFoundError):  # others make room as well
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        num_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if num_bytes <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            num_bytes -= size


def doubt_about(about: os.stat_result, user: int) -> str | None:
    """Why a file or folder may hold what somebody else than the user or root has written; None if it cannot."""
    if about.st_uid not in (user, 0):
        return f"it belongs to another user (number {about.st_uid})"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


@lru_cache
def _warn_once(message: str) -> None:
    """A run takes several files from a folder."""
    _LOG.warning(message)
