"""Reading of GGUF files without a call for each entry of their lists.

The package ``gguf`` makes several arrays for each token and each merge of a vocabulary: seconds for 128 thousand
tokens, whenever the file is read. Transformers reads it with that package for the configuration, and for the tokenizer
again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

_LENGTH = struct.Struct("=Q")


class FastReader(GGUFReader):
    """A GGUF file as its package reads it. Lists of texts are views of the mapped file."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        raw_kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
        kind, begin = GGUFValueType(raw_kind[0]), orig_offs + 12
        if kind == GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        values: list[Any]
        if kind == GGUFValueType.STRING:
            content: Any = self.data
            values, content = [], memoryview(content)
            for _ in range(int(length[0])):
                (size,) = _LENGTH.unpack_from(content, begin)
                begin += _LENGTH.size + size
                values.append(content[begin - size : begin])
        else:
            numbers = self._get(begin, self.gguf_scalar_to_np[kind], int(length[0]))
            values, begin = [*numbers.view(np.ndarray)[:, None]], begin + numbers.nbytes
        types = [GGUFValueType.ARRAY, *([kind] if values else [])]
        return begin - orig_offs, [raw_kind, length, *values], [*range(2, 2 + len(values))], types


@contextmanager
def fast_reading() -> Iterator[None]:
    """Let Transformers read GGUF files with ``FastReader``: it takes the reader from the package when it needs one."""
    package: Any = gguf
    package.GGUFReader = FastReader
    try:
        yield
    finally:
        package.GGUFReader = GGUFReader
