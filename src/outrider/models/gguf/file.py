"""A GGUF file as it is: metadata as plain values, and the places of tensors. What the values mean is not known here.

Every length and offset is checked before use: a file that is cut or damaged is refused in one line.

Source: the specification of the format, docs/gguf.md of ggml, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.errors import ModelCorrupt, ModelNotFound
from outrider.kernels.blocks import BLOCK_TYPES
from outrider.kernels.library import dequantize_rows, library
from outrider.kernels.row_copies import RowCopy, copy_rows

_VERSIONS = (2, 3)
# Types of values: struct's letter, and NumPy's.
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Types of tensors that are plain numbers: NumPy's, by ggml's number. Of BF16 it has none.
_PLAIN, _BF16 = {0: "f4", 1: "f2", 24: "i1", 25: "i2", 26: "i4", 27: "i8", 28: "f8"}, 30
# Numbers and bytes of a block of usual types. The package gguf knows all, and takes a while to import.
_BLOCK_SIZES = {
    _BF16: (1, 2),
    **{kind: (1, np.dtype(plain).itemsize) for kind, plain in _PLAIN.items()},
    **{kind: (form.num_numbers, form.num_bytes) for kind, form in BLOCK_TYPES.items()},
}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]  # of its numbers, the last one along a row
    kind: int  # ggml's number of its type
    begin: int  # byte in the file

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the bytes, those of a row along the last dimension."""
        block, block_bytes = _block_sizes(self.kind)
        return (*self.shape[:-1], self.shape[-1] // block * block_bytes)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.stored_shape)

    def raw(self) -> Any:
        """The bytes, uint8, mapped. PyTorch takes writable memory only: a page that is written to becomes a private
        copy, which does not happen."""
        return np.memmap(self.file, np.uint8, "c", self.begin, self.stored_shape)

    def numbers(self) -> Tensor:
        # Without the package gguf, which takes a while to import:
        if self.kind in BLOCK_TYPES and library() is not None:
            form, rows = BLOCK_TYPES[self.kind], torch.from_numpy(self.raw()).flatten(0, -2)
            interleaved, num_threads = torch.empty_like(rows), torch.get_num_threads()
            copy_rows([RowCopy(rows, form.number, interleaved)], num_threads)
            places, width = torch.arange(len(rows)), self.shape[-1]
            return dequantize_rows(interleaved, places, form.number, width, num_threads).view(self.shape)
        return torch.from_numpy(np.array(_numbers(self.raw(), self.kind), np.float32).reshape(self.shape))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file, or all shards of one."""

    path: Path
    metadata: Mapping[str, Any]  # by key; lists of numbers and texts are lists
    tensors: Mapping[str, StoredTensor]  # by name

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read the header of a file, and of its other shards. Raises ModelNotFound: a shard is missing; or
        ModelCorrupt: the file is of another format, or damaged."""
        shards = shards_of(path)
        missing = [shard.name for shard in shards if not shard.is_file()]
        if missing and len(shards) > 1:
            raise ModelNotFound(
                f"{path} is one of {len(shards)} shards of a model, and {missing[0]} is not beside it: all are needed"
            )
        headers = [_Header(shard) for shard in shards]
        tensors: dict[str, StoredTensor] = {}
        for header in headers:
            for tensor in header.tensors:
                if tensor.name in tensors:
                    raise ModelCorrupt(f"{header.path}: the tensor {tensor.name} is there twice")
                tensors[tensor.name] = tensor
        metadata, first = headers[0].metadata, shards[0]
        if (stated := metadata.get("split.count", 1)) not in (0, 1, len(headers)):  # a shard under another name
            remedy = f"name them ...-00001-of-{stated:05}.gguf and on, in one folder"
            raise ModelCorrupt(f"{first} is one of {stated} shards of a model: {remedy}")
        return cls(first, metadata, tensors)


def shards_of(path: Path) -> list[Path]:
    """All files of a model, in order: one, unless the name ends in -00001-of-00003.gguf or alike."""
    found = _SHARD.fullmatch(path.name)
    if found is None:
        return [path]
    count = int(found["count"])
    return [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


class _Header:
    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0
        with path.open("rb") as file:
            self._size = file.seek(0, 2)
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._size else b""
        if self._take(4) != b"GGUF":
            raise ModelCorrupt(f"{path} is not a GGUF file: it does not begin with GGUF")
        version = self._number("<I")
        if version not in _VERSIONS:
            is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            told = "for big-endian machines" if is_big else f"of version {version}: versions 2 and 3 are read"
            raise ModelCorrupt(f"{path} is a GGUF file {told}")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        places = range(self._count(num_values, 12))
        self.metadata = dict((self._text(), self._value(self._number("<I"))) for _ in places)
        if len(self.metadata) < num_values:
            raise self._damage("a key twice")
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self._damage(f"general.alignment = {alignment!r:.40}")
        self._alignment = alignment
        stated = [self._place() for _ in range(self._count(num_tensors, 24))]
        begin = -(-self._at // alignment) * alignment
        self.tensors = [self._tensor(*one, begin) for one in stated]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(self._number("<I"), self._number("<Q"))
        dtype = self._dtype(kind)
        return np.frombuffer(self._take(dtype.itemsize), dtype)[0].item()

    def _array(self, kind: int, length: int) -> Any:
        if kind != _STRING:  # no file has lists of lists
            dtype = self._dtype(kind)
            return np.frombuffer(self._take(self._count(length, dtype.itemsize) * dtype.itemsize), dtype).tolist()
        texts, data, at, size_at = [], self._data, self._at, struct.Struct("<Q").unpack_from
        for _ in range(self._count(length, 8)):  # a vocabulary: a call for each would take seconds
            if at + 8 > self._size:
                raise self._damage("a text")
            begin = at + 8
            at = begin + size_at(data, at)[0]
            texts.append(data[begin:at])
        if at > self._size:
            raise self._damage("a text")
        self._at = at
        return [_text(self.path, text) for text in texts]

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._text(), self._number("<I")
        if not 1 <= num_dimensions <= 4:
            raise self._damage(f"{name:.60} with {num_dimensions} dimensions")
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))
        return name, shape[::-1], self._number("<I"), self._number("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int, begin: int) -> StoredTensor:
        try:
            block, _ = _block_sizes(kind)
        except KeyError:
            told = f"{name:.60} is of ggml's type {kind}, which the package gguf here does not know"
            raise ModelCorrupt(f"{self.path}: {told}") from None
        tensor = StoredTensor(self.path, name, shape, kind, begin + offset)
        if min(shape) < 1 or shape[-1] % block:
            raise self._damage(f"{name:.60} of the shape {list(shape)}")
        if offset % self._alignment:
            raise self._damage(f"{name:.60} at {offset}")
        if tensor.begin + tensor.num_bytes > self._size:
            raise ModelCorrupt(f"{self.path} is cut: {name:.60} lies beyond its end: download it again")
        return tensor

    def _count(self, stated: int, least_bytes: int) -> int:
        if stated * least_bytes > self._size - self._at:
            raise self._damage(f"a list of {stated} entries")
        return stated

    def _dtype(self, kind: int) -> np.dtype[Any]:
        if kind not in _NUMBERS:
            raise self._damage(f"a value of type {kind}")
        return np.dtype(_NUMBERS[kind])

    def _number(self, form: str) -> int:
        return int(struct.unpack(form, self._take(struct.calcsize(form)))[0])

    def _text(self) -> str:
        return _text(self.path, self._take(self._number("<Q")))

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._at:
            raise self._damage("its end")
        self._at += num_bytes
        return self._data[self._at - num_bytes : self._at]

    def _damage(self, what: str) -> ModelCorrupt:
        return ModelCorrupt(f"{self.path} is cut or damaged ({what} in its header, byte {self._at}): download it again")


def _text(path: Path, text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError:
        raise ModelCorrupt(f"{path} is damaged: a text in its header is not UTF-8: download it again") from None


def _numbers(stored: Any, kind: int) -> Any:
    """Numbers of the bytes of a tensor. Raises NotImplementedError: the package gguf cannot read the type."""
    if kind in _PLAIN:
        return stored.view(_PLAIN[kind])
    from gguf import GGMLQuantizationType, dequantize

    return dequantize(stored, GGMLQuantizationType(kind))


@lru_cache
def is_readable(kind: int) -> bool:
    """Whether the numbers of a type can be read; a file may have it all the same."""
    if kind in _BLOCK_SIZES:
        return True
    try:
        _numbers(np.zeros((1, _block_sizes(kind)[1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def type_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def _block_sizes(kind: int) -> tuple[int, int]:
    """Numbers and bytes of a block. Raises KeyError: the package gguf does not know the type."""
    if kind in _BLOCK_SIZES:
        return _BLOCK_SIZES[kind]
    from gguf import GGML_QUANT_SIZES

    sizes: dict[int, tuple[int, int]] = {int(known): sizes for known, sizes in GGML_QUANT_SIZES.items()}
    return sizes[kind]
