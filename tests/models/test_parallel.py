"""Tensor parallel: two processes that share a target write what one process writes; what cannot be shared is refused
by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Phi3Config

from launch import launched
from outrider.api import load
from outrider.errors import DeviceError, OptionError, UnsupportedModel
from outrider.models.parallel import check_shares
from outrider.models.placement import Placement
from pairs import save
from toys import perturbed, tiny_llama

TESTS = Path(__file__).parents[1]
ON_CPU = torch.device("cpu")
_LIMIT_S = 300  # of waiting, which no verdict depends on unless something hangs
HERE = Placement(device_map="none", quantization="none")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes has found (see shares.py), in one run for all tests: a start takes seconds."""
    folder = tmp_path_factory.mktemp("shares")
    model = tiny_llama()
    save(folder / "target", model)
    save(folder / "draft", perturbed(model, 0.1))
    (folder / "names.toml").write_text('[models.shared]\npath = "target"\ntensor_parallel = 2\n')
    with launched(TESTS / "shares.py", folder) as process:
        _, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, err[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_each_process_has_its_share(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert (one["num_shares"], one["heads"]) == (2, 1)
        share, whole = one["bytes"]
        assert share < 0.6 * whole  # norms are in both
        assert one["checksums"][0] == one["checksums"][1], "put together, the weights are those of the whole"


@pytest.mark.slow
def test_the_texts_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert len(one["tokens"]) == 6
        assert [name for name, is_same in one["tokens"].items() if not is_same] == []
        assert one["captured"]


@pytest.mark.slow
def test_a_shared_target_is_certified(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["certificate"]["is_ok"] and one["certificate"]["is_caught"] == [True]


@pytest.mark.slow
def test_what_is_drawn_and_measured_is_that_of_the_first(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["drawn_seed"] == second["drawn_seed"]
    assert first["learned"] == second["learned"] and first["learned"]["seconds"].keys() == {"1", "2"}
    assert first["certificate"]["seconds"] == second["certificate"]["seconds"]
    assert first["first"] == second["first"] == [0, "OptionError: a = 'b' is invalid: process 0 cannot", [0, 1]]


@pytest.mark.slow
def test_quantized_shares(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["quantized"] == second["quantized"]


@pytest.mark.slow
def test_processes_that_part_end_with_an_error(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["parted"].startswith("RankError: the processes of this job have generated different tokens")


@pytest.mark.slow
def test_what_the_processes_refuse(found: list[dict[str, Any]]) -> None:
    for one in found:
        refused = one["refused"]
        assert "run it without torchrun" in refused["alone"]
        assert "not 2: torchrun --nproc-per-node 3" in refused["three"]
        assert refused["device map"].startswith("OptionError: device_map = 'auto' is invalid")
        assert refused["8bit"].startswith("OptionError: quantization = '8bit' is invalid")


def test_one_process_is_told_how_to_start_several() -> None:
    with pytest.raises(OptionError, match="not 1: torchrun --nproc-per-node 2 -m outrider"):
        load("fable", tensor_parallel=2)
    with pytest.raises(OptionError, match="a whole number >= 1"):
        load("fable", tensor_parallel=0)


def _llama() -> LlamaConfig:
    return LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=6)


def test_heads_must_be_divisible() -> None:
    check_shares("m", 3, HERE, ON_CPU, _llama(), None)
    with pytest.raises(UnsupportedModel, match="m has 6 key-value heads, which 4 processes cannot share evenly"):
        check_shares("m", 4, HERE, ON_CPU, _llama(), None)
    with pytest.raises(UnsupportedModel, match="m has 12 attention heads, which 5 processes"):
        check_shares("m", 5, HERE, ON_CPU, _llama(), None)
    # Its plan puts the heads together again before attention.
    check_shares(
        "m",
        4,
        HERE,
        ON_CPU,
        Phi3Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, pad_token_id=0),
        None,
    )


def test_a_model_without_a_plan() -> None:
    with pytest.raises(UnsupportedModel, match=r"m \(gpt2\) .* no tensor-parallel plan"):
        check_shares("m", 2, HERE, ON_CPU, GPT2Config(), None)


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "gguf"])
def test_checkpoints_that_are_quantized(method: str) -> None:
    with pytest.raises(OptionError, match=f"quantization = '{method}' is invalid: m is shared by 2"):
        check_shares("m", 2, HERE, ON_CPU, _llama(), method)


@pytest.mark.parametrize("name", ["cuda:1", "mps"])
def test_devices(name: str) -> None:
    with pytest.raises(DeviceError, match=f"but not on {name}: leave out --device"):
        check_shares("m", 2, HERE, torch.device(name), _llama(), None)
