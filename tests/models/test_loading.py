"""From names and folders to models that are known to work; everything else is refused with its name and the reason."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import nn

import outrider
from ggml_blocks import block_bytes
from gguf_models import CASES as FILES
from gguf_models import write_case
from heads import mtp_pair, write_eagle3, write_mtp
from hybrids import hybrid
from launch import said_by_loading
from multimodal import KINDS, multimodal
from native_cases import CASES, VOCAB
from native_cases import random_model as native_model
from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import (
    DeviceError,
    FileError,
    ModelCorrupt,
    ModelError,
    ModelNotFound,
    OptionError,
    OutriderError,
    UnsupportedModel,
)
from outrider.kernels.blocks import BLOCK_TYPES
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.executions import choose_execution
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.kinds import building, check_counts
from outrider.models.loading import context_len
from outrider.models.placement import pick_device
from outrider.models.registry import ModelSpec, resolve
from outrider.models.sampling_defaults import StatedSampling, stated_sampling
from outrider.models.weights import weights_checksum
from outrider.native.plan import NotPlanned
from outrider.native.planned_model import PlannedModel
from outrider.options import Sampling
from outrider.serve.about import fingerprint_of
from pairs import NUM_WORDS, embedded, random_llama, save, stating, word_tokenizer
from toys import as_lm, random_model, tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", random_llama().float())


def refusal(folder: str | Path, kind: type[ModelError]) -> str:
    with pytest.raises(kind) as error:
        outrider.load(folder)
    message = str(error.value)
    assert str(folder) in message and "\n" not in message
    return message


def test_a_folder_is_loaded_in_the_dtype_that_is_asked_for(folder: Path, tmp_path: Path) -> None:
    decoder = outrider.load(str(folder), dtype="float64")
    assert decoder.eos_ids == {NUM_WORDS - 1} and decoder.target.context_len == 64
    assert decoder.target.name == str(folder) and not decoder.target.model.training
    in_memory = outrider.load(random_llama().float().double(), tokenizer=word_tokenizer())
    options: dict[str, Any] = {"seed": 1, "max_new_tokens": 20}
    assert decoder.generate("w1 w2", **options)[0].text == in_memory.generate("w1 w2", **options)[0].text
    assert outrider.load("fable", device="cpu").target.dtype == torch.float32  # of a checkpoint in bfloat16
    models = tmp_path / "models.toml"
    models.write_text(f'[models.mine]\npath = "{folder}"\ndtype = "float64"\ndevice = "cpu"\n')
    assert outrider.load("mine", models_file=models).target.dtype == torch.float64
    assert outrider.load("mine", models_file=models, dtype="float16").target.dtype == torch.float16
    tf.GenerationConfig(eos_token_id=[5, 7]).save_pretrained(folder)  # as of Llama 3, whose config.json lacks one
    assert outrider.load(folder).eos_ids == {5, 7}


def test_auto_takes_the_best_device_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    has = {"cuda": False}
    with pytest.raises(DeviceError, match="there is no device 'tpu' here: choose auto, cpu"):
        pick_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has["cuda"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    has["cuda"] = True
    assert (pick_device("auto"), pick_device("cuda:1")) == (torch.device("cuda"), torch.device("cuda:1"))
    with pytest.raises(DeviceError, match="'cuda:2' here: choose auto, cpu, cuda, cuda:0, cuda:1"):
        pick_device("cuda:2")


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    message = refusal("nobody-here/no-such-model", ModelNotFound)
    assert "cannot be fetched, and is not in the local cache" in message
    assert "check its name and the network, or give a local folder" in message


_UP = "model.layers.1.mlp.up_proj.weight"
_OWN_CODE = "the {} of {{}} needs code of its own, which is never run here"
_CODE = {"tokenizer_class": "MartianTokenizer", "auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}}
_CONFIG_CODE = {"model_type": "martian", "auto_map": {"AutoConfig": "code.Config"}}
_MODEL_CODE = {"model_type": "vit", "architectures": None, "auto_map": {"AutoModelForCausalLM": "code.Model"}}
# A file, its new content (None: removed; fields that are changed; a change of its tensors), and the message.
DAMAGED: dict[str, tuple[str, Any, str]] = {
    "no config": ("config.json", None, "is not a model folder: there is no config.json in it"),
    "a missing tensor": ("model.safetensors", lambda one: one.pop(_UP), f"lacks 1 of the model's weights, {_UP}"),
    "a tensor of another shape": ("model.safetensors", lambda one: one.update({_UP: one[_UP][:-1].clone()}), "up_proj"),
    "a broken tokenizer": ("tokenizer.json", "{}", "tokenizer"),
    "a broken config": ("config.json", '{"model_type": "llama",', "JSON"),
    "a config of nonsense": ("config.json", {"hidden_size": "large"}, "hidden_size"),
    "a config that is a list": ("config.json", "[]", "config.json: not a JSON object"),
    "a config with a part of nonsense": ("config.json", {"text_config": {}}, "the model of"),
    "a text for a list": ("config.json", {"architectures": "LlamaForCausalLM"}, "architectures = 'LlamaForCausalLM'"),
    "no chat template": ("tokenizer_config.json", {"chat_template": 5}, "has the chat template 5, which is no text"),
    "an empty file": ("model.safetensors", "", "header too small"),
    "another task": ("config.json", {"architectures": ["BertForMaskedLM"]}, "is not a causal language model"),
    "a quantization": ("config.json", {"quantization_config": {"quant_method": "martian"}}, "martian"),
}
NOT_ALONE: dict[str, tuple[str, Any, str]] = {
    "EAGLE-3": ("config.json", {"draft_vocab_size": 32}, "is an EAGLE-3 head"),
    "Medusa": ("config.json", {"medusa_num_heads": 2}, "is a set of Medusa heads"),
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
def test_load_refuses_damaged_folders(folder: Path, damage: str) -> None:
    """One line that names the folder and what is wrong with it; never random weights in place of missing ones."""
    name, content, message = DAMAGED[damage]
    _alter(folder / name, content)
    assert message in refusal(folder, ModelCorrupt)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["3", 2.5, [[1]], {"a": 1}, True])
def test_load_refuses_ends_that_are_no_ids(folder: Path, name: str, value: Any) -> None:
    (folder / "generation_config.json").unlink()
    _alter(folder / name, {"eos_token_id": value})
    assert f"states eos_token_id = {value!r}, which is no token id" in refusal(folder, ModelCorrupt)


def test_load_refuses_weights_under_other_names(folder: Path) -> None:
    (folder / "other.safetensors").symlink_to(folder / "nowhere")
    outrider.load(folder)
    (folder / "model.safetensors").rename(folder / "draft.safetensors")
    assert "no file named model.safetensors" in refusal(folder, ModelCorrupt)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {_UP: "gone.safetensors"}}))
    assert "gone.safetensors is not there" in refusal(folder, ModelCorrupt)


def test_an_adapter_beside_a_model_of_the_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has only the files that were asked for."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda _, name, **__: shutil.copy(folder / name, tmp_path))
    _alter(folder / "adapter_config.json", {})
    with pytest.raises(UnsupportedModel, match="org/model is a PEFT adapter of its base, or has one beside it"):
        outrider.load("org/model")


def test_a_refused_plan_is_not_filled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.models.loading.NativeForward", Mock(side_effect=NotPlanned("no")))
    monkeypatch.setattr("outrider.models.loading.BackgroundCopies", pytest.fail)
    assert not isinstance(outrider.load(folder).target.weights, PlannedModel)


@pytest.mark.parametrize("kind", NOT_ALONE)
def test_load_refuses_heads_and_adapters_alone(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As target and, if it is a head, as draft. Its code is not run, nor asked for on standard input."""
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
def test_load_refuses_unsupported_models_by_name(kind: str) -> None:
    model_class, config, reason = UNSUPPORTED[kind]
    model = random_model(model_class, config, 0)
    with pytest.raises(UnsupportedModel) as error:
        outrider.load(model)
    assert type(model).__name__ in str(error.value) and f"({kind})" in str(error.value)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_context_ends_where_tokens_would_depend_on_other_tokens() -> None:
    """Beyond, the rotation of every token depends on the longest position in the forward: on drafts and neighbours."""
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
    """Also of bfloat16. Of blocks it is that of the file's bytes, though rows are interleaved by lanes of vectors."""
    first, second = random_llama().bfloat16(), random_llama().bfloat16()
    assert weights_checksum(first) == weights_checksum(second) != weights_checksum(random_llama())
    with torch.no_grad():
        second.model.norm.weight[3] *= 1.01
    assert weights_checksum(first) != weights_checksum(second)
    rows = torch.from_numpy(block_bytes((40, 64), "Q4_0", 0))
    module = nn.Linear(64, 40, bias=False)
    order = torch.arange(64, dtype=torch.int32).flip(0)
    module.weight = nn.Parameter(NarrowWeight.of_blocks(rows, BLOCK_TYPES[2], order), requires_grad=False)
    head, tail = b"weight (40, 64) torch.float32\n", order.numpy().tobytes()
    assert weights_checksum(module) == hashlib.sha256(head + rows.numpy().tobytes() + tail).hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fable", "fable-draft"), ("fable:int8", "ngram"), ("fable:8bit", "ngram")])
