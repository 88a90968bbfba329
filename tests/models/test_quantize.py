"""Quantized models: loaded in every way, exact with respect to themselves, and refused where they cannot be."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, PerRow, PerTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

import outrider
from outrider.errors import DeviceError, MissingExtra, OptionError, UnsupportedModel
from outrider.models.checksums import weights_checksum
from outrider.models.memory import weights_bytes
from outrider.models.quantize import num_bytes, quantized_share, widened_weights
from outrider.models.registry import QUANTIZATIONS
from pairs import random_llama, save, word_tokenizer, zoo

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao and bitsandbytes warn of what they will change


loaded = cache(outrider.load)  # the models that several tests look at


def tokens(decoder: outrider.Decoder, **options: Any) -> list[tuple[int, ...]]:
    prompts = ["Once upon a time", "The king"]
    done = decoder.generate(prompts, max_new_tokens=12, seed=[1, 2], **options)
    return [one.token_ids for one in done]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_target_speaks_for_itself(quantization: str) -> None:
    """It is another target than the one in float32; with a draft, its greedy text is its own plain text."""
    plain = loaded(f"fable:{quantization}")
    assert plain.target.name == f"fable:{quantization}" and plain.target.dtype == torch.float32
    assert quantized_share(plain.target.model) > 0.8
    pair = outrider.load("fable", "fable-draft", quantization=quantization)
    assert pair.target.name == plain.target.name
    text, alone = (tokens(decoder, temperature=0) for decoder in (pair, plain))
    if quantization != "8bit":  # which rounds activations, so that one last bit may become a step of a scale
        assert text == alone
    # After a forward, in which bitsandbytes rearranges the weights of nf4.
    assert weights_checksum(pair.target.model) == weights_checksum(plain.target.model)
    assert weights_checksum(pair.target.model) != weights_checksum(loaded("fable").target.model)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_predicted_from_the_configuration(quantization: str, dtype: torch.dtype) -> None:
    config = transformers.AutoConfig.from_pretrained(zoo("fable"))
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    options = {} if dtype == torch.float32 else {"dtype": "bfloat16"}
    model = loaded(f"fable:{quantization}", **options).target.model
    # bitsandbytes stores the scales of nf4 in 2 or 4 bytes, by the kernels that this processor has.
    tolerance = 0.04 if quantization == "nf4" else 1e-9
    assert weights_bytes(skeleton, dtype, quantization) == pytest.approx(num_bytes(model), rel=tolerance)


def test_widths_that_the_group_does_not_divide_are_passed_over(tmp_path: Path) -> None:
    """A scale is for 32 inputs: of 96 and 48, the layers of 96 inputs are quantized. The prediction knows."""
    config = random_llama(hidden_size=96, tie_word_embeddings=False, initializer_range=0.02).config
    folder = save(tmp_path, LlamaForCausalLM(config))
    model = outrider.load(folder, quantization="int4").target.model
    down = [layer.mlp.down_proj.weight for layer in model.model.layers]
    assert {type(weight) for weight in down} == {torch.nn.Parameter}
    assert 0.4 < quantized_share(model) < 0.8
    with torch.device("meta"):
        skeleton = LlamaForCausalLM(config)
    assert weights_bytes(skeleton, torch.float32, "int4") == num_bytes(model)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    """GPT-2 has matrices of another class, which torchao passes over."""
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    folder = save(tmp_path, GPT2LMHeadModel(config))
    with pytest.raises(OptionError, match="has no linear layers that it could be applied to"):
        outrider.load(folder, quantization="int8")
    with pytest.raises(OptionError, match="a model in memory stays as it is"):
        outrider.load(random_llama(), quantization="int8")


def test_a_quantized_draft_costs_acceptance_only() -> None:
    plain = loaded("fable")
    for placement in (outrider.Placement(quantization="int8"), outrider.Placement(quantization="nf4")):
        pair = outrider.load("fable", "fable-draft", draft_placement=placement)
        assert pair.drafter.name == f"fable-draft:{placement.quantization}"
        assert tokens(pair, temperature=0) == tokens(plain, temperature=0)
    assert outrider.load("fable", "fable-draft:int8").drafter.name == "fable-draft:int8"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_weights_are_widened_for_a_draft(quantization: str) -> None:
    """A model with plain weights in place of quantized ones gives the logits of the quantized one."""
    lm = loaded(f"fable:{quantization}").target
    plain = transformers.AutoModelForCausalLM.from_pretrained(zoo("fable"), dtype=torch.float32)
    plain.load_state_dict(widened_weights(lm.model), strict=False)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        want, got = lm.model(input_ids=ids).logits, plain(input_ids=ids).logits
    # LLM.int8() rounds activations as well.
    tolerance = 0.05 if quantization == "8bit" else 0.02
    assert (got - want).norm() < tolerance * (want - want.mean(-1, keepdim=True)).norm()


def test_names_of_a_file_are_quantized(tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text(f'[models.small]\npath = "{zoo("fable")}"\nquantization = "int8"\n')
    assert outrider.load("small", models_file=models).target.name == "small"
    assert quantized_share(outrider.load("small", models_file=models).target.model) > 0.8
    unquantized = outrider.load("small", models_file=models, quantization="none")
    assert unquantized.target.name == "small:none" and quantized_share(unquantized.target.model) == 0.0
    models.write_text(f'[models.small]\npath = "{zoo("fable")}"\nquantization = "int3"\n')
    with pytest.raises(outrider.UsageError, match="models.small.quantization = 'int3' should be one of none, int8"):
        outrider.load("small", models_file=models)


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="quantization = 'int3' is invalid: choose one of none, int8, int4"):
        outrider.load("fable", quantization="int3")
    folder = save(tmp_path, random_llama())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(OptionError, match="quantized with gptq already"):
        outrider.load(folder, quantization="int8")
    monkeypatch.setattr("outrider.models.quantize.find_spec", lambda _: None)
    with pytest.raises(
        MissingExtra, match=r"quantized with gptq, needs gptqmodel and optimum: pip install '\.\[gptq\]'"
    ):
        outrider.load(folder)
    with pytest.raises(MissingExtra, match=r"quantization nf4 needs bitsandbytes: pip install '\.\[quantize\]'"):
        outrider.load("fable:nf4")
    with pytest.raises(MissingExtra, match="model.gguf needs gguf"):
        (folder / "model.gguf").touch()
        outrider.load(folder / "model.gguf")


# The mistakes that the probe is there for: rows, and places of a text, that depend on each other.
LEAKS: dict[str, Any] = {
    "outliers": (lambda: transformers.BitsAndBytesConfig(load_in_8bit=True), "load it with llm_int8_threshold=0"),
    "one scale for all": (
        lambda: transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig(granularity=PerTensor())),
        "other logits when later tokens or other rows change",
    ),
}


@pytest.mark.usefixtures("each_is_probed")
def test_the_probe_finds_outliers_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.loading.picks_outliers", lambda _: False)
    how = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=2.0)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo("fable"), dtype=torch.float32, quantization_config=how
    )
    with pytest.raises(UnsupportedModel, match="other logits when later tokens or other rows change"):
        outrider.load(model)


@pytest.mark.usefixtures("each_is_probed")
@pytest.mark.parametrize("leak", LEAKS)
def test_rows_that_depend_on_each_other_are_refused(leak: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo("fable"), dtype=torch.float32, quantization_config=LEAKS[leak][0]()
    )
    with pytest.raises(UnsupportedModel, match=LEAKS[leak][1]):
        outrider.load(model)


@pytest.mark.usefixtures("each_is_probed")
def test_one_scale_for_each_row_is_fine() -> None:
    how = transformers.TorchAoConfig(Int8DynamicActivationInt8WeightConfig(granularity=PerRow()))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        zoo("fable"), dtype=torch.float32, quantization_config=how
    )
    assert outrider.load(model).target.dtype == torch.float32


def test_a_checkpoint_of_bitsandbytes_loads_without_its_outliers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr("outrider.models.memory_fit.available_bytes", lambda _: 2**20)
    with pytest.raises(DeviceError, match="the weights of .* where 1.0 MiB are free"):
        outrider.load(tmp_path / "model")


def test_gguf_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers widens them to the dtype of the arithmetic."""
    model = random_llama()
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "2", "3", *(f"w{i}" for i in range(2, config.vocab_size - 1))])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["w 2", "w 3"])  # Transformers 5.17 wants some
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(config.vocab_size - 1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        new = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(new, _rotated(name, tensor, config).float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    decoder = outrider.load(tmp_path / "tiny.gguf", dtype="float32")
    in_memory = outrider.load(model.float(), tokenizer=word_tokenizer())
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    with pytest.raises(OptionError, match="quantized with gguf already"):
        outrider.load(tmp_path / "tiny.gguf", quantization="int8")
    read, made = (one.generate([[5, 6, 7]], **options)[0].token_ids for one in (decoder, in_memory))
    assert read == made
    monkeypatch.setattr("outrider.models.memory_fit.available_bytes", lambda _: 2**10)
    with pytest.raises(DeviceError, match="the weights of .* where 0.0 MiB are free"):
        outrider.load(tmp_path / "tiny.gguf")


def _rotated(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """llama.cpp pairs neighbouring numbers of a head in its rotary embedding, Hugging Face those half a head apart."""
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if num_heads is None:
        return tensor
    return tensor.view(num_heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
