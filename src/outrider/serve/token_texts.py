"""Tokens in log-probabilities: their texts, their bytes and their places in the output.

A token's text is its piece of the output. A token that holds a part of a character is written as its bytes,
``bytes:\\xf0\\x9f``, and begins where the character does.

Sources: OpenAI's API (``bytes:``), vLLM's (``token_id:``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outrider.records import TokenLogprob
from outrider.text.spelling import token_bytes

_UNFINISHED = "\ufffd"  # output of decoders for a part of a character


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token of the vocabulary.

    Attributes:
        bytes: None if they are not known.
        is_part: it may end or begin within a character, so that its text comes later.
    """

    text: str
    bytes: bytes | None
    is_part: bool


class TokenTexts:
    """Texts of a tokenizer's tokens.

    Args:
        as_ids: return ``token_id:7`` instead.
    """

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids
        self._bytes = token_bytes(tokenizer)
        self._tokens: dict[int, TokenText] = {}

    def of(self, token_id: int, piece: str = "") -> str:
        """Text of a token.

        Args:
            piece: of the output: at its beginning some tokens lack their space.
        """
        if self._as_ids:
            return id_text(token_id)
        token = self.token(token_id)
        return piece if piece and not token.is_part else token.text

    def token(self, token_id: int) -> TokenText:
        found = self._tokens.get(token_id)
        if found is None:
            found = self._tokens[token_id] = self._read(token_id)
        return found

    def _read(self, token_id: int) -> TokenText:
        if self._bytes is None:
            # After another token, since at the beginning of a text some decoders drop a space.
            once, twice = (self.tokenizer.decode([token_id] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
            text = twice[len(once) :]
            is_part = _UNFINISHED in text
            return TokenText(text, None if is_part else text.encode(), is_part)
        found = self._bytes.of(token_id)
        try:
            text = found.decode()
            return TokenText(text, found, _UNFINISHED in text)
        except UnicodeDecodeError:
            return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found, True)


def id_text(token_id: int) -> str:
    """Text that no other token has."""
    return f"token_id:{token_id}"


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Tokens with their log-probabilities; the first token of a prompt has none.

    Attributes:
        pieces: the text of each. A character comes with the last of its tokens.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    pieces: Sequence[str]


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token of an output.

    Attributes:
        at: where its piece begins.
    """

    id: int
    logprob: TokenLogprob | None
    piece: str
    at: int


class WaitingTokens:
    """Tokens of one output whose text is still to come: it may be held back after them."""

    def __init__(self) -> None:
        self._tokens: deque[PlacedToken] = deque()
        self._num_placed = self._num_characters = 0

    def add(self, text: str, scored: ScoredTokens) -> None:
        """Add text that has become final, and the next tokens."""
        self._num_characters += len(text)
        for token_id, logprob, piece in zip(scored.token_ids, scored.logprobs, scored.pieces, strict=True):
            self._tokens.append(PlacedToken(token_id, logprob, piece, self._num_placed))
            self._num_placed += len(piece)

    def take(self, num_characters: int, num_after: int = 0) -> list[PlacedToken]:
        """Take the tokens of the last characters, with ``num_after`` characters after these; drop those before."""
        end = self._num_characters - num_after
        begin, taken = end - num_characters, []
        while self._tokens and self._tokens[0].at < end:
            token = self._tokens.popleft()
            if token.at >= begin or token.at + len(token.piece) > begin:
                taken.append(token)
        return taken

    def rest(self) -> list[PlacedToken]:
        """Take the tokens that remain at the end: they have no text, or lie in the stop string."""
        return [PlacedToken(one.id, one.logprob, one.piece, min(one.at, self._num_characters)) for one in self._tokens]