def test_nothing_is_printed(names: tuple[str, str]) -> None:
    assert said_by_loading(*names) == ""


def _folder(folder: Path, family: str, name: str, **fields: Any) -> Path:
    native_model(family, CASES[family][name]).save_pretrained(folder)
    word_tokenizer(VOCAB).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


@pytest.mark.parametrize("name", ["gemma4, experts", "nemotron_h_moe, latent, groups"])
def test_a_file_of_which_no_expert_is_chosen(name: str, tmp_path: Path) -> None:
    decoder = load(write_case(tmp_path / "model.gguf", FILES[name], expert_used_count=0), device="cpu")
    assert decoder.target.execution.name == "eager"
    decoder.generate("AB", max_new_tokens=2)
    with pytest.raises(ModelCorrupt, match="states expert_used_count = -1, which no model has"):
        load(write_case(tmp_path / "other.gguf", FILES[name], expert_used_count=-1), device="cpu")


@pytest.mark.parametrize(
    ("family", "name", "fields", "reason"),
    [
        ("gemma2", "plain", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ("glm4_moe", "groups", {"n_group": 0}, "n_group = 0"),
        ("llama", "plain", {"num_hidden_layers": 2**32 - 1}, "num_hidden_layers = 4294967295"),
        ("qwen3_moe", "plain", {"num_experts_per_tok": -1}, "num_experts_per_tok = -1"),
    ],
)
def test_a_configuration_with_a_number_that_no_model_has(
    family: str, name: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(OutriderError, match=reason) as found:
        load(_folder(tmp_path, family, name, **fields), device="cpu")
    assert "\n" not in str(found.value)


def test_memory_that_is_lacking_while_a_model_is_built_and_numbers_that_mean_unset() -> None:
    check_counts("the model", {"yarn_ext_factor": -1.0, "image_hidden_layer": -1, "vit_layers": [-2, -9]})
    with pytest.raises(DeviceError, match="not enough memory"), building("the model cannot be run"):
        raise RuntimeError("[...] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("name", KINDS)
def test_text_from_a_folder_is_that_of_generate(name: str, tmp_path: Path) -> None:
    model: Any = multimodal(name)
    folder = save(tmp_path / name, model, word_tokenizer())
    prompts = [[1, 2, 3], [5, 4, 3, 2, 8, 7] * 4]
    want = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8)
        want.append(text[0, len(prompt) :].tolist())
    for draft in ("none", folder):
        done = outrider.load(folder, draft).generate(prompts, temperature=0, max_new_tokens=8, ignore_eos=True)
        assert [list(one.token_ids) for one in done] == want


@pytest.mark.parametrize(("name", "want"), [("auto", "eager"), ("native", "native")])
def test_a_model_in_memory_runs_eagerly_unless_asked(name: str, want: str) -> None:
    decoder = outrider.load(tiny_llama().float(), "ngram", execution=name)
    lm = decoder.target
    assert lm.execution.name == want
    promise = {"native": "promised", "eager": "not promised (eager)"}[want]
    sampled = replace(decoder, acceptance="gumbel")
    assert lm.same_bytes == decoder.same_bytes(0.0) == sampled.same_bytes(1.0) == promise
    assert decoder.same_bytes(1.0) == "not promised (block)" and decoder.plain().same_bytes(1.0) == promise


def test_a_model_from_files_runs_natively(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, folder = resolve("fable-draft").path, tmp_path / "known"
    assert source is not None
    shutil.copytree(source, folder)
    assert outrider.load(folder).target.execution.name == "native"
    assert outrider.load(folder, execution="eager").target.execution.name == "eager"
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_act"', '"attention_chunk_size": 3, "hidden_act"'))
    with caplog.at_level("INFO"):
        assert outrider.load(folder).target.execution.name == "eager"
    assert "runs eagerly: its plan does not know attention_chunk_size=3" in caplog.text
    with pytest.raises(OptionError, match="its plan does not know attention_chunk_size=3"):
        outrider.load(folder, execution="native")


def test_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = as_lm(tiny_llama())
    assert not lm.has_states  # found while it can run
    monkeypatch.setattr(lm, "device", torch.device("cuda"))
    monkeypatch.setattr("outrider.models.executions.probe", lambda lm: None)
    found = {name: choose_execution(lm, name).execution.name for name in ("auto", "eager", "captured")}
    assert found == {"auto": "captured", "eager": "eager", "captured": "captured"}
    lm.num_shares = 2
    assert choose_execution(lm, "auto").execution.name == "eager"
    with pytest.raises(OptionError, match="is shared by 2 processes: leave it out"):
        choose_execution(lm, "captured")


PICKLED = "pytorch_model.bin"


def pickled(folder: Path, *, more: Any = None) -> Path:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors if more is None else {**tensors, "more": more}, folder / PICKLED)
    return folder


def refuses(load: Callable[[], Any], location: Path, file: str = PICKLED) -> bool:
    with pytest.raises(UnsupportedModel) as error:
        load()
    return str(error.value).startswith(f"the weights of {location} are in {file}, a pickle, which may run code: take")


class Trap:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_targets_and_drafts(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", random_llama())
    folder = pickled(save(tmp_path / "pickled", random_llama()))
    assert refuses(lambda: outrider.load(folder), folder)
    assert refuses(lambda: outrider.load(plain, folder), folder)
    for allowed in (outrider.load(folder, allow_pickle=True), outrider.load(plain, folder, allow_pickle=True)):
        for lm in (allowed.target, *allowed.drafter.models):
            assert torch.equal(lm.model.model.norm.weight, random_llama().model.norm.weight.to(lm.dtype))
    (folder / PICKLED).rename(folder / "pytorch_model-1.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(random_llama().state_dict(), "pytorch_model-1.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert refuses(lambda: outrider.load(folder), folder, "pytorch_model.bin.index.json")
    # Nor can a configuration name one in place of the weights that are there. (Transformers takes no other such name.)
    torch.save(load_file(plain / "model.safetensors"), plain / "adapter_model.bin")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))
    assert refuses(lambda: outrider.load(plain), plain, "adapter_model.bin")


def test_mtp_layers(tmp_path: Path) -> None:
    target, drafter = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    write_mtp(tmp_path, target.model, layout="qwen")
    target.model.config._name_or_path = str(pickled(tmp_path))
    assert refuses(lambda: load_mtp_of(target), tmp_path)
    found, want = load_mtp_of(target, allow_pickle=True).model.state_dict(), drafter.models[0].model.state_dict()
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("is_head", [False, True])
def test_allowed_pickles_run_no_code(tmp_path: Path, is_head: bool) -> None:
    """With the control: PyTorch's plain unpickler would."""
    folder, trap = save(tmp_path / "model", random_llama(num_layers=6)), tmp_path / "trap"
    target = outrider.load(folder)
    if is_head:
        write_eagle3(tmp_path / "head", target.target.model, layout="specforge")
        folder = tmp_path / "head"
    pickled(folder, more=Trap(trap))
    with pytest.raises(ModelCorrupt):
        if is_head:
            load_head(resolve(str(folder)), target.target, allow_pickle=True)
        else:
            outrider.load(folder, allow_pickle=True)
    assert not trap.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)["more"].close()
    assert trap.exists()


STATED = {"temperature": 0.4, "top_k": 9, "top_p": 1.0, "eos_token_id": 0, "do_sample": False, "max_new_tokens": 3}
TAKEN = {"temperature": 0.4, "top_k": 9}
OPTIONS: dict[str, Any] = {"seed": 1, "max_new_tokens": 6}


def spec_of(path: Path, document: Any) -> ModelSpec:
    (path / "generation_config.json").write_text(json.dumps(document))
    return ModelSpec("toy", path=path)


def test_stated_sampling_is_that_of_the_files(tmp_path: Path) -> None:
    assert stated_sampling(spec_of(tmp_path, STATED)).defaults == TAKEN
    assert stated_sampling(spec_of(tmp_path, STATED), "none") == StatedSampling()
    assert stated_sampling(spec_of(tmp_path, {"temperature": None, "do_sample": True})) == StatedSampling()
    assert stated_sampling(resolve("fable")).defaults == embedded().sampling_defaults == {}
    with pytest.raises(FileError, match="temperature = -1 is invalid: .*; --generation-config none does without it"):
        stated_sampling(spec_of(tmp_path, {"temperature": -1}))


def test_what_a_gguf_file_states(tmp_path: Path) -> None:
    def stated_in(name: str, **stated: Any) -> StatedSampling:
        keys = {f"general.sampling.{key}": value for key, value in stated.items()}
        return stated_sampling(resolve(str(write_case(tmp_path / name, FILES["llama"], keys=keys))))

    found = stated_in("model.gguf", temp=0.7, top_p=0.95, top_k=20, penalty_repeat=1.0)
    assert found.defaults == {"temperature": 0.7, "top_p": 0.95, "top_k": 20} and not found.others
    assert found.options.keys() == {"temperature", "top_p", "top_k", "repetition_penalty"}
    assert stated_in("greedy.gguf", temp=-1.0).options == {"temperature": 0.0}
    others = stated_in("others.gguf", temp=0.7, xtc_probability=0.5, mirostat=2, penalty_last_n=64, penalty_repeat=1.5)
    assert others.text("others.gguf", others.defaults) == (
        "sampling as others.gguf states: temperature 0.7, repetition-penalty 1.5; "
        "not honoured: mirostat, penalty_last_n, xtc_probability (--generation-config none does without)"
    )
    assert stated_in("off.gguf", mirostat=0, xtc_probability=0.0, penalty_last_n=64) == StatedSampling()
    with pytest.raises(FileError, match="temperature = .* is invalid"):
        stated_in("wrong.gguf", temp=float("nan"))


def test_the_library_takes_them_where_nothing_else_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = stating(tmp_path / "fable", STATED)
    with caplog.at_level("INFO", "outrider.sampling"):  # which the server shows
        decoder = outrider.load(folder, dtype="float32", device="cpu")
    assert decoder.sampling_defaults == TAKEN and "states: temperature 0.4, top-k 9 (" in caplog.text
    plain, prompts = embedded().plain(), ["Once upon a time", "The king"]

    def said(decoder: Any, *arguments: Any, **options: Any) -> list[tuple[int, ...]]:
        done = decoder.generate(prompts, *arguments, **OPTIONS | options)
        return [one.token_ids for one in done]

    assert said(decoder) == said(plain, **TAKEN) != said(plain)
    assert said(decoder, temperature=1.5) == said(plain, temperature=1.5, top_k=9)
    assert said(decoder, Sampling()) == said(plain)
    assert said(outrider.load(folder, dtype="float32", device="cpu", generation_config="none")) == said(plain)
    assert fingerprint_of(decoder) != fingerprint_of(replace(decoder, sampling_defaults={}))


_IDS = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(0))


