"""Large matrices that stay in the type of the checkpoint. (Here, all are large.)"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FalconConfig, FalconForCausalLM, PreTrainedModel

import native_cases
import outrider
from gguf_models import Case, random_case
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.weights import num_bytes, weights_checksum
from pairs import random_llama, save
from toys import random_model


@pytest.fixture(autouse=True)
def _no_matrix_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)


def _gemma() -> PreTrainedModel:
    """Scales its embedding by a constant of the arithmetic's type, and shares it with the last layer."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 12}
    sizes = {"vocab_size": 97, "hidden_size": 24, "max_position_embeddings": 64, "eos_token_id": 96}
    return random_case(Case("gemma3_text", "gemma3", heads | sizes))  # the root of 24 is no number of bfloat16


def _stored(model: Any) -> set[torch.dtype]:
    """The types in which its matrices are stored."""
    return {one.stored.dtype for one in model.parameters() if isinstance(one, NarrowWeight)}


MODELS = {"Llama": random_llama, "Llama, untied": lambda: random_llama(tie_word_embeddings=False), "Gemma": _gemma}


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_in_bfloat16(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes half the memory, as predicted, and is the same model: every other number is that of the widened one, to the
    bit."""
    folder, predicted = save(tmp_path, MODELS[name]().bfloat16()), list[int]()
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    kept, plain = outrider.load(folder), outrider.load(folder, store="plain")
    assert predicted == [num_bytes(one.target.model) for one in (kept, plain)]
    assert _stored(kept.target.model) == {torch.bfloat16} and not _stored(plain.target.model)
    assert kept.target.dtype == plain.target.dtype == torch.float32
    wide = dict(plain.target.model.named_buffers()) | plain.target.model.state_dict()
    for key, tensor in (dict(kept.target.model.named_buffers()) | kept.target.model.state_dict()).items():
        assert torch.equal(tensor.wide() if isinstance(tensor, NarrowWeight) else tensor, wide[key]), key
    assert num_bytes(kept.target.model) < 0.6 * num_bytes(plain.target.model)
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        logits, want = kept.target.model(ids).logits, plain.target.model(ids).logits
    torch.testing.assert_close(logits, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
    assert kept.generate("w1 w2 w3", **options)[0].text == plain.generate("w1 w2 w3", **options)[0].text


def test_numbers_that_bfloat16_does_not_have_are_not_rounded(tmp_path: Path) -> None:
    """If some are stored in float32, all are read in it."""
    folder = save(tmp_path, random_llama().bfloat16())
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    kept, plain = outrider.load(folder), outrider.load(folder, store="plain")
    assert _stored(kept.target.model) == {torch.float32}
    assert weights_checksum(kept.target.model) == weights_checksum(plain.target.model)


def test_plain_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arithmetic has no kernel; and small models are not worth the seconds in which it is compiled."""
    folder = save(tmp_path, random_llama().bfloat16())
    for how in ({"dtype": "float64"}, {"dtype": "bfloat16"}):
        assert not _stored(outrider.load(folder, **how).target.model)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 2**24)
    assert not _stored(outrider.load(folder).target.model)


def test_experts_by_columns_are_held_once(tmp_path: Path) -> None:
    """Those of gpt-oss, which the native engine reads by rows, as plain numbers too."""
    folder = save(tmp_path, native_cases.random_model("gpt_oss", native_cases.CASES["gpt_oss"]["plain"]))
    kept, plain = (outrider.load(folder, store=how, execution="native").target for how in ("auto", "plain"))
    assert num_bytes(plain.model) == num_bytes(kept.model)
    assert plain.native is not None and not [name for name in plain.native._weights._copies if "bias" not in name]
    assert not _stored(outrider.load(folder, store="plain", execution="eager").target.model)


def test_int8_of_torchao(tmp_path: Path) -> None:
    """The kernel reads the same integers and scales."""
    folder = save(tmp_path, random_llama())
    kept, plain = (outrider.load(folder, quantization="int8", store=how).target.model for how in ("auto", "plain"))
    assert _stored(kept) == {torch.int8, torch.float32}  # the embedding is not quantized
    one, other = (model.model.layers[0].mlp.down_proj.weight for model in (kept, plain))
    torch.testing.assert_close(one.wide(), other.dequantize())
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = plain(ids).logits
        torch.testing.assert_close(kept(ids).logits, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))


def test_layers_with_a_product_of_their_own_are_plain() -> None:
    """Falcon's would widen their weights in each forward."""
    config = FalconConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=False
    )
    model = random_model(FalconForCausalLM, config, 0)
    cpu_weights.narrow_weights(model, torch.bfloat16)
    kept = {name for name, one in model.named_parameters() if isinstance(one, NarrowWeight)}
    assert kept == {"transformer.word_embeddings.weight", "lm_head.weight"}
