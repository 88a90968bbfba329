"""Tensor parallel: two processes write what one process writes; what cannot be shared is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, Phi3Config

from launch import launched
from outrider.api import load
from outrider.errors import DeviceError, OptionError, UnsupportedModel
from outrider.models.placement import check_shares
from outrider.models.registry import Placement
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
    with launched(TESTS / "support" / "shares.py", folder) as process:
        _, err = process.communicate(timeout=_LIMIT_S)
    assert process.returncode == 0, err[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_a_shared_target_is_that_of_one_process(found: list[dict[str, Any]]) -> None:
    """In its texts, and under the certificate; each process has its share of the weights."""
    for one in found:
        assert (one["num_shares"], one["heads"]) == (2, 1)
        share, whole = one["bytes"]
        assert share < 0.6 * whole  # norms are in both
        assert one["checksums"][0] == one["checksums"][1], "put together, the weights are those of the whole"
        assert len(one["tokens"]) == 6
        assert [name for name, is_same in one["tokens"].items() if not is_same] == []
        assert one["captured"]
        assert one["certificate"]["is_ok"] and one["certificate"]["is_caught"] == [True]


@pytest.mark.slow
def test_what_is_drawn_and_measured_is_that_of_the_first(found: list[dict[str, Any]]) -> None:
    first, second = found
    assert first["drawn_seed"] == second["drawn_seed"]
    assert first["learned"] == second["learned"] and first["learned"]["seconds"].keys() == {"1", "2"}
    assert first["certificate"]["seconds"] == second["certificate"]["seconds"]
    assert first["first"] == second["first"] == [0, "OptionError: a = 'b' is invalid: process 0 cannot", [0, 1]]
    assert first["quantized"] == second["quantized"]


@pytest.mark.slow
def test_tensor_parallel_refusals(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["parted"].startswith("RankError: the processes of this job have generated different tokens")
        refused = one["refused"]
        assert "run it without torchrun" in refused["alone"]
        assert "not 2: torchrun --nproc-per-node 3" in refused["three"]
        assert refused["device map"].startswith("OptionError: device_map = 'auto' is invalid")
        assert refused["8bit"].startswith("OptionError: quantization = '8bit' is invalid")


def test_one_process_is_told_how_to_start_several() -> None:
    with pytest.raises(OptionError, match="not 1: torchrun --nproc-per-node 2 -m outrider"):
        load("fable", tensor_parallel=2)


def _llama() -> LlamaConfig:
    return LlamaConfig(hidden_size=48, num_attention_heads=12, num_key_value_heads=6)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"size": 4}, UnsupportedModel, "m has 6 key-value heads, which 4 processes cannot share evenly"),
        ({"size": 5}, UnsupportedModel, "m has 12 attention heads, which 5 processes"),
        ({"config": GPT2Config()}, UnsupportedModel, r"m \(gpt2\) .* no tensor-parallel plan"),
        ({"method": "gptq"}, OptionError, "quantization = 'gptq' is invalid: m is shared by 3"),
        ({"device": torch.device("mps")}, DeviceError, "but not on mps: leave out --device"),
    ],
)
def test_tensor_parallel_refuses_uneven_plans(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"size": 3, "placed": HERE, "device": ON_CPU, "config": _llama(), "method": None}
    check_shares("m", **given)
    with pytest.raises(error, match=message):
        check_shares("m", **given | changes)


def test_a_plan_may_put_heads_together_again() -> None:
    """Before attention: then they need not be divisible."""
    config = Phi3Config(hidden_size=48, num_attention_heads=6, num_key_value_heads=6, pad_token_id=0)
    check_shares("m", 4, HERE, ON_CPU, config, None)
