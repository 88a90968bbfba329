"""Files are written whole or not at all, whoever else writes them."""

import os
import threading
from pathlib import Path

import pytest

from outrider.system.files import alone, check_writable, short_name, short_names, write_text, write_whole


def test_two_that_write_at_once_do_not_spoil_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, or a process of the same number elsewhere, writes the file while this one is about to."""
    path, rename = tmp_path / "file", Path.replace
    others = [b"another's"]

    def after_another(part: Path, target: Path) -> Path:
        if others:
            write_whole(path, others.pop())
        return rename(part, target)

    monkeypatch.setattr(Path, "replace", after_another)
    write_whole(path, b"mine, which is longer")
    assert path.read_bytes() == b"mine, which is longer" and not others
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError):
        write_whole(folder, b"no file can have this name")
    assert list(tmp_path.iterdir()) == [folder]

    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", b"data")
    assert list(tmp_path.iterdir()) == [folder]


def test_bytes_are_on_disk_before_their_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or after a loss of power the file may be there, with zeros in it."""
    path, synced = tmp_path / "file", []

    def sync(descriptor: int) -> None:
        assert not path.exists()
        about = os.fstat(descriptor)
        synced.append((about.st_ino, about.st_size))

    monkeypatch.setattr(os, "fsync", sync)
    write_whole(path, b"data")
    assert synced == [(path.stat().st_ino, 4)]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes here")
def test_a_pipe_stays_a_pipe(tmp_path: Path) -> None:
    """As does a device: as root, /dev/null would be replaced by a file."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_text(pipe, "text")
        assert os.read(reader, 9) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_is_followed(tmp_path: Path) -> None:
    file, link = tmp_path / "folder" / "file", tmp_path / "link"
    file.parent.mkdir()
    link.symlink_to(file)
    for text in ("made", "made anew"):
        check_writable(link)
        write_text(link, text)
        assert link.is_symlink() and file.read_text() == text and [*file.parent.iterdir()] == [file]


@pytest.mark.skipif(not Path("/dev/fd").exists(), reason="there is no /dev/fd here")
def test_a_name_of_an_open_file_is_appended_to(tmp_path: Path) -> None:
    """``--json /dev/stdout >> file``"""
    file = tmp_path / "file"
    file.write_text("old,")
    with file.open("a") as stream:
        check_writable(Path(f"/dev/fd/{stream.fileno()}"))
        write_text(Path(f"/dev/fd/{stream.fileno()}"), "new")
    assert file.read_text() == "old,new" and [*tmp_path.iterdir()] == [file]


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path, done = tmp_path / "locks" / "one", []

    def second() -> None:
        with alone(path):
            done.append("second")

    thread = threading.Thread(target=second)
    with alone(path):
        thread.start()
        thread.join(0.1)  # longer than it would take
        done.append("first")
    thread.join()
    assert done == ["first", "second"]


def test_where_no_file_can_be_all_go_on(tmp_path: Path) -> None:
    (tmp_path / "locks").write_text("a file where the folder should be")
    with alone(tmp_path / "locks" / "one"):
        pass


def test_names_of_models_that_are_paths_are_short() -> None:
    """Those of files and folders; ids of the hub stay whole, and so does what follows a name."""
    for name, short in (
        ("/a/b/model.gguf", "model.gguf"),
        ("/a/b/model.gguf, K = 4", "model.gguf, K = 4"),
        ("~/models/qwen:int8", "qwen:int8"),
        ("./qwen/", "qwen"),
        ("models/x.gguf", "x.gguf"),
        ("org/model", "org/model"),
        ("org/model:file.gguf", "org/model:file.gguf"),
        ("fable", "fable"),
        (".", "."),
        ("suffix+/m/small.gguf", "suffix+small.gguf"),
        ("suffix+org/model", "suffix+org/model"),
        ("/m/c++/small.gguf:int8:greedy", "small.gguf:int8:greedy"),
        ("org/model:vocab=9@/tmp/out/tokens.jsonl:greedy, K = auto", "org/model:vocab=9@tokens.jsonl:greedy, K = auto"),
        ("/tmp/out/:vocab=/tmp/out/tokens.jsonl", "out:vocab=tokens.jsonl"),
    ):
        assert short_name(name) == short


def test_short_names_differ_where_names_do() -> None:
    given = ["/q4/small.gguf, K = 4", "suffix+/q8/small.gguf, K = 4", "/m/fable", "fable", "/m/a.gguf", "/m/a.gguf:mtp"]
    assert short_names(given) == [*given[:4], "a.gguf", "a.gguf:mtp"]
