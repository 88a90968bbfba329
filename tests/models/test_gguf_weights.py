"""GGUF files whose matrices stay in blocks: the model is that of the widened weights. (Here, all are large.)"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import outrider
from ggml_blocks import block_bytes
from launch import said_by_loading
from outrider.errors import DeviceError, OptionError
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.checksums import weights_checksum
from outrider.models.quantize import num_bytes
from outrider.runtime.tensor_parts import stored_tensors
from rounded_rows import rounded
from toys import random_model

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "eos_token_id": 96,
    "bos_token_id": 0,
    "pad_token_id": None,
}
_CLASSES = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
}


@pytest.fixture(autouse=True)
def _no_matrix_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)


def _model(kind: str) -> PreTrainedModel:
    cls, config = _CLASSES[kind]
    return random_model(cls, config(**_SIZES), 0)


def _write(file: Path, kind: str, form_of: Any) -> Path:
    """A GGUF file of a random model, its matrices in blocks."""
    model = _model(kind)
    config = model.config
    writer = gguf.GGUFWriter(file, kind)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_SIZES["head_dim"])
    writer.add_value_length(_SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["w", "2", "3", *(f"w{i}" for i in range(2, config.vocab_size - 1))])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_token_merges(["w 2", "w 3"])  # Transformers 5.17 wants some
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(config.vocab_size - 1)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), config.num_hidden_layers)
    for seed, (name, tensor) in enumerate(model.state_dict().items()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        numbers = tensor.float().numpy()
        form = form_of(name) if tensor.ndim == 2 else None
        if form is None:
            writer.add_tensor(new, numbers)
        elif form in ("Q4_0", "Q8_0"):
            kind_of = gguf.GGMLQuantizationType[form]
            writer.add_tensor(new, gguf.quants.quantize(numbers, kind_of), raw_dtype=kind_of)
        else:
            blocks = block_bytes(tuple(tensor.shape), form, seed)
            writer.add_tensor(new, blocks, raw_dtype=gguf.GGMLQuantizationType[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _of_k_quants(name: str) -> str:
    """As Q4_K_M has them."""
    if "v_proj" in name or "embed" in name:
        return "Q6_K"
    return "Q5_K" if "down_proj" in name else "Q4_K"


_FILES = {"Q8_0": lambda _: "Q8_0", "Q4_0": lambda _: "Q4_0", "Q4_K_M": _of_k_quants}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("llama", "Q8_0"),
        ("llama", "Q4_0"),
        ("llama", "Q4_K_M"),
        ("qwen2", "Q4_K_M"),
        ("qwen3", "Q4_0"),
        ("gemma2", "Q8_0"),
        ("gemma3", "Q8_0"),
    ],
)
def test_it_is_the_widened_model(kind: str, form: str, tmp_path: Path) -> None:
    """Every number, to the bit: rows that the file has in another order, and shifted norms, are undone alike."""
    file = _write(tmp_path / "tiny.gguf", kind, _FILES[form])
    kept, plain = outrider.load(f"{file}:a32"), outrider.load(file, store="plain")
    wide = dict(plain.target.model.named_buffers()) | plain.target.model.state_dict()
    forms = set()
    for key, tensor in (dict(kept.target.model.named_buffers()) | kept.target.model.state_dict()).items():
        if isinstance(tensor, NarrowWeight):
            assert tensor.blocks is not None, key
            forms.add(tensor.blocks.name)
        assert torch.equal(tensor.wide() if isinstance(tensor, NarrowWeight) else tensor, wide[key]), key
    assert forms == ({"Q4_K", "Q5_K", "Q6_K"} if form == "Q4_K_M" else {form})
    ids = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(0))
    many = torch.randint(97, (4, 40), generator=torch.Generator().manual_seed(1))  # beyond the kernel
    with torch.inference_mode():
        for one in (ids, many):
            logits, want = kept.target.model(one).logits, plain.target.model(one).logits
            torch.testing.assert_close(logits, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    texts = [one.generate([[5, 6, 7]], **options)[0].token_ids for one in (kept, plain)]
    assert texts[0] == texts[1]


def test_memory_is_that_of_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted before loading, to the byte."""
    file = _write(tmp_path / "tiny.gguf", "llama", _FILES["Q4_K_M"])
    predicted: list[int] = []
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    model = outrider.load(file).target.model
    in_blocks = sum(
        part.nbytes
        for weight in set(model.parameters())
        if isinstance(weight, NarrowWeight)
        for part in stored_tensors(weight)
    )
    assert predicted == [num_bytes(model)] and in_blocks > 0.9 * num_bytes(model)
    assert num_bytes(model) < 1.1 * sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
    monkeypatch.undo()
    monkeypatch.setattr("outrider.models.memory_fit.available_bytes", lambda _: 2**10)
    with pytest.raises(DeviceError, match="the weights of .* need"):
        outrider.load(file)


