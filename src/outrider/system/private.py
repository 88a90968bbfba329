"""Disk cache of files that are trusted: the compiled kernels, and notes about models.

Whoever can write such a file can do all that the user may do, so folder and file are used only if nobody but the
user and root can write to them. A damaged file would crash the process, so each begins with a checksum of the rest. The
size of the folder is bounded: the least recently used files are evicted.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from outrider.system.files import write_whole

_LOG = logging.getLogger(__name__)
_CHECKSUM_BYTES = 32  # of SHA-256


class PrivateFolder(NamedTuple):
    """Folder of cached files: created with the first one, for this user alone; above ``most_bytes`` files are
    evicted."""

    path: Path
    most_bytes: int

    def read(self, name: str) -> bytes | None:
        """Content of a cached file; None if it is missing, damaged or not trusted. Marks it as used."""
        path = self.path / name
        try:
            if not self._is_trusted(self.path, self.path.stat()):
                return None
            # The open file is checked and read, since its path could be replaced in between.
            with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as stream:
                if not self._is_trusted(path, os.fstat(stream.fileno())):
                    return None
                checksum, data = stream.read(_CHECKSUM_BYTES), stream.read()
        except OSError:
            return None
        with suppress(OSError):
            os.utime(path)
        if hashlib.sha256(data).digest() == checksum:
            return data
        _LOG.warning("%s is damaged: making it again", path)
        return None

    def keep(self, name: str, data: bytes) -> None:
        """Cache a file with its checksum; if that fails, warn."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._is_trusted(self.path, self.path.stat()):
                write_whole(self.path / name, hashlib.sha256(data).digest() + data, mode=0o600)
                self._evict()
        except OSError as error:
            _LOG.warning("cannot cache %s: %s", self.path / name, error.strerror)

    def _is_trusted(self, path: Path, about: os.stat_result) -> bool:
        is_trusted = about.st_uid in (os.geteuid(), 0) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not is_trusted:
            _LOG.warning("%s is not used: others may write to it, and what it holds would be run. Remove it", path)
        return is_trusted

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
