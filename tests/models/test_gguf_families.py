"""GGUF files: headers are read as the package ``gguf`` does, models are those that files state, damage is refused."""

import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import nn

import outrider
from gguf_models import CASES, IDS, IN_MANY_FORMS, PLACES, many_forms, random_case, write_case, write_in_blocks
from native_cases import native_forward, native_logits
from outrider.errors import ModelError, ModelNotFound, OutriderError, UnsupportedModel
from outrider.kernels.blocks import BLOCK_TYPES
from outrider.models.families.table import plan_of
from outrider.models.gguf.file import GgufFile, is_readable
from outrider.models.gguf.model import ARCHITECTURES, stated_model, transformers_config
from outrider.models.loading import load_checkpoint
from outrider.models.registry import Placement, resolve
from outrider.native.planned_model import PlannedModel

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_logits.json").read_text())
_GELU = ("gemma", "gpt2", "starcoder2")  # from a table of float16 in llama.cpp
_ROUNDED = 0.1  # activations that llama.cpp multiplies with MXFP4
_UNPLANNED = ("gemma3n", "granitemoe", "phi3, longrope")
_TOLERANCES = {"qwen3_5_text": 1e-3, "qwen3_5_moe_text": 1e-3}  # norms of tiny outputs magnify rounding


def _logits(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def test_every_family_has_a_case() -> None:
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES)
    assert _GOLDEN.keys() == {name for name, case in CASES.items() if case.has_oracle} | {IN_MANY_FORMS}


@pytest.mark.parametrize("name", CASES)
def test_gguf_equals_the_model_that_was_written(name: str, tmp_path: Path) -> None:
    """Transformers' logits of the configuration, llama.cpp's of the file; natively, too, if there is a plan."""
    case = CASES[name]
    model = random_case(case)
    file = write_case(tmp_path / "tiny.gguf", case, model)
    want = _logits(model)
    spread = float(want.std())
    bound = _ROUNDED if case.has_mxfp4 else 1e-2 if case.architecture.startswith(_GELU) else 1e-4
    found = [_logits(load_checkpoint(resolve(str(file)), Placement(execution="eager")).model)]  # without the probe
    planned = load_checkpoint(resolve(str(file))).model
    assert isinstance(planned, PlannedModel) == (name not in _UNPLANNED)
    if isinstance(planned, PlannedModel):
        assert planned.plan == plan_of(transformers_config(stated_model(GgufFile.open(file), name), name))
        found.append(native_logits(native_forward(planned), torch.tensor([IDS]))[0])
    for logits in found:
        torch.testing.assert_close(logits, want, rtol=0.0, atol=_TOLERANCES.get(case.model_type, 5e-5) * spread)
        if name in _GOLDEN:
            golden = torch.tensor(_GOLDEN[name])
            torch.testing.assert_close(logits[list(PLACES)], golden, rtol=0.0, atol=bound * spread)


@pytest.mark.oracle
@pytest.mark.parametrize("name", _GOLDEN)
def test_golden_logits_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36, which takes 12 minutes")
    from golden.make_llama import logits_of

    golden, file = torch.tensor(_GOLDEN[name]), tmp_path / "tiny.gguf"
    case = CASES.get(name)
    found = torch.tensor(logits_of(write_case(file, case) if case else write_in_blocks(file, "llama", many_forms)))
    torch.testing.assert_close(found, golden, rtol=0.0, atol=5e-3 * float(golden.std()))


