"""Tokens of a vocabulary as bytes, which need not be whole characters.

Tokenizers write a leading space as "Ġ" or "▁", and other bytes as letters or as "<0x41>". A special token is its name.
"""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any


class TokenBytes:
    """Reads tokens as bytes: see ``token_bytes``.

    Attributes:
        has_letters: each byte is written as a letter.
    """

    def __init__(self, tokenizer: Any, has_letters: bool) -> None:
        self._name_of, self.has_letters = tokenizer.convert_ids_to_tokens, has_letters
        self._added = frozenset(tokenizer.added_tokens_decoder)

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        name: str = self._name_of(token_id) or ""
        if not self.has_letters:
            return bytes([int(name[3:-1], 16)]) if is_byte(name) else name.replace("▁", " ").encode()
        if token_id in self._added:
            return name.encode()
        return bytes(_bytes()[letter] for letter in name if letter in _bytes())


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The tokens of a tokenizer as bytes; None if they cannot be read so."""
    from tokenizers.models import BPE, Unigram

    decoders = _decoders(tokenizer)
    if not {"ByteLevel", "Metaspace", "Replace"} & decoders:
        return None
    is_known = isinstance(tokenizer.backend_tokenizer.model, (BPE, Unigram))
    return TokenBytes(tokenizer, "ByteLevel" in decoders) if is_known else None


def is_byte(name: str) -> bool:
    """Whether a token is written as a byte."""
    return len(name) == 6 and name.startswith("<0x")


def _decoders(tokenizer: Any) -> set[str]:
    """Types of the parts of a tokenizer's decoder."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return set()
    state = json.loads(backend.decoder.__getstate__())
    return {one["type"] for one in (state, *state.get("decoders", ()))}


@cache
def letters() -> dict[int, str]:
    """The letter that byte-level tokenizers write for each byte: itself where it is printed, else one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in printed else next(others)) for byte in range(256)}


@cache
def _bytes() -> dict[str, int]:
    return {letter: byte for byte, letter in letters().items()}
