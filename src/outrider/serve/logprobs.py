"""Log-probabilities: the scores of prompts, one forward at a time; texts, bytes and places of tokens in answers.

A token's text is its piece of the output. A token that holds a part of a character is written as its bytes,
``bytes:\\xf0\\x9f``, and begins where the character does.

Sources: OpenAI's API (``bytes:``), vLLM's (``token_id:``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from outrider.measure.teacher_forcing import Text, force
from outrider.records import TokenLogprob
from outrider.runtime.lm import LM
from outrider.sampling.probs import wide
from outrider.serve.http_errors import Refusal
from outrider.text.spelling import token_bytes

_MOST_SCORES = 2**20  # log-probabilities of prompts in one response: some 100 bytes each, and more in memory
_LEAST_LOGPROB = -9999.0  # JSON has no -inf
_UNFINISHED = "\ufffd"  # output of decoders for a part of a character


class TokenTexts:
    """Texts of a tokenizer's tokens, or ``token_id:7``."""

    def __init__(self, tokenizer: Any, as_ids: bool) -> None:
        self.tokenizer, self._as_ids = tokenizer, as_ids
        self._bytes = token_bytes(tokenizer)
        self._tokens: dict[int, tuple[str, bytes | None, bool]] = {}

    def of(self, token_id: int, piece: str = "") -> str:
        """Text of a token; its piece of the output, at whose beginning some tokens lack their space."""
        if self._as_ids:
            return id_text(token_id)
        text, _, is_part = self.token(token_id)
        return piece if piece and not is_part else text

    def token(self, token_id: int) -> tuple[str, bytes | None, bool]:
        """Text and bytes of a token, None if these are not known; and whether the token may end or begin within a
        character, so that its text comes later."""
        if token_id not in self._tokens:
            self._tokens[token_id] = self._read(token_id)
        return self._tokens[token_id]

    def _read(self, token_id: int) -> tuple[str, bytes | None, bool]:
        if self._bytes is None:
            # After another token, since at the beginning of a text some decoders drop a space.
            once, twice = (self.tokenizer.decode([token_id] * n, clean_up_tokenization_spaces=False) for n in (1, 2))
            text = twice[len(once) :]
            return text, None if _UNFINISHED in text else text.encode(), _UNFINISHED in text
        found = self._bytes.of(token_id)
        try:
            text = found.decode()
            return text, found, _UNFINISHED in text
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found), found, True


def id_text(token_id: int) -> str:
    return f"token_id:{token_id}"


Scored = list[tuple[int, TokenLogprob | None, str]]
"""Tokens with their log-probabilities, which the first token of a prompt lacks, and their texts: a character comes with
the last of its tokens."""


class PlacedToken(NamedTuple):
    """A token of an output, whose piece begins ``at`` this character."""

    id: int
    logprob: TokenLogprob | None
    piece: str
    at: int


class WaitingTokens:
    """Tokens of one output whose text is still to come: it may be held back after them."""

    def __init__(self) -> None:
        self._tokens: deque[PlacedToken] = deque()
        self._num_placed = self._num_characters = 0

    def add(self, text: str, scored: Scored) -> None:
        """Add text that has become final, and the next tokens."""
        self._num_characters += len(text)
        for token_id, logprob, piece in scored:
            self._tokens.append(PlacedToken(token_id, logprob, piece, self._num_placed))
            self._num_placed += len(piece)

    def take(self, num_characters: int, end: int | None = None) -> list[PlacedToken]:
        """Take the tokens of the characters before an end, that of the text if None; drop those before."""
        end = self._num_characters if end is None else end
        begin, taken = end - num_characters, []
        while self._tokens and self._tokens[0].at < end:
            token = self._tokens.popleft()
            if token.at >= begin or token.at + len(token.piece) > begin:
                taken.append(token)
        return taken

    def rest(self) -> list[PlacedToken]:
        """Take the tokens that remain at the end: they have no text, or lie in the stop string."""
        return [one._replace(at=min(one.at, self._num_characters)) for one in self._tokens]


def finite_logprob(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def prompt_logprobs_json(
    texts: TokenTexts, token_ids: Sequence[int], scored: Sequence[ScoredToken], num_top: int
) -> list[dict[str, Any] | None]:
    """Log-probabilities of a prompt in vLLM's form: by token id, of its token first, then of the alternatives."""

    def entry(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": finite_logprob(logprob), "rank": rank, "decoded_token": texts.of(token_id)}

    found: list[dict[str, Any] | None] = [None]
    for token_id, (one, own_rank) in zip(token_ids[1:], scored, strict=True):
        top = {str(i): entry(i, value, rank) for rank, (i, value) in enumerate(one.top[:num_top], 1)}
        found.append({str(token_id): entry(token_id, one.logprob, own_rank)} | top)
    return found


ScoredToken = tuple[TokenLogprob, int]
"""Log-probability of a token of a prompt, and its rank: 1 for the most probable token."""


def check_scores(scores: Mapping[str, int], num_tokens: int) -> None:
    """Check that a response is not too long with these log-probabilities: fields with their number of alternatives, for
    the tokens of all prompts and choices. Raises Refusal."""
    for name, num_top in scores.items():
        if (num := num_tokens * (num_top + 1)) > _MOST_SCORES:
            message = f"{num} log-probabilities of prompt tokens are too many for one response, of at most"
            raise Refusal(f"{name}: {message} {_MOST_SCORES}: ask for fewer, or send several requests", param=name)


@torch.inference_mode()
def prompt_logprobs(target: LM, token_ids: Sequence[int], num_top: int) -> Generator[list[ScoredToken]]:
    """Score all tokens but the first, of at least two, with the ``num_top`` most probable ones at each position, from
    the raw logits. Yields a few at a time, so that other work can run in between. Raises NumericsError."""
    for forced in force(target, [Text(token_ids)], most_columns=32):  # streams wait; more save no time
        logprobs = wide(forced.logits).log_softmax(dim=-1)  # [M, V]
        chosen = logprobs.gather(-1, forced.ids[:, None])  # [M, 1]
        ranks = (logprobs > chosen).sum(dim=-1) + 1
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        yield [
            (TokenLogprob(logprob, tuple(zip(ids, values, strict=True))), rank)
            for logprob, rank, (ids, values) in zip(chosen.squeeze(-1).tolist(), ranks.tolist(), pairs, strict=True)
        ]