def _text(decoder: Decoder) -> tuple[int, ...]:
    return tuple(decoder.generate([[5, 6, 7]], temperature=0, max_new_tokens=12, ignore_eos=True)[0].token_ids)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "gguf"])
def test_a_known_family_needs_no_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text, context, tokens and weights are those of the model that Transformers loads; it is there when asked for."""
    if name == "bfloat16":  # so that matrices stay in their type
        monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
        monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    file = tmp_path / "a"
    if name == "gguf":
        write_case(file, next(case for key, case in FILES.items() if key.startswith("gemma3")))
    else:
        save(file, random_llama(tie_word_embeddings=name == "bfloat16").to(getattr(torch, name)))
    first, second = outrider.load(file), outrider.load(file, execution="eager")
    ours, theirs = first.target, second.target
    assert isinstance(ours.weights, PlannedModel) and not isinstance(theirs.weights, PlannedModel)
    assert _text(first) == _text(second)
    assert weights_checksum(ours.weights) == weights_checksum(theirs.weights)
    assert (ours.context_len, ours.vocab_size, first.eos_ids) == (theirs.context_len, theirs.vocab_size, second.eos_ids)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    models: list[Any] = [ours.model, theirs.model]
    built, whole = ({**model.config.to_dict(), "_name_or_path": ""} for model in models)
    assert type(models[0]) is type(models[1]) and built == whole
    ties = [model.get_output_embeddings().weight is model.get_input_embeddings().weight for model in models]
    assert ties == [name != "float32"] * 2
    with torch.inference_mode():
        torch.testing.assert_close(*(model(_IDS).logits for model in models), rtol=0.0, atol=1e-5)
    checksum, stored = weights_checksum(ours.weights), file if name == "gguf" else file / "model.safetensors"
    stored.write_bytes(bytes(stored.stat().st_size))
    assert weights_checksum(ours.weights) == checksum  # they are in memory


def test_a_head_beside_a_tied_embedding(tmp_path: Path) -> None:
    """A copy of the embedding is tied; any other matrix is the model's head, whatever its configuration states."""
    folder = save(tmp_path, random_llama().float())
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    for head, is_planned in ((embedding.clone(), True), (embedding.flip(0), False)):
        weights["lm_head.weight"] = head
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        lm, want = outrider.load(folder).target, tf.AutoModelForCausalLM.from_pretrained(folder)
        assert isinstance(lm.weights, PlannedModel) == is_planned == (lm.execution.name == "native")
        with torch.inference_mode():
            assert torch.equal(lm.model(_IDS).logits.argmax(-1), want(_IDS).logits.argmax(-1))
