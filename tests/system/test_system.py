"""Files that are written whole, cached files that are run, and what a machine has for a process."""

import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import outrider
from outrider.errors import ModelNotFound, OptionError
from outrider.system.files import check_writable, short_name, short_names, write_text, write_whole
from outrider.system.private import PrivateFolder
from outrider.system.resources import useful_threads


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others write the file at the same time. The bytes are on disk before their name is."""
    path, rename, others, synced = tmp_path / "file", Path.replace, [b"another's"], []

    def after_another(part: Path, target: Path) -> Path:
        if others:
            write_whole(path, others.pop())
        return rename(part, target)

    def sync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, path.exists()))

    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", after_another)
    write_whole(path, b"mine, which is longer")
    assert path.read_bytes() == b"mine, which is longer" and not others and synced == [(21, False), (9, False)]
    with pytest.raises(OSError):
        write_whole(tmp_path, b"no file can have this name")
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"data")
    assert list(tmp_path.iterdir()) == [path] and len(path.read_bytes()) == 21


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="there are no pipes and no /dev/fd here")
def test_pipes_links_and_open_files_stay_so(tmp_path: Path) -> None:
    """As does a device: as root, /dev/null would be replaced by a file. ``--json /dev/stdout >> file`` appends."""
    pipe, file, link = tmp_path / "pipe", tmp_path / "folder" / "file", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_text(pipe, "text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("made", "made anew"):
        check_writable(link)
        write_text(link, text)
        assert link.is_symlink() and file.read_text() == text and [*file.parent.iterdir()] == [file]
    with file.open("a") as stream:
        check_writable(Path(f"/dev/fd/{stream.fileno()}"))
        write_text(Path(f"/dev/fd/{stream.fileno()}"), ", and more")
    assert file.read_text() == "made anew, and more"
    assert pipe.is_fifo() and {*tmp_path.iterdir()} == {pipe, file.parent, link}


def test_names_of_models_that_are_paths_are_short() -> None:
    """Ids of the hub stay whole, and so does what follows a name. Short names differ where names do."""
    for name, short in (
        ("/a/b/model.gguf, K = 4", "model.gguf, K = 4"),
        ("~/models/qwen:int8", "qwen:int8"),
        ("./qwen/", "qwen"),
        ("org/model:file.gguf", "org/model:file.gguf"),
        (".", "."),
        ("suffix+/m/small.gguf", "suffix+small.gguf"),
        ("org/model:vocab=9@/tmp/out/tokens.jsonl:greedy, K = auto", "org/model:vocab=9@tokens.jsonl:greedy, K = auto"),
        ("/tmp/out/:vocab=/tmp/out/tokens.jsonl", "out:vocab=tokens.jsonl"),
    ):
        assert short_name(name) == short
    given = ["/q4/small.gguf, K = 4", "suffix+/q8/small.gguf, K = 4", "/m/fable", "fable", "/m/a.gguf", "/m/a.gguf:mtp"]
    assert short_names(given) == [*given[:4], "a.gguf", "a.gguf:mtp"]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PrivateFolder]:
    """For a user whose files are for everyone, unless it is said otherwise."""
    before = os.umask(0)
    yield PrivateFolder(tmp_path / "a" / "programs", most_bytes=4 * (25 + 32))  # with checksums
    os.umask(before)


def test_a_folder_that_others_may_write_to_is_not_used(folder: PrivateFolder, caplog: pytest.LogCaptureFixture) -> None:
    """Neither read nor written, and told. One that is made is for the user alone."""
    assert folder.read("one") is None
    folder.keep("one", b"program")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "one").stat().st_mode & 0o777 == 0o600
    folder.path.chmod(0o720)
    folder.keep("two", b"program")
    assert folder.read("one") is None
    warning = caplog.messages[0]
    assert str(folder.path) in warning and "others may write to it" in warning and "Remove it" in warning
    folder.path.chmod(0o700)
    assert folder.read("one") == b"program" and folder.read("two") is None


def test_what_was_not_used_for_long_makes_room(folder: PrivateFolder) -> None:
    """What a write that was cut short has left, too."""
    for age, name in enumerate(["three", "two", "one", "two.0f3a.part"]):
        folder.keep(name, b"x" * 25)
        os.utime(folder.path / name, (1000 - age, 1000 - age))
    folder.read("one")
    folder.keep("four", b"x" * 25)
    assert {path.name for path in folder.path.iterdir()} == {"one", "two", "three", "four"}
    folder.keep("large", b"x" * 100)
    assert {path.name for path in folder.path.iterdir()} == {"four", "large"}
    folder.keep("too large", b"x" * 200)  # it has been made, and may serve the next run
    assert {path.name for path in folder.path.iterdir()} == {"too large"}


def test_a_damaged_file_is_not_run_until_made_anew(folder: PrivateFolder, caplog: pytest.LogCaptureFixture) -> None:
    file, data = folder.path / "one", b"program " * 10
    folder.keep("one", data)
    stored = file.read_bytes()
    for spoilt in (stored[:50] + bytes([stored[50] ^ 1]) + stored[51:], stored[:50], b""):
        file.write_bytes(spoilt)
        assert folder.read("one") is None and f"{file} is damaged" in caplog.messages[-1]
        folder.keep("one", data)
        assert folder.read("one") == data
    assert len(caplog.messages) == 3
    nowhere = PrivateFolder(file / "programs", 100)  # a file where the folder should be
    nowhere.keep("one", data)
    assert nowhere.read("one") is None and "cannot cache" in caplog.messages[-1]


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def _siblings(pairs: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": listed for n, listed in pairs.items()}


def test_a_thread_for_each_performance_core(tmp_path: Path) -> None:
    """Cores of two threads; two of these and four efficiency cores, as Intel's are described; and ARM's."""
    root = _write(tmp_path / "plain", _siblings({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert useful_threads({0, 1, 2, 3}, root) == 2
    assert useful_threads({0, 2}, root) == 1  # both halves of one
    assert useful_threads(set(range(5)), tmp_path / "nothing") == 5
    intel = _siblings({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"})
    root = _write(tmp_path / "intel", intel | {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"})
    assert useful_threads(set(range(8)), root) == 2
    assert useful_threads({4, 5, 6}, root) == 3  # the process may use no others
    capacities = [250] * 4 + [870] * 3 + [1024]
    arm = {f"sys/devices/system/cpu/cpu{n}/cpu_capacity": str(size) for n, size in enumerate(capacities)}
    assert useful_threads(set(range(8)), _write(tmp_path / "arm", arm)) == 4


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("10000 100000", 1), ("250000 100000", 2)])
def test_the_quota_of_a_container_is_the_most(limit: str, expected: int, tmp_path: Path) -> None:
    """Of the root, or of a group of the process."""
    assert useful_threads(set(range(8)), _write(tmp_path / "root", {"sys/fs/cgroup/cpu.max": limit})) == expected
    files = {"proc/self/cgroup": "0::/a.slice/b", "sys/fs/cgroup/a.slice/cpu.max": limit}
    assert useful_threads(set(range(8)), _write(tmp_path / "slice", files)) == expected


@pytest.mark.parametrize("is_enabled", [True, False])
def test_garbage_is_collected_as_before_after_models_are_loaded(is_enabled: bool) -> None:
    """After an error, too."""
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        for name, options in (("fable", {}), ("fable", {"placment": 1}), ("no-such-model", {})):
            with suppress(OptionError, ModelNotFound):
                outrider.load(name, **options)
            assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
