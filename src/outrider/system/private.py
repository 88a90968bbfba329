"""Disk cache of files that are trusted: the compiled kernels, and notes about models.

Whoever can write such a file can do all that the user may do, so a file is used only if nobody but the user and root
can have written it. A damaged one would crash the process, so each begins with a checksum of the rest. The size of the
folder is bounded: the least recently used files are evicted.
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
    """Folder of cached files.

    Attributes:
        path: created with the first file, for this user alone.
        most_bytes: above this size files are evicted.
    """

    path: Path
    most_bytes: int

    def read(self, name: str) -> bytes | None:
        """Content of a cached file; None if it is missing, damaged or not trusted. Marks it as used.

        Checks and reads the open file, since its path could be replaced in between.
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
                _warn_once(f"{self.path / name} is not run, because {doubt}: remove it")
                return None
            with suppress(OSError):  # a file of root, for example
                os.utime(stream.fileno())
            checksum, data = stream.read(_CHECKSUM_BYTES), stream.read()
        if hashlib.sha256(data).digest() == checksum:
            return data
        _LOG.warning("%s is damaged: making it again", self.path / name)
        return None

    def keep(self, name: str, data: bytes) -> None:
        """Cache a file with its checksum; if that fails, warn."""
        if not current_ranks().is_first:
            return
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted():
                write_whole(self.path / name, hashlib.sha256(data).digest() + data, mode=0o600)
                self._evict()
        except OSError as error:
            _LOG.warning("cannot cache %s: %s", self.path / name, error.strerror)

    def _is_trusted(self) -> bool:
        doubt = doubt_about(self.path.stat(), os.geteuid())
        if doubt is not None:
            _warn_once(f"{self.path} is not used, because {doubt}, and its files would be run: remove it")
        return doubt is None

    def _evict(self) -> None:
        files = []
        for path in self.path.iterdir():  # leftovers of interrupted writes too
            with suppress(FileNotFoundError):  # other processes evict as well
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        num_bytes = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if num_bytes <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            num_bytes -= size


def doubt_about(about: os.stat_result, user: int) -> str | None:
    """Why somebody other than the user or root may have written a file or folder; None if nobody can have."""
    if about.st_uid not in (user, 0):
        return f"it belongs to another user (number {about.st_uid})"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others may write to it"
    return None


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


@lru_cache
def _warn_once(message: str) -> None:
    """Warn once, though a run reads several files from a folder."""
    _LOG.warning(message)
