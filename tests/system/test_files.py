"""Files are written whole or not at all, whoever else writes them."""

import os
import threading
from pathlib import Path

import pytest

from outrider.system.files import alone, check_writable, short_name, short_names, write_text, write_whole


def test_files_are_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread, or a process of the same number elsewhere, writes the file at the same time. The bytes are
    on disk before their name is: else a loss of power may leave a file of zeros."""
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


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """Where files can be locked."""
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
    (tmp_path / "file").touch()
    with alone(tmp_path / "file" / "one"):
        pass


def test_names_of_models_that_are_paths_are_short() -> None:
    """Those of files and folders; ids of the hub stay whole, and so does what follows a name. Short names differ where
    names do."""
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
    given = ["/q4/small.gguf, K = 4", "suffix+/q8/small.gguf, K = 4", "/m/fable", "fable", "/m/a.gguf", "/m/a.gguf:mtp"]
    assert short_names(given) == [*given[:4], "a.gguf", "a.gguf:mtp"]
