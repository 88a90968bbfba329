"""Folders of MLX: the model is that of the widened weights, under the names of Transformers.

MLX 0.32.4 and mlx-lm 0.32.2 (their CPU builds) gave the logits of these folders, too, to 2e-4 of their spread, when
they were run once.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import outrider
from mlx_models import AFFINE, CASES, IDS, in_groups, random_mlx, write_mlx
from outrider.api import load_drafter
from outrider.errors import ModelCorrupt, ModelError, OptionError, UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.heads.chains import MtpHead

_BOUND = 1e-4  # of the spread of logits


@torch.inference_mode()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits.float()


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_model_that_was_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Widened; and with matrices in blocks, to the bit."""
    model = random_mlx(name, tmp_path / "small")
    want, decoder = _logits(model), outrider.load(tmp_path / "small")
    torch.testing.assert_close(_logits(decoder.target.model), want, rtol=0.0, atol=_BOUND * float(want.std()))
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    random_mlx(name, tmp_path / "large")
    large = outrider.load(tmp_path / "large")
    forms = set()
    assert ("mlp.experts." in caplog.text) == ("moe" in name)  # matrices that are widened
    for key, weight in large.target.model.named_parameters():
        if isinstance(weight, NarrowWeight):
            forms.add(weight.blocks and weight.blocks.name)
        found = weight.wide() if isinstance(weight, NarrowWeight) else weight
        assert torch.equal(found, model.get_parameter(key)), key
    assert "Q4_1" in forms and ("Q5_1" in forms) == ("many" in name)
    found = _logits(large.target.model)
    assert (found - want).abs().max() < 0.02 * want.std()  # activations of 15 bits
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    texts = [one.generate([IDS[:5]], **options)[0].token_ids for one in (decoder, large)]
    assert texts[0] == texts[1]


def test_in_other_types(tmp_path: Path) -> None:
    model = random_mlx("qwen3, many modes", tmp_path)
    loaded = outrider.load(tmp_path, dtype="float64").target.model
    for key, weight in loaded.named_parameters():
        assert torch.equal(weight, model.get_parameter(key).double()), key


def test_a_draft_and_an_mtp_layer(tmp_path: Path) -> None:
    """The layer is that of mlx-vlm's ``qwen3_5_mtp``: its names begin nowhere, its norms are larger by one."""
    random_mlx("qwen3_5_text", tmp_path / "target")
    decoder = outrider.load(tmp_path / "target")
    numbers, tensors, meant = torch.Generator().manual_seed(0), dict[str, Tensor](), dict[str, Tensor]()
    wholes = np.random.RandomState(1)
    own = {key: one for key, one in MtpHead(decoder.target).state_dict().items() if one.is_meta}
    for key, value in own.items():
        if value.ndim == 1:
            tensors[key] = (1 + 0.2 * torch.randn(value.shape, generator=numbers)).bfloat16()
            meant[key] = tensors[key].float() - 1
        else:
            stored, meant[key] = in_groups(value.shape, AFFINE, wholes)
            tensors |= {f"{key.removesuffix('.weight')}.{part}": one for part, one in stored.items()}
    text = json.loads((tmp_path / "target" / "config.json").read_text())
    write_mlx(tmp_path / "mtp", {"model_type": "qwen3_5_mtp", "text_config": text, "block_size": 3}, AFFINE, tensors)
    (head,) = load_drafter(decoder, tmp_path / "mtp").models
    for key, value in meant.items():
        assert torch.equal(head.model.state_dict()[key], value), key
    for draft in (tmp_path / "mtp", tmp_path / "target"):
        drafting = outrider.load(tmp_path / "target", draft, num_draft_tokens=2)
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        (found,), (plain,) = (one.generate([IDS[:5]], **options) for one in (drafting, decoder))
        assert found.token_ids == plain.token_ids and found.stats.num_draft_tokens > 0


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    random_mlx("llama", tmp_path)
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    stated, tensors = json.loads(config.read_text()), load_file(weights)

    def refusal(kind: type[ModelError], changes: dict[str, Any], **settings: Any) -> str:
        config.write_text(json.dumps(stated | changes | {"quantization": AFFINE | settings}))
        with pytest.raises(kind) as caught:
            outrider.load(tmp_path)
        return str(caught.value)

    assert "MLX's form of cohere models is not read" in refusal(UnsupportedModel, {"model_type": "cohere"})
    assert "of the mode mxfp2 with 4 bits: unknown here" in refusal(UnsupportedModel, {}, mode="mxfp2")
    assert "are not those that its config.json states" in refusal(ModelCorrupt, {}, bits=8)
    assert "has the shape" in refusal(ModelCorrupt, {"intermediate_size": 64})
    save_file({**tensors, "model.layers.0.self_attn.sinks": torch.ones(4)}, weights)
    assert "has a weight model.layers.0.self_attn.sinks, for which" in refusal(UnsupportedModel, {})
    save_file({key: value for key, value in tensors.items() if "layers.1.mlp.up_proj" not in key}, weights)
    assert "lacks 1 of the model's weights, model.layers.1.mlp.up_proj" in refusal(ModelCorrupt, {})
    with pytest.raises(OptionError, match="quantized with mlx already"):
        outrider.load(tmp_path, quantization="int8")
