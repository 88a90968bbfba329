"""Quantized models: loaded in every way, exact with respect to themselves, and refused where they cannot be."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, PerTensor
from transformers import GPT2Config, GPT2LMHeadModel

import outrider
from outrider.errors import MissingExtra, OptionError, UnsupportedModel
from outrider.kernels.blocks import GROUP_TYPES, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.quantize import rounded_to_groups, widened_groups
from outrider.models.registry import QUANTIZATIONS
from outrider.models.weights import quantized_share, weights_checksum, widened_weights
from pairs import embedded, random_llama, save, zoo
from weight_bytes import num_bytes

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao and bitsandbytes warn of what they will change


def tokens(decoder: outrider.Decoder, **options: Any) -> list[tuple[int, ...]]:
    done = decoder.generate(["Once upon a time", "The king"], max_new_tokens=8, seed=[1, 2], **options)
    return [one.token_ids for one in done]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_target(quantization: str) -> None:
    """With a draft, its greedy text is its own plain text; its widened weights give its logits."""
    plain = outrider.load(f"fable:{quantization}")
    model = plain.target.model
    assert plain.target.name == f"fable:{quantization}" and plain.target.dtype == torch.float32
    assert quantized_share(model) > 0.8
    pair = outrider.load("fable", "fable-draft", quantization=quantization)
    text, alone = (tokens(decoder, temperature=0) for decoder in (pair, plain))
    if quantization != "8bit":  # which rounds activations, so that one last bit may become a step of a scale
        assert text == alone
    assert weights_checksum(pair.target.model) == weights_checksum(model) != weights_checksum(embedded().target.model)
    wide = transformers.AutoModelForCausalLM.from_pretrained(zoo("fable"), dtype=torch.float32)
    wide.load_state_dict(widened_weights(model), strict=False)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        want, got = model(input_ids=ids).logits, wide(input_ids=ids).logits
    tolerance = 0.05 if quantization == "8bit" else 0.02  # LLM.int8() rounds activations as well
    assert (got - want).norm() < tolerance * (want - want.mean(-1, keepdim=True)).norm()


def test_quantize_refuses_unsupported_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, random_llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(UnsupportedModel, match="is quantized for MLX: take a GGUF file of the model"):
        outrider.load(folder)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(OptionError, match="quantized with gptq already"):
        outrider.load(folder, quantization="int8")
    monkeypatch.setattr("outrider.models.quantize.find_spec", lambda _: None)
    with pytest.raises(MissingExtra, match=r"a GGUF file needs no package\) needs gptqmodel and optimum"):
        outrider.load(folder)
    with pytest.raises(MissingExtra, match=r"quantization nf4 needs bitsandbytes: pip install '\.\[quantize\]'"):
        outrider.load("fable:nf4")
    monkeypatch.undo()
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    refusals: tuple[tuple[Any, dict[str, Any], str], ...] = (
        ("fable:int4", {"dtype": "bfloat16"}, "for float32 on the CPU: choose nf4 or int8 elsewhere"),
        ("fable", {"quantization": "fp8"}, "choose one of none, int8, int4, 8bit, nf4, a32"),
        ("fable", {"quantization": "a8"}, "for GGUF files, and fable:a8 is none"),
        # GPT-2 has matrices of another class, which torchao passes over.
        (save(tmp_path / "gpt2", gpt2), {"quantization": "int8"}, "has no linear layers that it could be applied to"),
        (random_llama(), {"quantization": "int8"}, "a model in memory stays as it is"),
    )
    for name, options, message in refusals:
        with pytest.raises(OptionError, match=message):
            outrider.load(name, **options)


def test_compressed_tensors_are_read_by_transformers(tmp_path: Path) -> None:
    model = random_llama(num_layers=1, hidden_size=128, intermediate_size=256, tie_word_embeddings=False).float()
    save(tmp_path, model)
    weights = load_file(tmp_path / "model.safetensors")
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            number, width = layer.weight.shape
            wholes, scales = torch.randint(-8, 8, (number, width)), torch.rand(number, width // 128) / 150 + 0.0005
            layer.weight = nn.Parameter(wholes * scales.repeat_interleave(128, 1), requires_grad=False)
            del weights[f"{name}.weight"]
            weights[f"{name}.weight_packed"] = pack_to_int32(wholes.to(torch.int8), 4)
            weights |= {f"{name}.weight_scale": scales, f"{name}.weight_shape": torch.tensor([number, width])}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    how = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
    stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    stated |= {"ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stated}))
    pair = outrider.load(tmp_path, tmp_path)
    assert pair.target.execution.name == "eager"
    for name, weight in model.named_parameters():
        assert torch.equal(pair.target.model.get_parameter(name), weight), name
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    (alone,) = outrider.load(model, tokenizer=pair.tokenizer).generate([[5, 6, 7]], **options)
    assert pair.generate([[5, 6, 7]], num_draft_tokens=3, **options)[0].token_ids == alone.token_ids


def _int8(granularity: Any) -> Any:
    return transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig(granularity=granularity))


# The mistakes that the probe is there for: rows, and places of a text, that depend on each other.
LEAKS: dict[str, tuple[Any, str | None]] = {
    "outliers": (transformers.BitsAndBytesConfig(load_in_8bit=True), "load it with llm_int8_threshold=0"),
    "one scale for all": (_int8(PerTensor()), "other logits when later tokens or other rows change"),
    "one scale for each row": (_int8(PerRow()), None),
}


@pytest.mark.usefixtures("each_is_probed")
@pytest.mark.parametrize("leak", LEAKS)
def test_rows_that_depend_on_each_other_are_refused(leak: str) -> None:
    how, message = LEAKS[leak]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo("fable"), dtype=torch.float32, quantization_config=how
    )
    if message is None:
        assert outrider.load(model).target.dtype == torch.float32
    else:
        with pytest.raises(UnsupportedModel, match=message):
            outrider.load(model)


def test_a_checkpoint_of_bitsandbytes_loads_without_its_outliers(tmp_path: Path) -> None:
    """Its threshold, 6 by default, would make rows depend on each other."""
    how = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo("fable"), dtype=torch.float32, quantization_config=how
    )
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(zoo("fable")).save_pretrained(tmp_path / "model")
    again = outrider.load(tmp_path / "model", "fable-draft")
    assert quantized_share(again.target.model) > 0.8
    states = [getattr(module, "state", None) for module in again.target.model.modules()]
    assert {state.threshold for state in states if state is not None} == {0.0}


def test_quantized_numbers_are_near() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    wholes, scales, zeros = rounded_to_groups(weight)
    error = (weight - widened_groups(wholes, scales, zeros)).abs()
    steps = scales.float().abs().repeat_interleave(32, -1)
    inside = (wholes > 0) & (wholes < 15)
    assert bool((error <= steps)[inside].all())  # the scale is fitted after the integers are chosen
    wholes, scales, zeros = rounded_to_groups(torch.zeros(2, 64))  # nothing is divided by zero
    assert not widened_groups(wholes, scales, zeros).any()


def test_a_loaded_model_has_these_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups, beside embeddings in bfloat16, or widened. Layers of other widths than 32s are passed over."""
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    model = random_llama(hidden_size=64, intermediate_size=144).to(torch.bfloat16)
    save(tmp_path, model)
    predicted: list[int] = []
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    kept, plain = outrider.load(tmp_path, quantization="int4"), outrider.load(f"{tmp_path}:int4", store="plain")
    assert predicted == [num_bytes(one.target.model) for one in (kept, plain)]
    embedding = kept.target.model.get_input_embeddings().weight
    assert isinstance(embedding, NarrowWeight) and embedding.stored.dtype == torch.bfloat16
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            one, other = (of.target.model.get_submodule(name).weight for of in (kept, plain))
            if "down_proj" in name:  # of 144 inputs
                assert isinstance(one, NarrowWeight) and one.blocks is None
                continue
            groups = NarrowWeight.of_blocks(in_groups(*rounded_to_groups(layer.weight)), GROUP_TYPES[32, True])
            assert one.blocks == replace(GROUP_TYPES[32, True], num_digits=2) and torch.equal(one.stored, groups.stored)
            assert type(other) is nn.Parameter and torch.equal(one.wide(), other)