@pytest.mark.parametrize("name", {case.architecture: name for name, case in reversed(CASES.items())}.values())
def test_gguf_refuses_unknown_keys_and_families(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = random_case(case)
    key = f"{case.architecture}.attention.clamp_kqv"
    with pytest.raises(UnsupportedModel, match=f"states {key} = 8.0"):
        outrider.load(write_case(tmp_path / "key.gguf", case, model, attention__clamp_kqv=8.0))
    tensor = "blk.0.attn_q.scale" if name.startswith("gp") else "blk.1.attn_sinks.weight"
    more = replace(case, tensors=case.tensors | {tensor: np.ones(8, np.float32)})
    with pytest.raises(UnsupportedModel, match=f"has a tensor {tensor}, for which"):
        outrider.load(write_case(tmp_path / "tensor.gguf", more, model))


_YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
_HUGE = {f"{key}": 2**24 for key in ("attention__key_length", "attention__value_length", "rope__dimension_count")}


@pytest.mark.parametrize(
    ("case", "keys", "told"),
    [
        # Values that would be another model
        ("llama", {"rope__scaling__type": "longrope"}, "lacks rope_factors_short.weight, of 6 numbers"),
        ("llama", {"rope__dimension_count": 6}, "states llama.rope.dimension_count = 6"),
        ("llama", {"attention__head_count_kv": [2, 4]}, r"states llama.attention.head_count_kv = \[2, 4\]"),
        ("llama", {"logit_scale": 2.0}, "states llama.logit_scale"),
        ("llama", _YARN | {"rope__scaling__yarn_attn_factor": 0.5}, "states llama.rope.scaling.yarn_attn_factor = 0.5"),
        ("qwen35", {"ssm__v_head_reordered": False}, "states qwen35.ssm.v_head_reordered = False"),
        # Sizes that do not fit
        ("llama", {"embedding_length": "x"}, "metadata is no llama model"),
        ("llama", _HUGE, "not fit"),
        ("llama", {"block_count": 3}, "lacks 9 of the model's weights, model.layers.2."),
        ("llama", {"block_count": 2**24}, "states 16777216 layers, and has 21 tensors"),
        ("gemma4", {"attention__shared_kv_layers": 2**24}, "that the last 16777216 of them read keys"),
        ("glm4moe", {"expert_group_count": 2}, r"4 experts in 2 groups, 0 of them used \(glm4moe.expert_group_count, "),
        ("llama", {"keys": {"tokenizer.ggml.tokens": [*map(str, range(99))]}}, "has 99 tokens, but embeddings of 48"),
    ],
)
def test_files_of_another_model_are_refused(case: str, keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=told) as refused:
        outrider.load(write_case(tmp_path / "tiny.gguf", CASES[case], **keys))
    assert "\n" not in str(refused.value)


def test_keys_without_effect(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"expert_count": 0, "rope__scaling__type": "linear", "rope__scaling__factor": 0.0}
    keys |= {"attention__causal": True, "attention__head_count_kv": [2, 2], "attention__sliding_window": 0}
    case = CASES["llama"]
    model = random_case(case)
    loaded = outrider.load(write_case(tmp_path / "tiny.gguf", case, model, **keys)).target.model
    torch.testing.assert_close(_logits(loaded), _logits(model), rtol=0.0, atol=1e-5)


def test_a_file_of_ollama(tmp_path: Path) -> None:
    """Without a suffix; with keys of its own, and the encoder of images (convert/convert_qwen3next.go of Ollama)."""
    case = CASES["qwen35"]
    model = random_case(case)
    with_images = replace(case, tensors={"v.patch_embed.weight": np.ones((4, 4), np.float32)})
    more = {"vision__block_count": 2, "mrope_sections": [2, 1, 1], "ssm__v_head_reordered": True}
    keys = {"tokenizer.ggml.add_padding_token": False, "tokenizer.ggml.eos_token_ids": [2, 5]}
    decoder = outrider.load(write_case(tmp_path / "sha256-0123", with_images, model, keys=keys, **more))
    assert decoder.eos_ids == {2, 5}
    torch.testing.assert_close(_logits(decoder.target.model), _logits(model), rtol=0.0, atol=1e-4)


_LISTS: dict[str, list[Any]] = {
    "tokenizer.ggml.tokens": ["<s>", "", "hé", "\u2581a", "b" * 300],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.25, 7.0],
    "tokenizer.ggml.token_type": [3, 1, 1, -1, 6],
    "some.flags": [True, False],
}


def _write(path: Path, endianess: Any = gguf.GGUFEndian.LITTLE, **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", endianess=endianess, **more)
    writer.add_name("tiny")
    for name, values in _LISTS.items():
        writer.add_array(name, values)
    writer.add_block_count(2)
    writer.add_float32("a.small", 1e-6)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.ones((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c", np.arange(8, dtype=np.float16).reshape(1, 2, 4))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_reader_equals_the_gguf_package(tmp_path: Path) -> None:
    file = _write(tmp_path / "lists.gguf")
    found, want = GgufFile.open(file), gguf.GGUFReader(file)
    stated = {key: field.contents() for key, field in want.fields.items() if not key.startswith("GGUF.")}
    assert dict(found.metadata) == stated
    for tensor in want.tensors:
        own = found.tensors[tensor.name]
        assert (own.kind, own.begin, own.shape) == (tensor.tensor_type, tensor.data_offset, tuple(tensor.shape[::-1]))
        wide = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert torch.equal(own.numbers(), torch.from_numpy(wide.reshape(own.shape)))


def test_usual_files_are_read_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {form.name: form.number for form in BLOCK_TYPES.values()} | {"BF16": 30, "F16": 1, "F64": 28}
    sizes = {kind: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] for name, kind in kinds.items()}
    file = _write(tmp_path / "lists.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    tensors = GgufFile.open(file).tensors
    assert tensors["c"].numbers().tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    for kind, (number, num_bytes) in sizes.items():
        assert is_readable(kind) and tensors["c"]._replace(kind=kind, shape=(3, 2 * number)).num_bytes == 6 * num_bytes


def test_shards_are_one_file(tmp_path: Path) -> None:
    whole = GgufFile.open(_write(tmp_path / "whole.gguf"))
    _write(tmp_path / "tiny.gguf", split_max_tensors=2)
    shards = [tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for shard in shards:
        found = GgufFile.open(shard)
        assert found.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(found.tensors[name].numbers(), whole.tensors[name].numbers()) for name in "abc")
        assert found.metadata["general.name"] == "tiny"
    shards[1].unlink()
    with pytest.raises(ModelNotFound, match=r"one of 2 shards of a model, and tiny-00002-of-00002\.gguf is not"):
        GgufFile.open(shards[0])


def test_corrupt_gguf_headers_are_refused(tmp_path: Path) -> None:
    content = _write(tmp_path / "tiny.gguf").read_bytes()
    draw, end = random.Random(0), content.rindex(b"c") + 60
    headers = [content[:size] for size in range(0, end, 7)]
    headers.append(_write(tmp_path / "big.gguf", gguf.GGUFEndian.BIG).read_bytes())
    for _ in range(600):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(4, end)
            changed[at : at + draw.choice((1, 8))] = draw.randbytes(1) * draw.choice((1, 8))
        headers.append(bytes(changed))
    num_refused = 0
    for number, header in enumerate(headers):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(header)
        try:
            found = GgufFile.open(file)
            assert dict(found.metadata) is not None
            assert all(tensor.raw().shape == tensor.stored_shape for tensor in found.tensors.values())
        except OutriderError as refused:
            assert re.fullmatch(r"[^\n]+", str(refused))
            num_refused += 1
        finally:
            file.unlink()
    assert num_refused > 100
