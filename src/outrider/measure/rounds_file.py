"""Rounds in files, and their analysis: tokens committed per round, acceptance by position, by prompt.

Reads ``outrider generate --output``, whose rounds follow from the origins of the tokens, and the files of the
*decoding-speculative-decoding* project (Yan, Agarwal, Venkataraman, arXiv 2402.01528):

- a target log: the printed output ids of each prompt, ``tensor([[1, 2, 3]])`` or ``tensor([[1, 2, 3]],
  device='cuda:0')``, on several lines if long. It contains no prompts.
- rounds: one line each, ``[n]`` or ``[n1, n2]``: the cumulative number of tokens of each row of the batch, including
  corrections and bonuses. It does not mark the ends of prompts.

This module knows no models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import FileError
from outrider.measure.tau import counts_json, stats_of
from outrider.options import MAX_NUM_DRAFT_TOKENS
from outrider.records import Stats
from outrider.system.files import read_text

_TENSOR = re.compile(r"\s*tensor\(\s*(\[[\s\[\]\d,]*\])\s*(?:,\s*(?:device|dtype)\s*=\s*[^(),]+)*\)")
_ROUND = re.compile(r"\[\s*\d{1,18}(?:\s*,\s*\d{1,18})*\s*\]")


class RecordedArm(NamedTuple):
    """Draft, K and acceptance rule, where the file states them."""

    draft: str | None = None
    k: int | str | None = None
    acceptance: str | None = None


PromptRounds = tuple[int, str | None, Stats]
"""A prompt's index, category and rounds."""


def arms_json(arms: Mapping[RecordedArm, Sequence[PromptRounds]]) -> list[dict[str, Any]]:
    """Entry of a document for each arm, with its categories and prompts."""
    found = []
    for arm, prompts in arms.items():
        categories = sorted({category for _, category, _ in prompts if category is not None})
        parts = [(name, [one for one in prompts if one[1] == name]) for name in categories]
        own: dict[str, Any] = {"categories": [{"category": name} | _summary_json(part) for name, part in parts]}
        own |= {"prompts": [{"index": i, "category": name, "stats": one.to_json()} for i, name, one in prompts]}
        found.append(arm._asdict() | _summary_json(prompts) | own)
    return found


def _summary_json(prompts: Sequence[PromptRounds]) -> dict[str, Any]:
    """``prompt_tau`` is the mean over the prompts' own tau; None without rounds."""
    taus = [tau for *_, one in prompts if (tau := one.mean_acceptance_length) is not None]
    mean = sum(taus) / len(taus) if taus else None
    return {"num_prompts": len(prompts), "prompt_tau": mean} | counts_json([one for *_, one in prompts])


def read_file(
    path: Path, *, tokens_per_prompt: int | None = None, k: int | None = None
) -> tuple[dict[RecordedArm, list[PromptRounds]], list[str]]:
    """Read rounds from a file in either format, detected by its first character. ``tokens_per_prompt``, ``k``: for
    cumulative counts, which contain neither the ends of prompts nor the numbers of drafted tokens. Returns the rounds
    of each arm; and assumptions, for human readers. Raises FileError: with the line number."""
    # Not splitlines(), which also splits at characters that may occur inside JSON strings.
    lines = [(n, line) for n, line in enumerate(read_text(path).split("\n"), start=1) if line.strip()]
    if not lines:
        raise FileError(f"{path} has no rounds in it")
    if lines[0][1].lstrip().startswith("["):
        return _from_counts(path, tokens_per_prompt, k)
    arms: dict[RecordedArm, dict[int, PromptRounds]] = {}
    for number, line in lines:
        try:
            arm, prompt = _from_origins(json.loads(line))
            prompts = arms.setdefault(arm, {})
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FileError(f"{path}, line {number}: not a line of generate --output with a draft") from None
        if prompt[0] in prompts:
            raise FileError(f"{path}, line {number}: duplicates prompt {prompt[0]}: give each run by itself")
        prompts[prompt[0]] = prompt
    return {arm: list(prompts.values()) for arm, prompts in arms.items()}, []


def _from_origins(row: Mapping[str, Any]) -> tuple[RecordedArm, PromptRounds]:
    """Reconstruct rounds from the origins of tokens: each ends with its correction or bonus. Accepted tokens at the
    end without either belong to a truncated round; tokens drafted after a rejection are in the file's counts only.
    Raises ValueError, KeyError, TypeError: the row is something else, or its counts are not those of its origins."""
    settings, counts = row["settings"], row["stats"]
    rounds, num_accepted = [], 0
    for origin in row["origins"]:
        if origin == "accepted":
            num_accepted += 1
        elif origin in ("correction", "bonus"):
            rounds.append((num_accepted, origin == "bonus"))
            num_accepted = 0
        else:
            raise ValueError
    stats = stats_of([(n, n) for n, _ in rounds], int(num_accepted > 0), len(row["origins"]))
    drafted = tuple(map(int, counts["drafted_histogram"]))
    if list(stats.acceptance_histogram) != counts["acceptance_histogram"] or sum(drafted) != len(rounds):
        raise ValueError
    full = stats_of([(n, n) for n, is_full in rounds if is_full], 0, 0).full_histogram
    stats = replace(stats, drafted_histogram=drafted, full_histogram=full)
    if not isinstance(row.get("category"), str | None):
        raise ValueError
    arm = RecordedArm(settings["draft"], settings["num_draft_tokens"], settings["acceptance"])
    return arm, (int(row["index"]), row.get("category"), stats)


