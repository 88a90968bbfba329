"""Large matrices that stay in the type of the checkpoint. (Here, all are large.)"""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import outrider
from gguf_models import IDS, IN_MANY_FORMS, PLACES, Case, many_forms, random_case, write_in_blocks
from outrider.errors import OptionError, UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.native.planned_model import PlannedModel
from pairs import random_llama, save
from weight_bytes import num_bytes


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
    return {one.stored.dtype for one in model.parameters() if isinstance(one, NarrowWeight)}


MODELS = {"Llama": random_llama, "Llama, untied": lambda: random_llama(tie_word_embeddings=False), "Gemma": _gemma}


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_in_bfloat16(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, predicted = save(tmp_path, MODELS[name]().bfloat16()), list[int]()
    for module in ("loading", "planned"):
        monkeypatch.setattr(f"outrider.models.{module}.check_fits", lambda _, needed, *__: predicted.append(needed))
    kept, plain = outrider.load(folder), outrider.load(folder, store="plain")
    assert predicted == [num_bytes(one.target.weights) for one in (kept, plain)]
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


def test_numbers_that_bfloat16_does_not_have_are_not_rounded(tmp_path: Path) -> None:
    folder = save(tmp_path, random_llama().bfloat16())
    weights = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        weights[name] = weights[name].float() + 1e-4
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    kept, plain = outrider.load(folder), outrider.load(folder, store="plain")
    assert _stored(kept.target.model) == {torch.bfloat16, torch.float32}  # each matrix in its own type
    assert not _stored(outrider.load(folder, dtype="float64").target.model)  # for which there is no kernel
    wide = plain.target.model.state_dict()
    for key, tensor in kept.target.model.state_dict().items():
        assert torch.equal(tensor.wide() if isinstance(tensor, NarrowWeight) else tensor, wide[key]), key


def test_int8_of_torchao(tmp_path: Path) -> None:
    folder = save(tmp_path, random_llama())
    kept, plain = (outrider.load(folder, quantization="int8", store=how).target.model for how in ("auto", "plain"))
    assert _stored(kept) == {torch.int8, torch.float32}  # the embedding is not quantized
    one, other = (model.model.layers[0].mlp.down_proj.weight for model in (kept, plain))
    torch.testing.assert_close(one.wide(), other.dequantize())
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want = plain(ids).logits
        torch.testing.assert_close(kept(ids).logits, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))


_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_logits.json").read_text())


def _of_k_quants(name: str) -> str:
    if "attn_v" in name or "embd" in name:
        return "Q6_K"
    return "Q5_K" if "ffn_down" in name else "Q4_K"


_FILES = {"Q8_0": lambda _: "Q8_0", "Q4_0": lambda _: "Q4_0", "Q4_K_M": _of_k_quants, "many": many_forms}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        *(("llama", "many"), ("qwen3", "Q4_0"), ("qwen3moe", "Q4_K_M")),
        *(("gemma2", "Q8_0"), ("gemma3", "Q8_0"), ("qwen35", "Q4_K_M")),
    ],
)
def test_cpu_weights_equal_widened_model(kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_in_blocks(tmp_path / "tiny.gguf", kind, _FILES[form])
    predicted: list[int] = []
    for module in ("loading", "planned"):
        monkeypatch.setattr(f"outrider.models.{module}.check_fits", lambda _, needed, *__: predicted.append(needed))
    kept, plain = outrider.load(f"{file}:a32"), outrider.load(file, store="plain")
    assert 0 <= num_bytes(kept.target.weights) - predicted[0] < 1000  # frequencies of a rope
    assert num_bytes(kept.target.weights) < 1.1 * sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
    wide = dict(plain.target.model.named_buffers()) | plain.target.model.state_dict()
    for key, tensor in (dict(kept.target.model.named_buffers()) | kept.target.model.state_dict()).items():
        assert torch.equal(tensor.wide() if isinstance(tensor, NarrowWeight) else tensor, wide[key]), key
    for shape in ((2, 9), (4, 40)):  # the second beyond the kernel
        ids = torch.randint(97, shape, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            logits, want = kept.target.model(ids).logits, plain.target.model(ids).logits
        torch.testing.assert_close(logits, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    # There is no plan of matrices whose columns are in another order.
    assert isinstance(kept.target.weights, PlannedModel) or kind == "qwen35"
    texts = {one.generate([[5, 6, 7]], **options)[0].token_ids for one in (kept, plain)}
    assert len(texts) == 1


@pytest.mark.parametrize("ending", [":a32", ""])
def test_cpu_weights_give_logits_of_llama_cpp(ending: str, tmp_path: Path) -> None:
    """Its logits, up to the rounding of rows, which differs: ggml-cpu.c in llama.cpp (``type_traits_cpu``) rounds them
    to 8 bits in blocks of 32 numbers for IQ4_NL and MXFP4, of 256 for others here, and to 16 bits for F16 and BF16."""
    file = write_in_blocks(tmp_path / "tiny.gguf", "llama", many_forms)
    with torch.inference_mode():
        logits = outrider.load(f"{file}{ending}").target.model(torch.tensor([IDS])).logits[0, list(PLACES)]
    golden = torch.tensor(_GOLDEN[IN_MANY_FORMS])
    assert (logits - golden).square().mean().sqrt() <= 0.04 * golden.std()


def test_cpu_weights_of_other_types_are_widened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    forms = {"ffn_down": "IQ2_XS", "ffn_up": "IQ3_S", "ffn_gate": "TQ2_0", "attn_q": "NVFP4", "token_embd": None}
    kept = write_in_blocks(tmp_path / "tiny.gguf", "llama", lambda name: forms.get(name.split(".")[-2], "Q8_0"))
    plain = outrider.load(kept, store="plain").target.model.state_dict()
    assert not caplog.messages
    found = outrider.load(kept).target.model
    embedding = found.get_input_embeddings().weight
    assert not isinstance(embedding, NarrowWeight) and embedding.dtype == torch.float32
    assert all(torch.equal(one, plain[name]) for name, one in found.state_dict().items())
    assert any("2 of IQ2_XS (blk.0.ffn_down.weight, ...)" in one for one in caplog.messages)
    file = write_in_blocks(tmp_path / "other.gguf", "llama", lambda name: "Q8_K" if "attn_k" in name else "Q8_0")
    with pytest.raises(UnsupportedModel, match="blk.0.attn_k.weight is of the type Q8_K, which the package"):
        outrider.load(file)


def test_activations_of_integers(tmp_path: Path) -> None:
    file = write_in_blocks(tmp_path / "tiny.gguf", "llama", _FILES["Q4_K_M"])
    for ending, num_digits in (("", 1), (":a8", 1), (":a15", 2), (":a32", 0)):
        target = outrider.load(f"{file}{ending}").target
        forms = {one.blocks.num_digits for one in target.model.parameters() if isinstance(one, NarrowWeight)}
        assert (target.name, forms) == (f"{file}{ending}", {num_digits})
    halves = write_in_blocks(tmp_path / "halves.gguf", "llama", lambda _: "F16")
    for name, options in (
        (f"{halves}:a8", {}),
        (f"{file}:a8", {"store": "plain"}),
        (f"{file}:a8", {"dtype": "float64"}),
    ):
        given: dict[str, Any] = options
        with pytest.raises(OptionError, match="a8"):
            outrider.load(name, **given)
    with pytest.raises(OptionError, match="quantized with gguf already"):
        outrider.load(file, quantization="int8")
