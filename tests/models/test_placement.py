"""Placements: words that mean the same in a file of models, in the API and on the command line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outrider
from outrider.errors import DeviceError, FileError, OptionError
from outrider.models.placement import device_map_of, max_memory_of
from outrider.models.registry import ModelSpec, Placement, resolve


def test_a_name_s_own_choices_yield() -> None:
    own = Placement("auto", "bfloat16", "int8", "auto", "0=1GiB")
    spec = ModelSpec(name="a", hub="x/y", placement=own)
    assert Placement().over(spec) == Placement("auto", "bfloat16", "int8", "auto", "0=1GiB", store="auto")
    chosen = Placement("cpu", "float32", "none", "balanced", "0=2GiB", store="plain")
    assert chosen.over(spec) == chosen
    assert (Placement().name_of(spec), chosen.name_of(spec)) == ("a", "a:none")
    assert Placement(quantization="nf4").name_of(spec) == "a:nf4"
    assert Placement(device_map="none").over(spec).max_memory is None
    assert Placement(quantization="nf4").name_of(resolve("fable:int8")) == "fable:nf4"
    of_draft = Placement(quantization="nf4").inheriting(Placement("cuda:1", "float16", allow_pickle=True))
    assert of_draft == Placement("cuda:1", "float16", "nf4", allow_pickle=True)
    assert Placement(quantization="none").name_of(ModelSpec(name="b", hub="x/y")) == "b"
    for own, of_target, want in (("auto", "eager", "eager"), ("auto", "captured", "auto"), ("eager", "auto", "eager")):
        assert Placement(execution=own).inheriting(Placement(execution=of_target)).execution == want


def test_device_maps(tmp_path: Path) -> None:
    assert device_map_of(Placement()) is None and device_map_of(Placement(device_map="none")) is None
    assert device_map_of(Placement(device_map="balanced")) == "balanced"
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": 7}))
    with pytest.raises(DeviceError, match="there is no device 'cuda:7'"):
        device_map_of(Placement(device_map=str(file)))
    for text in ("[]", "{", "{}", '{"model": null}', '{"model": "disk"}'):
        file.write_text(text)
        with pytest.raises(FileError, match="map.json"):
            device_map_of(Placement(device_map=str(file)))
    with pytest.raises(FileError, match="device_map = 'somehow' is neither auto, balanced"):
        device_map_of(Placement(device_map="somehow"))
    assert max_memory_of("0=20GiB, cpu=60GiB") == {0: "20GiB", "cpu": "60GiB"}
    for text in ("20GiB", "0=much", "tpu=1GiB"):
        with pytest.raises(OptionError, match="write DEVICE=SIZE"):
            max_memory_of(text)


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("dtype", "float13", "choose one of auto, float64, float32"),
        ("quantization", "int3", "choose one of none, int8, int4"),
        ("execution", "compiled", "choose one of auto, eager, native, captured"),
        ("tensor_parallel", 0, "a whole number >= 1"),
        ("max_memory", "cpu=1GiB", "it limits a device map"),
    ],
)
def test_options_are_checked(option: str, value: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"{option} = {value!r} is invalid: {remedy}"):
        outrider.load("fable", **{option: value})


def test_a_model_is_loaded_by_a_map(tmp_path: Path) -> None:
    """A map of one device, the only one present everywhere."""
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": "cpu", "lm_head": "cpu"}))
    options = {"seed": 1, "max_new_tokens": 6}
    want = outrider.load("fable", "fable-draft", device="cpu").generate("Once", **options)
    for device_map in (str(file), "auto"):
        pair = outrider.load("fable", "fable-draft", device="cpu", device_map=device_map)
        assert pair.generate("Once", **options)[0].token_ids == want[0].token_ids


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
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert resources.available_bytes(cpu) == 1000
    (tmp_path / "memory.max").write_text("800\n")
    (tmp_path / "memory.stat").write_text("anon 30\ninactive_file 40\nactive_file 20\n")
    assert resources.available_bytes(cpu) == 760
    assert resources.available_bytes(torch.device("meta")) is None