def _from_counts(
    path: Path, tokens_per_prompt: int | None, k: int | None
) -> tuple[dict[RecordedArm, list[PromptRounds]], list[str]]:
    found = read_rounds(path, tokens_per_prompt)
    most = max((max(rounds) - 1 for rounds in found if rounds), default=0)
    if k is not None and most > k:
        raise FileError(f"{path}: a round accepted {most} drafted tokens, which is impossible with K = {k}")
    notes = []
    if tokens_per_prompt is None:
        remedy = "if all have the same number of tokens, set --tokens-per-prompt"
        notes.append(f"the ends of prompts are guessed from decreases; {remedy}")
    if k is None:
        notes.append(f"the number of drafted tokens per round, {most}, is guessed from the most accepted; set -k")
    drafted = most if k is None else k
    stats = [stats_of([(drafted, n - 1) for n in rounds], 0, sum(rounds)) for rounds in found]
    return {RecordedArm(k=k): [(index, None, one) for index, one in enumerate(stats)]}, notes


def read_rounds(path: Path, tokens_per_prompt: int | None = None) -> list[list[int]]:
    """Read the tokens committed by each round of each sequence from lines of cumulative counts.

    A batch ends where a count decreases. That is a guess: it misses the end of a batch if the first round of the next
    batch commits at least as many tokens as the previous one had in total. If every sequence has at least
    ``tokens_per_prompt`` tokens, a batch ends when all rows have that many, and nothing is guessed. A count that stays
    the same belongs to a finished row. Raises FileError: with the line number."""
    batches: list[list[list[int]]] = []  # counts, by batch and line
    last: list[int] = []

    def check_end(number: int) -> None:
        if tokens_per_prompt is not None and last and min(last) < tokens_per_prompt:
            ended = f"a sequence ended after {min(last)} tokens, not {tokens_per_prompt}"
            raise FileError(f"{path}, line {number}: {ended}: omit --tokens-per-prompt to guess the ends")

    number = 0
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        if _ROUND.fullmatch(line.strip()) is None:
            raise FileError(f"{path}, line {number}: expected counts like [3] or [3, 5]")
        counts = json.loads(line)
        is_full = tokens_per_prompt is not None and bool(last) and min(last) >= tokens_per_prompt
        if len(counts) != len(last) or is_full or any(new < old for new, old in zip(counts, last, strict=True)):
            check_end(number)
            batches.append([])
            last = [0] * len(counts)
        most = max(new - old for new, old in zip(counts, last, strict=True))
        if most > MAX_NUM_DRAFT_TOKENS + 1:
            limit = f"a round of {most} tokens, but K is at most {MAX_NUM_DRAFT_TOKENS}"
            raise FileError(f"{path}, line {number}: {limit}: do not count prompt tokens")
        batches[-1].append(counts)
        last = counts
    if not batches:
        raise FileError(f"{path} has no rounds in it")
    check_end(number)
    rows = (row for lines in batches for row in zip(*lines, strict=True))
    return [[new - old for old, new in pairwise((0, *row)) if new > old] for row in rows]


def read_tensors(path: Path) -> list[tuple[int, ...]]:
    """Read sequences of token ids, one for each row of each printed tensor. Raises FileError: with the line number; ids
    are elided (``...``), or the file has other content."""
    text = read_text(path).rstrip()
    texts: list[tuple[int, ...]] = []
    at = 0
    while at < len(text):
        match = _TENSOR.match(text, at)
        try:
            if match is None:
                raise ValueError
            rows = json.loads(match[1])
            texts += map(whole_ids, rows if isinstance(rows[0], list) else [rows])
        except (ValueError, TypeError, IndexError):
            line = text.count("\n", 0, at + len(text[at:]) - len(text[at:].lstrip())) + 1
            remedy = "; print all ids, after torch.set_printoptions(threshold=sys.maxsize)" * ("..." in text[at:])
            raise FileError(f"{path}, line {line}: expected tensor([[1, 2, ...]]) as print writes it{remedy}") from None
        at = match.end()
    if not texts:
        raise FileError(f"{path} has no tensors in it")
    return texts


def whole_ids(stated: Any) -> tuple[int, ...]:
    """Token ids as JSON has them. Raises TypeError, ValueError."""
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in stated):
        raise ValueError("an id is no whole number")
    return tuple(stated)
