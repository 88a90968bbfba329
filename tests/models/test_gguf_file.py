"""The header of GGUF files: values and places of tensors as the package ``gguf`` reads them; damage is refused."""

import random
import re
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from outrider.errors import ModelCorrupt, ModelNotFound, OutriderError
from outrider.models.gguf.file import GgufFile

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


def test_it_reads_as_the_package_does(tmp_path: Path) -> None:
    file = _write(tmp_path / "lists.gguf")
    found, want = GgufFile.open(file), gguf.GGUFReader(file)
    stated = {key: field.contents() for key, field in want.fields.items() if not key.startswith("GGUF.")}
    assert dict(found.metadata) == stated
    for tensor in want.tensors:
        own = found.tensors[tensor.name]
        assert (own.kind, own.begin, own.shape) == (tensor.tensor_type, tensor.data_offset, tuple(tensor.shape[::-1]))
        wide = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        assert torch.equal(own.numbers(), torch.from_numpy(wide.reshape(own.shape)))


def test_shards_are_one_file(tmp_path: Path) -> None:
    """Under the name of any of them; without one of them, its name is told."""
    whole = GgufFile.open(_write(tmp_path / "whole.gguf"))
    _write(tmp_path / "tiny.gguf", split_max_tensors=2)
    shards = [tmp_path / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    for shard in shards:
        found = GgufFile.open(shard)
        assert found.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(found.tensors[name].numbers(), whole.tensors[name].numbers()) for name in "abc")
        assert found.metadata["general.name"] == "tiny"
    renamed = shutil.copy(shards[0], tmp_path / "model.gguf")
    with pytest.raises(ModelCorrupt, match="one of 2 shards"):
        GgufFile.open(Path(renamed))
    shards[1].unlink()
    with pytest.raises(ModelNotFound, match=r"one of 2 shards of a model, and tiny-00002-of-00002\.gguf is not"):
        GgufFile.open(shards[0])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda data: b"GGML" + data[4:], "does not begin with GGUF"),
        (lambda data: data[:4] + (1).to_bytes(4, "little") + data[8:], "of version 1"),
        (lambda data: data[:8] + (2**63).to_bytes(8, "little") + data[16:], "entries"),
        (lambda data: data.replace("hé".encode(), b"h\xff\xff"), "not UTF-8"),
        (lambda data: data[:-200], "cut: .* lies beyond its end"),
        (lambda data: b"", "does not begin|cut or damaged"),
        (None, "for big-endian machines"),
    ],
)
def test_damage_is_refused(change: Any, told: str, tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf", gguf.GGUFEndian.LITTLE if change else gguf.GGUFEndian.BIG)
    file.write_bytes(change(file.read_bytes()) if change else file.read_bytes())
    with pytest.raises(ModelCorrupt, match=told) as refused:
        GgufFile.open(file).metadata["tokenizer.ggml.tokens"]
    assert "\n" not in str(refused.value)


def test_no_header_crashes(tmp_path: Path) -> None:
    """Cut anywhere, or with bytes changed: read, or refused in one line."""
    content = _write(tmp_path / "tiny.gguf").read_bytes()
    draw, end = random.Random(0), content.rindex(b"c") + 60
    headers = [content[:size] for size in range(0, end, 7)]
    for _ in range(600):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(4, end)
            changed[at : at + draw.choice((1, 8))] = draw.randbytes(1) * draw.choice((1, 8))
        headers.append(bytes(changed))
    for number, header in enumerate(headers):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(header)
        try:
            found = GgufFile.open(file)
            assert dict(found.metadata) is not None
            assert all(tensor.raw().shape == tensor.stored_shape for tensor in found.tensors.values())
        except OutriderError as refused:
            assert re.fullmatch(r"[^\n]+", str(refused))
        finally:
            file.unlink()
