"""Checkpoints in groups of 4 bits: GPTQ, AWQ and compressed-tensors, read without their packages. (Here, all matrices
are large.)"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaForCausalLM

import outrider
from outrider.errors import MissingExtra, ModelCorrupt, OptionError
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.groups import layout_of
from outrider.models.weights import num_bytes
from pairs import random_llama, save
from rounded_rows import rounded

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output of each place in a word, in AutoAWQ
_GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _no_matrix_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)


class _Parts:
    """A layer [O, I] of any integers, with what they mean in float32."""

    def __init__(
        self, number: int, width: int, size: int, seed: int, *, is_symmetric: bool, is_ordered: bool, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.wholes = torch.randint(0, 16, (number, width), generator=generator)
        self.scales = (torch.rand(number, width // size, generator=generator) / 150 + 0.0005).to(dtype)
        self.zeros = torch.randint(0, 16, (number, width // size), generator=generator)
        if is_symmetric:
            self.zeros = torch.full_like(self.zeros, 8)
        self.group_of = torch.arange(width) // size
        if not is_ordered:
            self.group_of = self.group_of[torch.randperm(width, generator=generator)]

    def numbers(self) -> Tensor:
        """One row at a time."""
        rows = zip(self.wholes, self.zeros, self.scales.float(), strict=True)
        return torch.stack([(whole - zero[self.group_of]) * scale[self.group_of] for whole, zero, scale in rows])


def _packed(wholes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of a row in a word, at these places. [n, m] -> int32 [n, m / 8]"""
    words = torch.zeros(wholes.shape[0], wholes.shape[1] // 8, dtype=torch.long)
    for place, column in enumerate(order):
        words |= wholes[:, column::8] << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _as_gptq(parts: _Parts, less: int = 1) -> dict[str, Tensor]:
    """As AutoGPTQ's linear layer packs it: a word holds eight inputs, and zeros are one less."""
    zeros = torch.where(parts.zeros - less < 0, 0, parts.zeros - less)
    return {
        "qweight": _packed(parts.wholes).T.contiguous(),
        "qzeros": _packed(zeros.T.contiguous()),
        "scales": parts.scales.T.contiguous(),
        "g_idx": parts.group_of.int(),
    }


def _as_awq(parts: _Parts) -> dict[str, Tensor]:
    """As AutoAWQ's linear layer for ``gemm`` packs it: a word holds eight outputs, the even ones first."""
    return {
        "qweight": _packed(parts.wholes.T.contiguous(), _AWQ_ORDER),
        "qzeros": _packed(parts.zeros.T.contiguous(), _AWQ_ORDER),
        "scales": parts.scales.T.contiguous(),
    }


def _as_compressed(parts: _Parts, is_symmetric: bool) -> dict[str, Tensor]:
    """By the package's own packing."""
    stored = {
        "weight_packed": pack_to_int32((parts.wholes - 8).to(torch.int8), 4),
        "weight_scale": parts.scales,
        "weight_shape": torch.tensor(parts.wholes.shape),
    }
    if not is_symmetric:
        stored["weight_zero_point"] = pack_to_int32((parts.zeros - 8).to(torch.int8), 4, packed_dim=0)
    if not torch.equal(parts.group_of, parts.group_of.sort().values):
        stored["weight_g_idx"] = parts.group_of.int()
    return stored


def _scheme(size: int, is_symmetric: bool, **more: Any) -> dict[str, Any]:
    how = {"num_bits": 4, "type": "int", "symmetric": is_symmetric, "strategy": "group", "group_size": size} | more
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": how}},
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
_HALF, _BFLOAT16 = torch.float16, torch.bfloat16
# What is stated, the group's size, symmetric, ordered, type of scales, and how it is packed.
_LAYOUTS: dict[str, tuple[dict[str, Any], int, bool, bool, torch.dtype, Callable[[_Parts], dict[str, Tensor]]]] = {
    "gptq": (_GPTQ | {"group_size": 128}, 128, False, True, _HALF, _as_gptq),
    "gptq, symmetric": (_GPTQ | {"group_size": 64, "sym": True}, 64, True, True, _HALF, _as_gptq),
    "gptq_v2": (
        _GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"},
        *(32, False, True, _HALF, lambda parts: _as_gptq(parts, 0)),
    ),
    "gptq, act-order": (_GPTQ | {"group_size": 64, "desc_act": True}, 64, False, False, _HALF, _as_gptq),
    "awq": (_AWQ | {"group_size": 64}, 64, False, True, _HALF, _as_awq),
    "compressed": (_scheme(128, True), 128, True, True, _BFLOAT16, lambda parts: _as_compressed(parts, True)),
    "compressed, asymmetric": (_scheme(32, False), 32, False, True, _BFLOAT16, lambda p: _as_compressed(p, False)),
    "compressed, channels": (
        _scheme(128, True, strategy="channel", group_size=None),
        *(0, True, True, _BFLOAT16, lambda parts: _as_compressed(parts, True)),
    ),
    "compressed, act-order": (
        _scheme(64, False, actorder="group"),
        *(64, False, False, _BFLOAT16, lambda parts: _as_compressed(parts, False)),
    ),
}


def _model() -> LlamaForCausalLM:
    model = random_llama(num_layers=1, hidden_size=128, intermediate_size=256, tie_word_embeddings=False)
    assert isinstance(model, LlamaForCausalLM)
    return model


def _write(folder: Path, name: str, model: LlamaForCausalLM | None = None) -> LlamaForCausalLM:
    """A checkpoint in this layout. Returns the model that it means."""
    stated, size, is_symmetric, is_ordered, dtype, pack = _LAYOUTS[name]
    model = (_model() if model is None else model).to(dtype)
    save(folder, model)
    weights = load_file(folder / "model.safetensors")
    wide = model.float()
    for seed, (layer, module) in enumerate(wide.named_modules()):
        if not isinstance(module, nn.Linear) or layer == "lm_head":
            continue
        number, width = module.weight.shape
        parts = _Parts(
            number, width, size or width, seed, is_symmetric=is_symmetric, is_ordered=is_ordered, dtype=dtype
        )
        if stated.get("checkpoint_format") is None and stated["quant_method"] == "gptq":
            parts.zeros.clamp_min_(1)  # a zero of 0 has no number that is one less
        del weights[f"{layer}.weight"]
        weights |= {f"{layer}.{suffix}": tensor for suffix, tensor in pack(parts).items()}
        module.weight = nn.Parameter(parts.numbers(), requires_grad=False)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    return wide


@pytest.mark.parametrize("name", _LAYOUTS)
def test_it_is_the_model_that_the_layout_means(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number, kept and widened; logits; and greedy text, alone and as a draft of itself. Its memory is predicted
    before loading, to the byte."""
    want = _write(tmp_path, name)
    predicted: list[int] = []
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    kept, plain = outrider.load(tmp_path, tmp_path), outrider.load(tmp_path, store="plain")
    assert predicted[0] == num_bytes(kept.target.model)
    in_groups = 0
    for key, weight in want.named_parameters():
        one, other = kept.target.model.get_parameter(key), plain.target.model.get_parameter(key)
        in_groups += isinstance(one, NarrowWeight) and one.blocks is not None
        assert torch.equal(one.wide() if isinstance(one, NarrowWeight) else one, weight), key
        assert type(other) is nn.Parameter and torch.equal(other, weight), key
    assert in_groups == 7
    for shape in ((2, 9), (4, 40)):  # the latter beyond the kernel
        ids = torch.randint(97, shape, generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            logits, wide = kept.target.model(ids).logits, want(ids).logits
        torch.testing.assert_close(logits, wide, rtol=0.0, atol=1e-4 * float(wide.abs().amax()))
    (alone,) = outrider.load(want, tokenizer=kept.tokenizer).generate([[5, 6, 7]], **_GREEDY)
    (pair,) = kept.generate([[5, 6, 7]], num_draft_tokens=3, **_GREEDY)
    assert pair.token_ids == plain.generate([[5, 6, 7]], **_GREEDY)[0].token_ids == alone.token_ids
    assert pair.stats.num_accepted_draft_tokens == pair.stats.num_draft_tokens > 0


def test_zeros_of_the_other_convention_are_another_model(tmp_path: Path) -> None:
    """The same file, read as ``gptq_v2``: each weight is off by a scale. Without any statement it is the first form."""
    want = _write(tmp_path, "gptq")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    for form, is_right in ((None, True), ("gptq", True), ("gptq_v2", False)):
        config["quantization_config"]["checkpoint_format"] = form
        file.write_text(json.dumps(config))
        found = outrider.load(tmp_path).target.model.get_parameter(name).wide()
        assert torch.equal(found, want.get_parameter(name)) == is_right
    first = load_file(tmp_path / "model.safetensors")[name.replace("weight", "scales")].float().T[:, 0]
    shift = (want.get_parameter(name) - found)[:, :128]
    assert torch.allclose(shift, -first[:, None].expand(-1, 128), atol=1e-6)


def test_zeros_that_wrapped_around(tmp_path: Path) -> None:
    """GPTQModel subtracts 1 from all zeros of a word at once: a zero of 0 borrows from the next, and gives it back."""
    parts = _Parts(8, 128, 128, 0, is_symmetric=False, is_ordered=True, dtype=torch.float16)
    parts.zeros[:, 0] = torch.tensor([0, 3, 0, 0, 15, 8, 1, 0])
    stored = {f"a.{key}": tensor for key, tensor in _as_gptq(parts, 0).items()}
    stored["a.qzeros"] -= 0x11111111
    layout = layout_of(_GPTQ)
    assert layout is not None
    _, reader = layout
    assert torch.equal(reader(stored, "a").numbers(), parts.numbers())


def test_activations_of_8_bits(tmp_path: Path) -> None:
    """The widened model, with the inputs of its linear layers rounded in the order of the groups."""
    want = _write(tmp_path, "gptq, act-order")
    kept = outrider.load(f"{tmp_path}:a8").target.model
    for key, layer in kept.named_modules():
        if isinstance(layer, nn.Linear) and key != "lm_head":
            order = layer.weight.order.long()

            def hook(_: Any, inputs: tuple[Tensor, ...], order: Tensor = order) -> Tensor:
                return rounded(inputs[0][..., order])[..., order.argsort()]

            want.get_submodule(key).register_forward_pre_hook(hook)
    for shape in ((2, 9), (4, 40)):
        ids = torch.randint(97, shape, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            logits, wide = kept(ids).logits, want(ids).logits
        # A sum in another order may round an activation to the next integer.
        torch.testing.assert_close(logits, wide, rtol=0.0, atol=4e-2 * float(wide.abs().amax()))
        assert (logits - wide).abs().mean() < 2e-3 * wide.abs().amax()
    with pytest.raises(OptionError, match="a8"):
        outrider.load(f"{tmp_path}:a8", store="plain")


def test_what_is_not_known_goes_the_old_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Transformers and the package of the format, which is named if it is not there."""
    _write(tmp_path, "gptq")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    monkeypatch.setattr("outrider.models.quantize.find_spec", lambda _: None)
    own = config["quantization_config"]
    for stated in (own | {"checkpoint_format": "marlin"}, own | {"bits": 8}, _AWQ | {"version": "gemv"}):
        file.write_text(json.dumps(config | {"quantization_config": stated}))
        with pytest.raises(MissingExtra, match="gptqmodel"):
            outrider.load(tmp_path)
    file.write_text(json.dumps(config))
    with pytest.raises(MissingExtra, match="gptqmodel"):  # float32 on one CPU only
        outrider.load(tmp_path, dtype="bfloat16")


def test_integers_in_other_words_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, "compressed, asymmetric")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_zero_point"
    weights[name] = weights[name].to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelCorrupt, match=r"packed in torch.int8, not in int32"):
        outrider.load(tmp_path)
