"""GGUF files read without a call for each entry of their lists: the same fields, types and tensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from outrider.models.gguf_reader import FastReader, fast_reading

_LISTS: dict[str, list[Any]] = {
    "tokenizer.ggml.tokens": ["<s>", "", "hé", "\u2581a", "b" * 300],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.scores": [0.0, -1.5, 2.25, 1e-9, 7.0],
    "tokenizer.ggml.token_type": [3, 1, 1, -1, 6],
    "some.flags": [True, False],
}


@pytest.fixture(params=[gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "lists.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=request.param)
    writer.add_name("tiny")
    for name, values in _LISTS.items():
        writer.add_array(name, values)
    writer.add_block_count(2)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.ones((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_as_the_package_does(file: Path) -> None:
    found, want = FastReader(file), gguf.GGUFReader(file)
    assert list(found.fields) == list(want.fields)
    for name, field in want.fields.items():
        assert (found.fields[name].contents(), found.fields[name].types) == (field.contents(), field.types), name
        assert found.fields[name].offset == field.offset
    assert {name: found.fields[name].contents() for name in _LISTS if name != "tokenizer.ggml.scores"} == {
        name: values for name, values in _LISTS.items() if name != "tokenizer.ggml.scores"
    }
    for one, other in zip(found.tensors, want.tensors, strict=True):
        assert (one.name, one.tensor_type, one.data_offset) == (other.name, other.tensor_type, other.data_offset)
        assert np.array_equal(one.data, other.data)


def test_transformers_reads_so_meanwhile(file: Path) -> None:
    want, before = load_gguf_checkpoint(str(file)), gguf.GGUFReader
    with fast_reading():
        assert gguf.GGUFReader is FastReader
        assert load_gguf_checkpoint(str(file)) == want
    assert gguf.GGUFReader is before
    assert want["tokenizer"]["tokens"] == _LISTS["tokenizer.ggml.tokens"]
