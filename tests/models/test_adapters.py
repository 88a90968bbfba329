"""Adapters of PEFT: the merged model says what PEFT's own says."""

import json
import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import outrider
from multimodal import multimodal
from outrider.errors import MissingExtra, ModelCorrupt, ModelError, ModelNotFound, OptionError, UnsupportedModel
from outrider.models import adapters
from outrider.models.loading import load_checkpoint
from outrider.models.registry import Placement, resolve
from pairs import NUM_WORDS, random_llama, save, word_tokenizer
from peft_adapters import WIDE, adapted

CONFIGS = {
    "LoRA": peft.LoraConfig(**WIDE, bias="lora_only"),
    "rsLoRA": peft.LoraConfig(**WIDE, use_rslora=True, modules_to_save=["lm_head"]),
    "DoRA": peft.LoraConfig(**WIDE, use_dora=True),
    "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LoHa": peft.LoHaConfig(target_modules=["q_proj"], r=4, init_weights=False),
}
# PEFT asks models for a name that Transformers is about to rename.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
IDS = torch.tensor([[1, 2, 3, 5, 8, 13]])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good adapter, to be damaged."""
    adapted(tmp_path, CONFIGS["LoRA"])
    return tmp_path / "adapter"


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_peft(kind: str, tmp_path: Path) -> None:
    """The base alone says something else. The base is found by the adapter, or given."""
    with torch.no_grad():
        model = adapted(tmp_path, CONFIGS[kind])
        want, bare = model(IDS).logits, random_llama(tie_word_embeddings=False)(IDS).logits
        for name in (str(tmp_path / "adapter"), f"{tmp_path / 'base'}+{tmp_path / 'adapter'}"):
            checkpoint = load_checkpoint(resolve(name), Placement(dtype="float64"), is_target=True)
            assert checkpoint.name == name
            torch.testing.assert_close(checkpoint.model(IDS).logits, want, rtol=1e-4, atol=1e-5)
        assert float((bare - want).abs().max()) > 0.01


def test_an_adapter_as_draft_and_of_a_multimodal_model(tmp_path: Path) -> None:
    model = adapted(tmp_path, peft.LoraConfig(**{**WIDE, "target_modules": ["q_proj"]}), multimodal("llava"))
    decoder = outrider.load(tmp_path / "base", tmp_path / "adapter")
    done = decoder.generate(IDS, temperature=0, max_new_tokens=8, ignore_eos=True)
    plain = decoder.plain().generate(IDS, temperature=0, max_new_tokens=8, ignore_eos=True)
    assert done[0].token_ids == plain[0].token_ids
    want = model(input_ids=IDS).logits
    torch.testing.assert_close(decoder.drafter.models[0].model(input_ids=IDS).logits, want, rtol=1e-4, atol=1e-5)


def test_in_bfloat16(tmp_path: Path) -> None:
    """Merged in float32 where it computes in float32, though the base is stored in fewer bits."""
    adapted(tmp_path, CONFIGS["LoRA"], random_llama(tie_word_embeddings=False).bfloat16())
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    want = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits
    got = outrider.load(tmp_path / "adapter").target.model(IDS).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert outrider.load(tmp_path / "adapter", dtype="bfloat16").target.dtype == torch.bfloat16


def test_its_tokenizer_is_taken(tmp_path: Path) -> None:
    """Unless it has tokens that the base does not have."""
    adapted(tmp_path, CONFIGS["LoRA"], tokenizer=word_tokenizer(word="x{}"))
    assert outrider.load(tmp_path / "adapter").encode("x3 x4") == [3, 4]
    word_tokenizer(NUM_WORDS + 2).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UnsupportedModel, match="adds tokens: its tokenizer has 99, the base 97"):
        outrider.load(tmp_path / "adapter")


def refusal(name: Path | str, kind: type[Exception] = ModelCorrupt, **options: Any) -> str:
    with pytest.raises(kind) as error:
        outrider.load(name, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_adapters_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    other = save(tmp_path / "wide", random_llama(hidden_size=64))
    assert re.search(r"lora_.* has the shape \[32, 4\] rather than \[64, 4\]", refusal(f"{other}+{folder}"))
    flat = save(tmp_path / "flat", random_llama(num_layers=1))
    message = "the base has no place for 14 of its weights, base_model.model.model.layers.1"
    assert message in refusal(f"{flat}+{folder}")
    file = folder / "adapter_model.safetensors"
    weights = load_file(file)
    first = min(weights)
    save_file({key: weight for key, weight in weights.items() if key != first}, file)
    assert f"its file lacks 1 of its weights, {first}" in refusal(folder)
    save_file({key: weight * float("nan") for key, weight in weights.items()}, file)
    refusal(folder, ModelError)
    file.unlink()
    refusal(folder, ModelError)


def test_adapters_that_cannot_be_merged(tmp_path: Path) -> None:
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    adapted(tmp_path, prompts, folder="prompts")
    assert "an adapter of prompts (PROMPT_TUNING)" in refusal(tmp_path / "prompts", UnsupportedModel)
    adapted(tmp_path, peft.LoraConfig(**WIDE, alora_invocation_tokens=[5], task_type="CAUSAL_LM"), folder="activated")
    refusal(tmp_path / "activated", ModelError)


def test_quantized_bases_are_refused(folder: Path) -> None:
    for name, options in ((f"{folder}:int8", {}), (folder, {"quantization": "int8"})):
        assert "merge and save them first" in refusal(name, OptionError, **options)


def test_the_base_must_be_there(folder: Path, tmp_path: Path) -> None:
    stated = json.loads((folder / "adapter_config.json").read_text())
    for base, kind, message in (
        (str(tmp_path / "gone"), ModelNotFound, f"the base of the adapter {folder} is not here: give BASE+{folder}"),
        (None, ModelCorrupt, f"names no base: give BASE+{folder}"),
        (str(folder), ModelCorrupt, "is an adapter too"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(stated | {"base_model_name_or_path": base}))
        assert message in refusal(folder, kind)
    (folder / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(folder)
    assert "there is no folder ./gone" in refusal("fable+./gone", ModelNotFound)
    assert "two adapters" in refusal(f"fable+{folder}+{folder}", ModelNotFound)
    spec = resolve("org/base:int8+org/adapter")
    assert (spec.hub, spec.adapter, spec.placement.quantization) == ("org/base", "org/adapter", "int8")
    assert not spec.is_same_model(resolve("org/base"))


def test_without_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "find_spec", lambda _: None)
    assert "needs peft: pip install '.[peft]'" in refusal(folder, MissingExtra)
