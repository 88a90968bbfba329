"""From names and folders to models that are known to work; everything else is refused with its name and the reason."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import outrider
from ggml_blocks import block_bytes
from launch import said_by_loading
from outrider.errors import DeviceError, ModelCorrupt, ModelError, ModelNotFound, UnsupportedModel
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.heads.loading import read_config
from outrider.models.loading import context_len
from outrider.models.placement import pick_device
from outrider.models.weights import weights_checksum
from pairs import NUM_WORDS, random_llama, save, word_tokenizer
from toys import random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good model, to be damaged."""
    return save(tmp_path / "model", random_llama())


def refusal(folder: str | Path, kind: type[ModelError]) -> str:
    """The message with which a model is refused."""
    with pytest.raises(kind) as error:
        outrider.load(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message
    return message


def test_a_folder_is_loaded_in_the_dtype_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    """That of the call, else of the name; else float32 on the CPU, whatever the checkpoint has. In evaluation mode,
    with its tokenizer and the end tokens of its generation_config.json; it says what the model in memory says."""
    decoder = outrider.load(str(folder), dtype="float64")
    assert decoder.eos_ids == {NUM_WORDS - 1} and decoder.target.context_len == 64
    assert decoder.target.name == str(folder) and not decoder.target.model.training
    in_memory = outrider.load(random_llama(), tokenizer=word_tokenizer())
    options: dict[str, Any] = {"seed": 1, "max_new_tokens": 20}
    assert decoder.generate("w1 w2", **options)[0].text == in_memory.generate("w1 w2", **options)[0].text
    assert outrider.load("fable", device="cpu").target.dtype == torch.float32  # of a checkpoint in bfloat16
    models = tmp_path / "models.toml"
    models.write_text(f'[models.mine]\npath = "{folder}"\ndtype = "float64"\ndevice = "cpu"\n')
    assert outrider.load("mine", models_file=models).target.dtype == torch.float64
    assert outrider.load("mine", models_file=models).target.name == "mine"
    for dtype in ("float32", "bfloat16", "float16"):
        decoder = outrider.load("mine", models_file=models, dtype=dtype)
        assert decoder.target.dtype == getattr(torch, dtype)
        (completion,) = decoder.generate("w1 w2", max_new_tokens=2, ignore_eos=True)
        assert len(completion.token_ids) == 2
    tf.GenerationConfig(eos_token_id=[5, 7]).save_pretrained(folder)  # as of Llama 3, whose config.json lacks one
    assert outrider.load(folder).eos_ids == {5, 7}


def test_auto_takes_the_best_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what there is instead of one that is not."""
    has = {"cuda": False, "mps": False}
    with pytest.raises(DeviceError, match="there is no device 'tpu' here: choose auto, cpu"):
        pick_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has["cuda"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: has["mps"])
    assert pick_device("auto") == torch.device("cpu")
    has["mps"] = True
    assert pick_device("auto") == pick_device("mps") == torch.device("mps")
    has["cuda"] = True
    assert (pick_device("auto"), pick_device("cuda:1")) == (torch.device("cuda"), torch.device("cuda:1"))
    with pytest.raises(DeviceError, match="'cuda:2' here: choose auto, cpu, cuda, cuda:0, cuda:1, mps"):
        pick_device("cuda:2")


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline hub's error is also one of missing files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("nobody-here/no-such-model", ModelNotFound)
    assert "cannot be fetched, and is not in the local cache" in message
    assert "check its name and the network, or give a local folder" in message
    with pytest.raises(ModelNotFound, match=r"no-such-model has no config\.json, or it cannot be fetched"):
        read_config("nobody-here/no-such-model")


_UP = "model.layers.1.mlp.up_proj.weight"
_OWN_CODE = "the {} of {{}} needs code of its own, which is never run here"
_CODE = {"tokenizer_class": "MartianTokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
_CONFIG_CODE = {"model_type": "martian", "auto_map": {"AutoConfig": "code.Config"}}
_MODEL_CODE = {"model_type": "vit", "architectures": None, "auto_map": {"AutoModelForCausalLM": "code.Model"}}
# A file, its new content (None: removed; fields that are changed; a change of its tensors), and the message.
DAMAGED: dict[str, tuple[str, Any, str]] = {
    "no config": ("config.json", None, "is not a model folder: there is no config.json in it"),
    "no safetensors at all": ("model.safetensors", "not at all", "cannot be read"),
    "a missing tensor": ("model.safetensors", lambda one: one.pop(_UP), f"lacks 1 of the model's weights, {_UP}"),
    "a tensor of another shape": ("model.safetensors", lambda one: one.update({_UP: one[_UP][:-1].clone()}), "up_proj"),
    "no weights": ("model.safetensors", None, "safetensors"),
    "a broken tokenizer": ("tokenizer.json", "{}", "tokenizer"),
    "a broken config": ("config.json", '{"model_type": "llama",', "JSON"),
    "an unknown kind": ("config.json", {"model_type": "martian"}, "martian"),
    "a config of nonsense": ("config.json", {"hidden_size": "large"}, "hidden_size"),
    "another task": ("config.json", {"architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
    "a quantization": ("config.json", {"quantization_config": {"quant_method": "martian"}}, "martian"),
}
NOT_ALONE: dict[str, tuple[str, Any, str]] = {
    "EAGLE-3": ("config.json", {"draft_vocab_size": 32}, "is an EAGLE-3 head"),
    "Medusa": ("config.json", {"medusa_num_heads": 2}, "is a set of Medusa heads"),
    "MTP": ("config.json", {"architectures": ["MiMoMTPForCausalLM"]}, "is a multi-token prediction (MTP) head"),
    "adapter": ("adapter_config.json", {"base_model_name_or_path": "org/base"}, "is a PEFT adapter of org/base, or"),
    "own configuration": ("config.json", _CONFIG_CODE, _OWN_CODE.format("configuration")),
    "own model": ("config.json", _MODEL_CODE, _OWN_CODE.format("model")),
    "own tokenizer": ("tokenizer_config.json", _CODE, _OWN_CODE.format("tokenizer")),
}


def _alter(path: Path, content: Any) -> None:
    if content is None:
        path.unlink()
    elif callable(content):
        tensors = load_file(path)
        content(tensors)
        save_file(tensors, path, metadata={"format": "pt"})
    elif isinstance(content, str):
        path.write_text(content)
    else:
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_folders(folder: Path, damage: str) -> None:
    """One line that names the folder and what is wrong with it; never random weights in place of missing ones."""
    name, content, message = DAMAGED[damage]
    _alter(folder / name, content)
    assert message in refusal(folder, ModelCorrupt)


@pytest.mark.parametrize("kind", NOT_ALONE)
def test_what_is_no_model_by_itself_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As target and, if it is a head, as draft. Its code is not run, nor asked for on standard input, where "y" would
    run it."""
    name, content, message = NOT_ALONE[kind]
    _alter(folder / name, content)
    (folder / "code.py").write_text('raise SystemExit("the code of the folder was run")')
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    told = refusal(folder, UnsupportedModel)
    assert message.format(folder) in told
    if "which works only together with its base model" in told:
        with pytest.raises(UnsupportedModel, match="in a layout that is not known"):
            outrider.load("fable", folder)


_SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_RWKV = tf.RwkvConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
_T5 = tf.T5Config(vocab_size=97, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8)
UNSUPPORTED: dict[str, tuple[Any, Any, str]] = {
    "rwkv": (tf.RwkvForCausalLM, _RWKV, "outside of the common cache"),
    "falcon": (tf.FalconForCausalLM, tf.FalconConfig(**_SIZES, alibi=True), "ALiBi"),
    "t5": (tf.T5ForConditionalGeneration, _T5, "encoder-decoder"),
    "bert": (tf.BertLMHeadModel, tf.BertConfig(**_SIZES), "when later tokens or other rows change"),
    "gpt2": (tf.GPT2Model, tf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4), "logits"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_models_that_cannot_work_are_refused_by_name(kind: str) -> None:
    """In memory, by architecture, with the reason: before a wrong text."""
    model_class, config, reason = UNSUPPORTED[kind]
    model = random_model(model_class, config, 0)
    with pytest.raises(UnsupportedModel) as error:
        outrider.load(model)
    assert type(model).__name__ in str(error.value) and f"({kind})" in str(error.value)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_context_ends_where_tokens_would_depend_on_other_tokens() -> None:
    """Beyond it the rotation of every token depends on the longest position in the forward: on what is drafted, and on
    the neighbours in a batch. A rope of one type of layer cuts the context of all."""
    plain: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    long = plain | factors | {"rope_type": "longrope", "original_max_position_embeddings": 24}
    assert outrider.load(random_llama(context_len=64, rope_parameters=long)).target.context_len == 24

    def context_of(full: dict[str, Any], sliding: dict[str, Any]) -> int:
        ropes = {"full_attention": full, "sliding_attention": sliding}
        layers = {"num_hidden_layers": 2, "layer_types": list(ropes), "sliding_window": 16, "head_dim": 8}
        config = tf.Gemma3TextConfig(**layers, max_position_embeddings=256, rope_parameters=ropes)
        return context_len(config)

    assert context_of(long, plain) == context_of(plain, long) == 24
    scaled = tf.Llama4TextConfig(floor_scale=48, max_position_embeddings=256)
    assert context_len(scaled) == 24  # beyond, it would scale queries by the length of the cache
    scaled.attn_temperature_tuning = False
    assert context_len(scaled) == 256


def test_the_checksum_of_weights_knows_every_bit() -> None:
    """Also of bfloat16, which NumPy does not have. Of blocks it is that of the bytes in the file, though rows are
    interleaved by the lanes of the processor's vectors."""
    first, second = random_llama().bfloat16(), random_llama().bfloat16()
    assert weights_checksum(first) == weights_checksum(second) != weights_checksum(random_llama())
    with torch.no_grad():
        second.model.norm.weight[3] *= 1.01
    assert weights_checksum(first) != weights_checksum(second)
    rows = torch.from_numpy(block_bytes((40, 64), "Q4_0", 0))
    module = nn.Linear(64, 40, bias=False)
    order = torch.arange(64, dtype=torch.int32).flip(0)
    module.weight = nn.Parameter(NarrowWeight.of_blocks(rows, BLOCK_FORMS[2], order), requires_grad=False)
    head, tail = b"weight (40, 64) torch.float32\n", order.numpy().tobytes()
    assert weights_checksum(module) == hashlib.sha256(head + rows.numpy().tobytes() + tail).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fable", "fable-draft"), ("fable:int8", "ngram"), ("fable:8bit", "ngram")])
def test_nothing_is_printed(names: tuple[str, str]) -> None:
    assert said_by_loading(*names) == ""
