"""Reading and writing files, with errors that name the file and the remedy; JSON of users; caches on disk."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider.errors import FileError
from outrider.options import HYBRID

# The model, or the file of a draft's option: "suffix+/a/model.gguf:vocab=9@/a/outputs.jsonl, K = 4".
_PART_OF_NAME = re.compile(rf"(^(?:{re.escape(HYBRID)})?|:vocab=(?:\d+@)?)([^:]+?)/*(?=:|, K = |$)")


def read_text(path: Path) -> str:
    """Read a UTF-8 file, without its byte order mark. Raises FileError: it cannot be read, or is not UTF-8."""
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise FileError(f"{path}, line {line}: not UTF-8 (byte {error.start}): convert it (iconv)") from None


def read_bytes(path: Path) -> bytes:
    with file_errors("read", path):
        return path.read_bytes()


@contextmanager
def file_errors(verb: str, path: Path) -> Iterator[None]:
    """Raise FileError for errors of the system, with the path; ``verb``: "read" or "write"."""
    try:
        yield
    except OSError as error:
        raise FileError(f"cannot {verb} {path}: {error.strerror}") from None


def short_name(name: str) -> str:
    """A name of a model or draft without the folders of its paths; several names of one report: ``short_names``."""
    return short_names([name])[0]


def short_names(names: Iterable[str]) -> list[str]:
    """Names of models, drafts or arms, in which each path is the name of its file or folder; ids of the hub (org/model)
    stay as they are, and so do paths whose short names are equal."""
    names = list(names)
    shorts = Counter(map(_last_part, {found[2] for name in names for found in _PART_OF_NAME.finditer(name)}))

    def shorten(found: re.Match[str]) -> str:
        short = _last_part(found[2])
        return found[1] + (short if shorts[short] == 1 else found[2])

    return [_PART_OF_NAME.sub(shorten, name) for name in names]


def _last_part(part: str) -> str:
    is_path = part.startswith(("/", ".", "~")) or part.count("/") > 1 or part.endswith(".gguf")
    return Path(part).name or part if is_path else part


def parse_row(where: str, line: str | bytes) -> dict[str, Any]:
    """Parse a line as a JSON object. Raises FileError, which says where (file and line)."""
    row = parse_json(where, line)
    if not isinstance(row, dict):
        raise FileError(f"{where}: not a JSON object")
    return row


def parse_json(where: str, text: str | bytes) -> Any:
    """Parse JSON. Raises FileError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in error.doc else ""
        raise FileError(f"{where}: not JSON ({error.msg} at {line}column {error.colno})") from None
    except UnicodeDecodeError:
        raise FileError(f"{where}: not UTF-8") from None
    except (ValueError, RecursionError):  # Python's own limits
        raise FileError(f"{where}: a number has too many digits, or the nesting is too deep") from None


def check_writable(path: Path) -> None:
    """Check before the work that a file can be written. Raises FileError."""
    if _is_stream(path):  # opening and closing a pipe would end it for its reader
        if not os.access(path, os.W_OK):
            raise FileError(f"cannot write {path}: {os.strerror(errno.EACCES)}")
        return
    path = path.resolve()
    existed = path.exists()
    with file_errors("write", path):
        path.open("a").close()
    if not existed:
        path.unlink()


def write_whole(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a file atomically: no reader ever finds half of it, even after a loss of power. Raises OSError.

    Args:
        mode: permissions, less the umask.

    If several write the same file concurrently, the last one wins. They may be threads, or processes that share only
    the folder, so the temporary file has a random name.
    """
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
    stream = open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode))
    try:
        with stream:
            stream.write(data)
            stream.flush()
            with suppress(OSError):  # not supported by the file system
                os.fsync(stream.fileno())  # or the rename could reach the disk before the bytes
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. A link is followed. A device or a pipe is appended to. Raises FileError: it cannot be
    written."""
    with file_errors("write", path):
        if _is_stream(path):
            with path.open("ab") as stream:
                stream.write(text.encode())
        else:
            write_whole(path.resolve(), text.encode())


def _is_stream(path: Path) -> bool:
    """Whether it is a device or a pipe; or names an open file, as /dev/stdout does."""
    is_other = path.exists() and not (path.is_file() or path.is_dir())
    return is_other or path.parent in (Path("/dev"), Path("/dev/fd"))


def cache_folder(name: str) -> Path:
    """Folder of a disk cache: ``$XDG_CACHE_HOME/outrider/name``, or below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(root) / "outrider" / name


@contextmanager
def alone(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Let one process at a time run the context; the others wait. If files cannot be locked, none waits. ``path``: a
    lock file. ``on_wait``: called before this process waits."""
    try:
        from filelock import FileLock, Timeout  # here, since files are fetched before anything is installed
    except ImportError:
        yield
        return
    lock, must_wait = FileLock(path), False
    with suppress(OSError, NotImplementedError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            must_wait = True
    if must_wait:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()