def test_as_a_draft(tmp_path: Path) -> None:
    """Of itself: greedy, every token of it is accepted."""
    file = _write(tmp_path / "tiny.gguf", "llama", _FILES["Q4_0"])
    decoder = outrider.load(file, file)
    (output,) = decoder.generate([[5, 6, 7]], temperature=0, max_new_tokens=12, ignore_eos=True, num_draft_tokens=3)
    assert output.stats.num_accepted_draft_tokens == output.stats.num_draft_tokens > 0
    assert weights_checksum(decoder.target.model) == weights_checksum(outrider.load(file).target.model)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(("ending", "num_digits"), [("", 1), (":a8", 1), (":a15", 2)])
def test_activations_of_integers(ending: str, num_digits: int, kind: str, tmp_path: Path) -> None:
    """The widened model, with the inputs of its linear layers rounded; for few rows and for many."""
    file = _write(tmp_path / "tiny.gguf", kind, _FILES["Q4_K_M" if kind == "llama" else "Q8_0"])
    decoder, plain = outrider.load(f"{file}{ending}"), outrider.load(file, store="plain").target.model
    assert decoder.target.name == f"{file}{ending}"
    for layer in plain.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_pre_hook(lambda _, inputs: rounded(*inputs, num_digits))
    for shape in ((2, 9), (4, 40)):
        ids = torch.randint(97, shape, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            logits, want = decoder.target.model(ids).logits, plain(ids).logits
        # A sum in another order may round an activation to the next integer.
        share = 2e-2 if num_digits == 1 else 1e-3
        torch.testing.assert_close(logits, want, rtol=0.0, atol=share * float(want.abs().amax()))
        assert (logits - want).abs().mean() < share / 10 * want.abs().amax()
    draft = outrider.load(f"{file}{ending}", f"{file}{ending}")
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "num_draft_tokens": 3}
    (output,), (alone,) = (one.generate([[5, 6, 7]], **options) for one in (draft, decoder))
    assert output.token_ids == alone.token_ids
    assert output.stats.num_accepted_draft_tokens == output.stats.num_draft_tokens > 0


def test_activations_of_8_bits_need_blocks(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf", "llama", _FILES["Q8_0"])
    for name, options in (("fable:a8", {}), (f"{file}:a8", {"store": "plain"}), (f"{file}:a8", {"dtype": "float64"})):
        with pytest.raises(OptionError, match="a8"):
            outrider.load(name, **options)


def test_a_matrix_in_no_blocks_is_widened(tmp_path: Path) -> None:
    """Beside others that are in blocks; small ones are plain."""
    file = _write(tmp_path / "tiny.gguf", "llama", lambda name: None if "embed" in name else "Q8_0")
    kept, plain = outrider.load(file).target.model, outrider.load(file, store="plain").target.model
    embedding = kept.get_input_embeddings().weight
    assert embedding.blocks is None and embedding.stored.dtype == torch.float32
    assert torch.equal(embedding.wide(), plain.get_input_embeddings().weight)


@pytest.mark.slow  # as other kinds of files, in test_notices.py
def test_loading_prints_nothing(tmp_path: Path) -> None:
    assert said_by_loading(str(_write(tmp_path / "tiny.gguf", "llama", _FILES["Q4_0"])), "ngram") == ""
