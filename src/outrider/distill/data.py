"""What a draft is trained on: sequences that the target wrote, mixed with the user's text.

What the target writes is what a draft will meet, so the two distributions are compared where they will be (on-policy
for the target: Zhou et al. 2310.08461); the user's text says what about.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import Dataset

from outrider.api import Decoder
from outrider.bench.prompts import PROMPTS
from outrider.errors import FileError, OptionError
from outrider.files import read_text, write_whole
from outrider.tokens import encode

_PROMPT_LEN = 16  # tokens of the user's text that the target goes on from
_WRITTEN_AT_ONCE = 64  # sequences; also what one file holds, and so what a lost process loses at most
_HELD_OUT = 0.05  # of the text, and of the written sequences; not trained on
_MOST_HELD_OUT = 64  # sequences


def text_tokens(tokenizer: Any, path: Path) -> Tensor:
    """A text file as one long row of tokens. [N]

    Raises:
        FileError
    """
    text = read_text(path)
    if not text.strip():
        raise FileError(f"{path} has no text in it")
    # Piece by piece, at line ends: tokenizers take more than their share of memory on one long text.
    lines = text.splitlines(keepends=True)
    pieces = ["".join(lines[i : i + 1000]) for i in range(0, len(lines), 1000)]
    ids = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False, verbose=False).input_ids]
    return torch.tensor(ids)


def write_sequences(
    decoder: Decoder,
    text: Tensor | None,
    folder: Path,
    *,
    num_sequences: int,
    length: int,
    seed: int,
    on_done: Callable[[int], None] | None = None,
) -> Tensor:
    """Let the target write, at temperature 1, and keep it; what is there from an earlier run is not written again.

    Args:
        decoder: without a draft, or with one: what is written follows the target's law all the same.
        text: what it goes on from: places in it chosen at random; None: the sentences of bench/prompts.py. [N]
        folder: for the files.
        length: tokens in a sequence, the prompt among them.
        on_done: told the number of sequences just done, for a progress bar.

    Returns:
        [num_sequences, length]
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = []
    for begin in range(0, num_sequences, _WRITTEN_AT_ONCE):
        indices = range(begin, min(begin + _WRITTEN_AT_ONCE, num_sequences))
        path = folder / f"written-{begin:07d}.safetensors"
        part = _kept_part(path, len(indices), length)
        if part is None:
            prompts = [_prompt(decoder, text, index, length, seed) for index in indices]
            completions = decoder.generate(
                prompts,
                max_new_tokens=[length - len(prompt) for prompt in prompts],
                seed=[seed + index for index in indices],
                ignore_eos=True,
            )
            rows = [[*prompt, *done.token_ids] for prompt, done in zip(prompts, completions, strict=True)]
            part = torch.tensor(rows)
            write_whole(path, save({"ids": part}))
        parts.append(part)
        if on_done is not None:
            on_done(len(indices))
    return torch.cat(parts)


def _kept_part(path: Path, num_rows: int, length: int) -> Tensor | None:
    """What an earlier run has written, if it is whole and of the same form."""
    try:
        part = load_file(path)["ids"]
    except (OSError, SafetensorError, KeyError):
        return None
    return part if part.shape == (num_rows, length) else None


def _prompt(decoder: Decoder, text: Tensor | None, index: int, length: int, seed: int) -> list[int]:
    if text is None:
        return encode(decoder.tokenizer, PROMPTS[index % len(PROMPTS)])[: length // 2]
    at = int(_random(seed, "prompt", index).integers(max(1, len(text) - _PROMPT_LEN)))
    prompt: list[int] = text[at : at + min(_PROMPT_LEN, length // 2)].tolist()
    return prompt


def _random(seed: int, what: str, index: int) -> np.random.Generator:
    """Random numbers that depend on nothing but the arguments, so that a resumed run meets the same ones."""
    digest = hashlib.sha256(f"{seed} {what} {index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Mixture(Dataset[dict[str, Tensor]]):
    """Training sequences without end: number i is a function of the seed and i alone.

    Attributes:
        text: [N], or None.
        written: [M, length], or None.
        written_fraction: the probability that a sequence is one that the target wrote.
    """

    text: Tensor | None
    written: Tensor | None
    length: int
    written_fraction: float
    seed: int

    def __post_init__(self) -> None:
        assert self.text is not None or self.written is not None
        if self.text is not None and len(self.text) < self.length:
            raise OptionError("length", self.length, f"the text has only {len(self.text)} tokens to train on")

    def __len__(self) -> int:
        return 2**31  # more than any budget; the trainer wants a number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = _random(self.seed, "sequence", index)
        is_written = random.random() < self.written_fraction
        if self.written is not None and (is_written or self.text is None):
            ids = self.written[random.integers(len(self.written))]
        else:
            assert self.text is not None
            at = random.integers(len(self.text) - self.length + 1)
            ids = self.text[at : at + self.length]
        # Under "labels" the loss is given them.
        return {"input_ids": ids, "labels": ids}


def split(text: Tensor | None, written: Tensor | None, length: int) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The end of each is held out. What the target wrote is preferred for that, since a draft will meet such text.

    Returns:
        text and written sequences to train on, and sequences that are not trained on [H, length].
    """
    if written is not None and len(written) > 1:
        num_held = min(max(1, round(_HELD_OUT * len(written))), _MOST_HELD_OUT)
        return text, written[:-num_held], written[-num_held:]
    assert text is not None
    num_held = min(max(1, round(_HELD_OUT * len(text) / length)), _MOST_HELD_OUT)
    cut = len(text) - num_held * length
    if cut < length:
        raise OptionError("length", length, f"the text has only {len(text)} tokens, to train on and to check with")
    return text[:cut], written, text[cut:].reshape(num_held, length)


def sequences(rows: Tensor) -> Sequence[list[int]]:
    """[H, length] as lists of ids."""
    ids: list[list[int]] = rows.tolist()
    return ids
