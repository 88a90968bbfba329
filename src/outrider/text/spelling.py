"""The tokens of a vocabulary as bytes, and spelled in the tokens of another.

Tokenizers write a leading space as "Ġ" or "▁", and other bytes as letters or as "<0x41>". A special token is its name.
Tokens are compared as bytes. Special tokens are compared by their role (end, beginning) and by their names. A token
without an equal is spelled by itself, not within its text; so the spelling of a sequence grows token by token, and is a
function of it.

Source: the token-level intersection of Timor et al. 2502.05202, algorithm 4; the spelling is ours.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_MOST = 8  # tokens of a spelling; of longer ones the last are kept


class TokenBytes:
    """Reads tokens as bytes: see ``token_bytes``. In some tokenizers each byte is written as a letter."""

    def __init__(self, tokenizer: Any, has_letters: bool) -> None:
        self._name_of, self.has_letters = tokenizer.convert_ids_to_tokens, has_letters
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._letters = _letters()
        self._bytes = {letter: byte for byte, letter in self._letters.items()}

    def of(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        name: str = self._name_of(token_id) or ""
        if not self.has_letters:
            return bytes([int(name[3:-1], 16)]) if _is_byte(name) else name.replace("▁", " ").encode()
        if token_id in self._added:
            return name.encode()
        return bytes(self._bytes[letter] for letter in name if letter in self._bytes)

    def written(self, text: bytes) -> str:
        """A text as tokens write it. Raises UnicodeDecodeError: it is no whole characters, which tokens need here."""
        return "".join(map(self._letters.__getitem__, text)) if self.has_letters else text.decode().replace(" ", "▁")


def _letters() -> dict[int, str]:
    """Letters of bytes, as GPT-2 writes them: the byte's own in Latin-1 if it is shown, else the next one after."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    others = (letter for letter in letters if ord(letter) > 0xFF)
    return {byte: chr(byte) if chr(byte) in letters else next(others) for byte in range(256)}


@lru_cache(maxsize=8)
def token_bytes(tokenizer: Any) -> TokenBytes | None:
    """The tokens of a tokenizer as bytes; None if they cannot be read so."""
    from tokenizers.models import BPE, Unigram

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None or not isinstance(backend.model, (BPE, Unigram)):
        return None
    state = json.loads(backend.decoder.__getstate__())
    decoders = {one["type"] for one in (state, *state.get("decoders", ()))}
    if not {"ByteLevel", "Metaspace", "Replace"} & decoders:
        return None
    return TokenBytes(tokenizer, "ByteLevel" in decoders)


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x")


class Spelling(NamedTuple):
    """The target's tokens in the draft's.

    Attributes:
        equals: for each token of the target, the draft's id of the same token; -1 if it has none.
        spelled: for each token of the target, one or more ids of the draft.
        prefix: the draft's ids before every sequence: the token that it expects at the beginning, if the target's
            tokenizer puts none there.
    """

    equals: tuple[int, ...]
    spelled: tuple[tuple[int, ...], ...]
    prefix: tuple[int, ...] = ()

    @property
    def num_equal(self) -> int:
        return sum(i >= 0 for i in self.equals)

    def share_of(self, ids: Sequence[int]) -> float:
        """Share of these tokens of the target that the draft has, too."""
        return sum(self.equals[i] >= 0 for i in ids) / len(ids)


def spelling_of(target: Any, draft: Any, num_target: int, num_draft: int) -> Spelling | None:
    """Spell the first tokens of a target's tokenizer in the first ones of a draft's; None if the tokens of one of them
    cannot be read as bytes."""
    own_bytes, draft_bytes = token_bytes(target), token_bytes(draft)
    if own_bytes is None or draft_bytes is None:
        return None
    ours, theirs = _Tokens(target, own_bytes, num_target), _Tokens(draft, draft_bytes, num_draft)
    equals = [-1] * num_target
    for token, i in ours.ids.items():
        equals[i] = theirs.ids.get(token, -1)
    for name in ours.specials.keys() & theirs.specials.keys():
        equals[ours.specials[name]] = theirs.specials[name]
    for role in ("bos_token_id", "eos_token_id"):
        i, j = getattr(target, role), getattr(draft, role)
        if i in ours.specials.values() and j in theirs.specials.values():
            equals[i] = j
    instead = next((i for i in (draft.unk_token_id, draft.eos_token_id) if i is not None and i < num_draft), 0)
    spelled = []
    for i, equal in enumerate(equals):
        ids = [equal] if equal >= 0 else theirs.spell(ours.bytes.of(i))[-_MOST:]
        spelled.append(tuple(ids or [instead]))
    begin = None if _first_id(target) is not None else _first_id(draft)
    return Spelling(tuple(equals), tuple(spelled), () if begin is None else (begin,))


class _Tokens:
    """The tokens of a tokenizer as bytes; ``ids`` are those of ordinary tokens, of equal ones the first, and rather
    one that is not written as a byte; ``specials`` those of the special tokens, by name."""

    def __init__(self, tokenizer: Any, bytes_: TokenBytes, num_tokens: int) -> None:
        self.bytes, self._model, self._num_tokens = bytes_, tokenizer.backend_tokenizer.model, num_tokens
        self._vocab = {token: i for token, i in tokenizer.get_vocab().items() if i < num_tokens}
        names = {i: token for token, i in self._vocab.items()}
        added = tokenizer.added_tokens_decoder
        self.specials = {str(token): i for i, token in added.items() if token.special and i < num_tokens}
        self.ids: dict[bytes, int] = {}
        special_ids = {*self.specials.values()}
        for i in sorted(names.keys() - special_ids, key=lambda i: (_is_byte(names[i]), i)):
            self.ids.setdefault(self.bytes.of(i), i)

    def spell(self, text: bytes) -> list[int]:
        """A text in these tokens; as bytes where it is no whole character."""
        try:
            written = self.bytes.written(text)
        except UnicodeDecodeError:
            return [i for byte in text if (i := self._vocab.get(f"<0x{byte:02X}>")) is not None]
        return [token.id for token in self._model.tokenize(written) if token.id < self._num_tokens]


def _first_id(tokenizer: Any) -> int | None:
    """The token that it puts before every text; None if it puts none there."""
    ids = tokenizer("a").input_ids
    first: int | None = tokenizer.bos_token_id
    return first if first is not None and ids[:1] == [first] else None
