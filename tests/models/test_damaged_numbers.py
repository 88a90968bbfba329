"""Numbers in files that no model has: one line that names the field, or a model that works."""

import json
from pathlib import Path
from typing import Any

import pytest

from gguf_models import CASES, write_case
from native_cases import CASES as FOLDERS
from native_cases import VOCAB, random_model
from outrider.api import load
from outrider.errors import DeviceError, ModelCorrupt, OutriderError
from outrider.models.kinds import building, check_counts
from pairs import word_tokenizer


def _folder(folder: Path, family: str, name: str, **fields: Any) -> Path:
    random_model(family, FOLDERS[family][name]).save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


@pytest.mark.parametrize("name", ["gemma4, experts", "nemotron_h_moe, latent, groups"])
def test_a_file_of_which_no_expert_is_chosen(name: str, tmp_path: Path) -> None:
    """Before, the process was ended."""
    decoder = load(write_case(tmp_path / "model.gguf", CASES[name], expert_used_count=0), device="cpu")
    assert decoder.target.native is None
    decoder.generate("AB", max_new_tokens=2)
    with pytest.raises(ModelCorrupt, match="states expert_used_count = -1, which no model has"):
        load(write_case(tmp_path / "other.gguf", CASES[name], expert_used_count=-1), device="cpu")


@pytest.mark.parametrize(
    ("family", "name", "fields", "reason"),
    [
        ("gemma2", "plain", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar = -1"),
        ("gemma2", "plain", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ("glm4_moe", "groups", {"n_group": 0}, "n_group = 0"),
        ("llama", "plain", {"num_hidden_layers": 2**32 - 1}, "num_hidden_layers = 4294967295"),
        ("llama", "plain", {"head_dim": float("inf")}, "head_dim = inf"),
        ("qwen3_moe", "plain", {"num_experts_per_tok": -1}, "num_experts_per_tok = -1"),
    ],
)
def test_a_configuration_with_a_number_that_no_model_has(
    family: str, name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(OutriderError, match=reason) as found:
        load(_folder(tmp_path, family, name, **fields), device="cpu")
    assert "\n" not in str(found.value)


def test_numbers_that_mean_unset() -> None:
    """They were refused as counts."""
    unset = {"yarn_ext_factor": -1.0, "extrapolation_factor": -1.0, "image_hidden_layer": -1, "vit_layers": [-2, -9]}
    check_counts("the model", unset | {"vision_feature_select_layers": [-1]})
    for field in ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count", "expert_used_count"):
        with pytest.raises(ModelCorrupt, match=f"states {field} = -1,"):
            check_counts("the model", {field: -1})


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[...] DefaultCPUAllocator: can't allocate memory")])
def test_memory_that_is_lacking_while_a_model_is_built(error: Exception) -> None:
    """The model was called corrupt."""
    with pytest.raises(DeviceError, match="not enough memory"), building("the model cannot be run"):
        raise error
