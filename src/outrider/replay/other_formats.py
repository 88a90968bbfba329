"""Files of the *decoding-speculative-decoding* project (Yan, Agarwal, Venkataraman, arXiv 2402.01528).

- A target log: the printed output ids of each prompt, ``tensor([[1, 2, 3]])`` or ``tensor([[1, 2, 3]],
  device='cuda:0')``, on several lines if long. It contains no prompts.
- Rounds: one line each, ``[n]`` or ``[n1, n2]``: the cumulative number of tokens of each row of the batch, including
  corrections and bonuses. It does not mark the ends of prompts.

This module knows no models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import FileError
from outrider.options import MAX_NUM_DRAFT_TOKENS
from outrider.system.files import read_text

_TENSOR = re.compile(r"\s*tensor\(\s*(\[[^()]*\])\s*(?:,\s*(?:device|dtype)\s*=\s*[^(),]+)*\)", re.DOTALL)
_ROW = re.compile(r"\[([^\[\]]*)\]")
_SHAPE = re.compile(r"\[\s*\[[^\[\]]*\](?:\s*,\s*\[[^\[\]]*\])*\s*\]|\[[^\[\]]*\]")
_MAX_DIGITS = 18  # of a number that fits in 64 bits
_ROUND = re.compile(r"\[\s*\d+(?:\s*,\s*\d+)*\s*\]")


def read_tensors(path: Path) -> list[tuple[int, ...]]:
    """Read sequences of token ids, one for each row of each tensor.

    Raises:
        FileError: with the line number; ids are elided (``...``), or the file has other content.
    """
    text = read_text(path)
    texts: list[tuple[int, ...]] = []
    end = len(text.rstrip())
    at = 0
    while at < end:
        match = _TENSOR.match(text, at)
        if match is None or _SHAPE.fullmatch(match[1].strip()) is None:
            line = text.count("\n", 0, text.index(text[at:].lstrip()[0], at)) + 1
            raise FileError(f"{path}, line {line}: expected tensor([[1, 2, ...]]) as print writes it")
        for row in _ROW.finditer(match[1]):
            texts.append(_ids(path, text, match.start(1) + row.start(1), row[1]))
        at = match.end()
    if not texts:
        raise FileError(f"{path} has no tensors in it")
    return texts


def _ids(path: Path, text: str, begin: int, row: str) -> tuple[int, ...]:
    """Parse the ids of a row, which begins at ``begin`` in the file's text."""

    def error(at: int, what: str) -> FileError:
        # Lines are counted only here: counting for each row would take quadratic time.
        return FileError(f"{path}, line {text.count(chr(10), 0, begin + at) + 1}: {what}")

    if "..." in row:
        remedy = "print them all, after torch.set_printoptions(threshold=sys.maxsize)"
        raise error(row.index("..."), f"token ids are left out (...): {remedy}")
    ids: list[int] = []
    at = 0
    for piece in row.split(","):
        digits = piece.strip()
        if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
            shown = digits if len(digits) <= 2 * _MAX_DIGITS else f"{digits[:_MAX_DIGITS]}..."
            raise error(at + len(piece) - len(piece.lstrip()), f"{shown!r} is not a token id")
        ids.append(int(digits))
        at += len(piece) + 1
    return tuple(ids)


def tensor_text(texts: Iterable[Sequence[int]]) -> str:
    """Format a target log, one tensor for each sequence."""
    return "".join(f"tensor([[{', '.join(map(str, ids))}]])\n" for ids in texts)


@dataclass(frozen=True, slots=True)
class ForeignRounds:
    """Rounds read from such a file.

    Attributes:
        prompts: tokens committed by each round, for each sequence.
        is_guessed: whether the ends of sequences were guessed.
    """

    prompts: tuple[tuple[int, ...], ...]
    is_guessed: bool


def read_rounds(path: Path, tokens_per_prompt: int | None = None) -> ForeignRounds:
    """Read rounds from lines of cumulative counts.

    A batch ends where a count decreases. That is a guess: it misses the end of a batch if the first round of the next
    batch commits at least as many tokens as the previous one had in total. If every sequence has at least
    ``tokens_per_prompt`` tokens, a batch ends when all rows have that many, and nothing is guessed. A count that stays
    the same belongs to a finished row.

    Raises:
        FileError: with the line number.
    """
    batches: list[list[list[int]]] = []  # counts, by batch and line
    last: list[int] | None = None
    last_number = 0
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        if _ROUND.fullmatch(line.strip()) is None:
            raise FileError(f"{path}, line {number}: expected counts like [3] or [3, 5]")
        pieces = [piece.strip() for piece in line.strip()[1:-1].split(",")]
        if max(map(len, pieces)) > _MAX_DIGITS:
            raise FileError(f"{path}, line {number}: a count has more than {_MAX_DIGITS} digits")
        counts = [int(piece) for piece in pieces]
        has_ended = last is not None and (
            len(counts) != len(last)
            or any(new < old for new, old in zip(counts, last, strict=True))
            or (tokens_per_prompt is not None and min(last) >= tokens_per_prompt)
        )
        if tokens_per_prompt is not None and has_ended and last is not None and min(last) < tokens_per_prompt:
            raise _ended_early(path, number, min(last), tokens_per_prompt)
        if last is None or has_ended:
            batches.append([])
        before = batches[-1][-1] if batches[-1] else [0] * len(counts)
        most = max(new - old for new, old in zip(counts, before, strict=True))
        if most > MAX_NUM_DRAFT_TOKENS + 1:
            raise FileError(
                f"{path}, line {number}: a round of {most} tokens, but K is at most {MAX_NUM_DRAFT_TOKENS}: do not "
                "count prompt tokens"
            )
        batches[-1].append(counts)
        last, last_number = counts, number
    if last is None:
        raise FileError(f"{path} has no rounds in it")
    if tokens_per_prompt is not None and min(last) < tokens_per_prompt:
        raise _ended_early(path, last_number, min(last), tokens_per_prompt)
    prompts = tuple(
        tuple(new - old for old, new in zip([0, *row], row, strict=False) if new > old)
        for lines in batches
        for row in zip(*lines, strict=True)
    )
    return ForeignRounds(prompts, is_guessed=tokens_per_prompt is None)


def _ended_early(path: Path, line: int, num_tokens: int, tokens_per_prompt: int) -> FileError:
    return FileError(
        f"{path}, line {line}: a sequence ended after {num_tokens} tokens, not {tokens_per_prompt}: "
        "omit --tokens-per-prompt to guess the ends"
    )


def round_lines(prompts: Sequence[Sequence[int]], batch_size: int) -> Iterator[str]:
    """Yield lines of cumulative counts.

    Args:
        prompts: tokens committed by each round, for each sequence.
        batch_size: sequences per line.
    """
    for begin in range(0, len(prompts), batch_size):
        group = prompts[begin : begin + batch_size]
        totals = [0] * len(group)
        for i in range(max(map(len, group))):
            for row, rounds in enumerate(group):
                totals[row] += rounds[i] if i < len(rounds) else 0
            yield f"{totals}\n"
