"""A corpus for ``suffix``: sequences of tokens, searched for the longest suffix of another sequence.

All places of the corpus are sorted by the tokens before them, read backwards (a suffix array of the reversed corpus).
So those that share the longest suffix with a sequence are neighbours, and bisection finds them. It takes 12 bytes per
token.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from outrider.errors import FileError
from outrider.system.files import parse_row, read_text
from outrider.text.tokenizer import encode

Fields = tuple[tuple[str, ...], tuple[str, ...]]
"""Keys of texts, and of token ids, in a JSON line."""

WHOLE: Fields = ("prompt", "text"), ("prompt_ids", "token_ids")
OUTPUTS: Fields = ("text",), ("token_ids",)

MAX_MATCH = 24
"""Most tokens of a suffix that are compared."""
_MOST_PLACES = 16  # of the places found, those whose next tokens are counted; more take longer and help little
_END = -1  # after each sequence
_WIDTH = 4  # bytes of a token


class Corpus:
    """Sequences of token ids.

    Attributes:
        digest: hash of all tokens.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        """Sort the places of sequences, of at least one token in all."""
        ids = np.concatenate([np.array([*sequence, _END], dtype=np.int32) for sequence in sequences])
        assert (ids >= 0).any()
        # Compared as bytes, big-endian numbers are compared as numbers, the end as the largest.
        self._reversed = ids[::-1].astype(">u4").tobytes()
        self._places = _sorted_places(ids[::-1]).data  # in the reversed corpus
        self._ids = ids.data
        # Those after token i are begins[i] to begins[i + 1], so that most of the bisection is one look-up.
        self._begins = np.concatenate(([0], np.bincount(ids[ids >= 0]).cumsum())).astype(np.int32).data
        self.digest = hashlib.sha256(self._reversed).hexdigest()[:8]

    def continuation(self, last_ids: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
        """See ``SuffixIndex.continuation``. Of many places, 16 evenly spaced ones are counted; of equally frequent
        tokens, the smallest id is taken."""
        places, length = self._find(last_ids)
        while places:
            followers = [self._ids[place] for place in places]
            counts = Counter(followers)
            num_followed = len(places) - counts.pop(_END, 0)
            if not counts:
                return
            token = min(counts, key=lambda one: (-counts[one], one))
            yield token, counts[token], num_followed, length
            length += 1
            places = [place + 1 for place, follower in zip(places, followers, strict=True) if follower == token]

    def _find(self, last_ids: Sequence[int]) -> tuple[list[int], int]:
        """The places after the longest suffix that occurs, and its length."""
        last = last_ids[-1]
        begin, end = (self._begins[last], self._begins[last + 1]) if last + 1 < len(self._begins) else (0, 0)
        if begin == end:
            return [], 0
        key = array("I", last_ids[: -MAX_MATCH - 1 : -1])
        key.byteswap()
        wanted = key.tobytes()
        corpus, num_bytes = self._reversed, len(wanted)

        def before(place: int) -> bytes:
            return corpus[place * _WIDTH : place * _WIDTH + num_bytes]

        at = bisect_left(self._places, wanted, begin, end, key=before)
        length = max(_num_equal(wanted, before(place)) for place in self._places[max(begin, at - 1) : min(at + 1, end)])
        if length > 1:
            num_bytes = length * _WIDTH
            begin = bisect_left(self._places, wanted[:num_bytes], begin, at, key=before)
            end = bisect_right(self._places, wanted[:num_bytes], at, end, key=before)
        num_taken = min(end - begin, _MOST_PLACES)
        taken = (self._places[begin + i * (end - begin) // num_taken] for i in range(num_taken))
        return [len(self._ids) - place for place in taken], length


def _num_equal(a: bytes, b: bytes) -> int:
    """Length of the longest common prefix, in tokens."""
    length = 0
    while length < len(a) and a[length : length + _WIDTH] == b[length : length + _WIDTH]:
        length += _WIDTH
    return length // _WIDTH


def _sorted_places(ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Sort all suffixes by their first MAX_MATCH tokens (or more), by twice as many in each pass: prefix doubling
    (Manber & Myers 1993). [n] -> [n]"""
    ranks = np.unique(ids.view(np.uint32), return_inverse=True)[1].astype(np.int64) + 1  # 0: beyond the end
    width = 1
    while width < MAX_MATCH and ranks.max() < len(ranks):
        following = np.concatenate((ranks[width:], np.zeros(min(width, len(ranks)), dtype=np.int64)))
        ranks = np.unique(ranks * (len(ranks) + 1) + following, return_inverse=True)[1] + 1
        width *= 2
    return ranks.argsort(kind="stable").astype(np.int32)


# Files


def read_corpus(paths: Sequence[Path], tokenizer: Any | None, vocab_size: int) -> Corpus:
    """Read the corpus of ``suffix``. Arguments and errors: see ``read_sequences``."""
    return Corpus(read_sequences(paths, tokenizer, vocab_size))


def read_sequences(
    paths: Sequence[Path], tokenizer: Any | None, vocab_size: int, fields: Fields = WHOLE
) -> list[list[int]]:
    """Read files of text, or of JSON lines with texts or token ids, as ``outrider generate --output`` writes them.
    Texts go before ids, which may be those of another tokenizer.

    Args:
        tokenizer: None if all files hold ids.
        vocab_size: size of the target's vocabulary.

    Raises:
        FileError: with file and line.
    """
    sequences: list[list[int]] = []
    for path in paths:
        text, before = read_text(path), len(sequences)
        if text.lstrip().startswith("{"):
            lines = enumerate(text.split("\n"), start=1)
            sequences += [
                _sequence_of(f"{path}, line {n}", line, tokenizer, vocab_size, fields)
                for n, line in lines
                if line.strip()
            ]
        elif tokenizer is None:
            raise FileError(f"{path}: text needs the target's tokenizer: load the target with one, or give token ids")
        elif text.strip():
            sequences.append(encode(tokenizer, text, has_special=False))
        if not any(sequences[before:]):
            raise FileError(f"{path} contains no text: leave it out")
    return [ids for ids in sequences if ids]


def _sequence_of(where: str, line: str, tokenizer: Any | None, vocab_size: int, fields: Fields) -> list[int]:
    """The sequence of a row; empty if generation failed."""
    row = parse_row(where, line)
    if row.get("finish_reason") == "error":
        return []
    of_texts, of_ids = fields
    texts = [row[key] for key in of_texts if isinstance(row.get(key), str)]
    if texts and tokenizer is not None:
        text = "".join(texts)
        return encode(tokenizer, text, has_special=False) if text.strip() else []
    ids = [token for key in of_ids for token in row.get(key) or ()]
    if not ids:
        strings, lists = (", ".join(map(repr, keys)) for keys in fields)
        raise FileError(f"{where}: give strings ({strings}) or lists of token ids ({lists})")
    if not all(isinstance(i, int) and 0 <= i < vocab_size for i in ids):
        raise FileError(f"{where}: not token ids of the target (0 to {vocab_size - 1})")
    return ids
