"""GGUF files whose matrices stay in blocks: the model is that of the widened weights. (Here, all are large.)"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import outrider
from ggml_blocks import block_bytes
from gguf_models import Case, write_case
from launch import said_by_loading
from outrider.errors import OptionError
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.weights import num_bytes
from rounded_rows import rounded

_FIELDS = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "eos_token_id": 96,
}


@pytest.fixture(autouse=True)
def _no_matrix_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)


def _write(file: Path, kind: str, form_of: Any) -> Path:
    """A GGUF file of a random model, its matrices in blocks."""
    keys = {"attention.key_length": 128, "attention.value_length": 128}
    add = gguf.GGUFWriter.add_tensor

    def add_in_blocks(writer: gguf.GGUFWriter, name: str, numbers: Any) -> None:
        form = form_of(name) if numbers.ndim > 1 and "gate_inp" not in name else None
        if form is None:
            add(writer, name, numbers)
            return
        of_form = gguf.GGMLQuantizationType[form]
        if form in ("Q4_0", "Q8_0"):
            blocks = gguf.quants.quantize(numbers, of_form)
        else:
            rows = block_bytes((numbers[..., 0].size, numbers.shape[-1]), form, sum(name.encode()))
            blocks = rows.reshape(*numbers.shape[:-1], -1)
        add(writer, name, blocks, raw_dtype=of_form)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_in_blocks)
        fields = _FIELDS
        if kind == "qwen3moe":
            fields = fields | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
            keys["expert_feed_forward_length"] = 256
        return write_case(
            file, Case({"gemma3": "gemma3_text", "qwen3moe": "qwen3_moe"}.get(kind, kind), kind, fields, keys)
        )


def _of_k_quants(name: str) -> str:
    """As Q4_K_M has them."""
    if "attn_v" in name or "embd" in name:
        return "Q6_K"
    return "Q5_K" if "ffn_down" in name else "Q4_K"


_FILES = {"Q8_0": lambda _: "Q8_0", "Q4_0": lambda _: "Q4_0", "Q4_K_M": _of_k_quants}


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("llama", "Q4_K_M"),
        ("qwen2", "Q4_K_M"),
        ("qwen3", "Q4_0"),
        ("qwen3moe", "Q4_K_M"),
        ("gemma2", "Q8_0"),
        ("gemma3", "Q8_0"),
    ],
)
def test_it_is_the_widened_model(kind: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number, to the bit: rows that the file has in another order, and shifted norms, are undone alike. Memory is
    that of the blocks, predicted before loading."""
    file = _write(tmp_path / "tiny.gguf", kind, _FILES[form])
    predicted: list[int] = []
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    kept, plain = outrider.load(f"{file}:a32"), outrider.load(file, store="plain")
    assert predicted[0] == num_bytes(kept.target.model)
    assert num_bytes(kept.target.model) < 1.1 * sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
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


@pytest.mark.parametrize(
    ("kind", "ending", "num_digits"), [("llama", "", 1), ("qwen3", ":a8", 1), ("llama", ":a15", 2)]
)
def test_activations_of_integers(kind: str, ending: str, num_digits: int, tmp_path: Path) -> None:
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
    with pytest.raises(OptionError, match="quantized with gguf already"):
        outrider.load(file, quantization="int8")


def test_a_matrix_in_no_blocks_is_widened(tmp_path: Path) -> None:
    """Beside others that are in blocks; small ones are plain."""
    file = _write(tmp_path / "tiny.gguf", "llama", lambda name: None if "embd" in name else "Q8_0")
    kept, plain = outrider.load(file).target.model, outrider.load(file, store="plain").target.model
    embedding = kept.get_input_embeddings().weight
    assert embedding.blocks is None and embedding.stored.dtype == torch.float32
    assert torch.equal(embedding.wide(), plain.get_input_embeddings().weight)


@pytest.mark.slow  # as other kinds of files, in test_loading.py
def test_loading_prints_nothing(tmp_path: Path) -> None:
    assert said_by_loading(str(_write(tmp_path / "tiny.gguf", "llama", _FILES["Q4_0"])), "ngram") == ""
