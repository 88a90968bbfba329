"""Files that are run: only the user's own, and only so many of them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.system.private import PrivateFolder


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


def test_a_damaged_file_is_not_run_until_it_is_made_anew(
    folder: PrivateFolder, caplog: pytest.LogCaptureFixture
) -> None:
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
