"""Training data of a draft: sequences that the target generated, mixed with the user's text.

A draft works on text that the target generates, so the two distributions are compared there (on-policy for the target:
Zhou et al. 2310.08461); the user's text supplies the topics.
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

from outrider.decoder import Decoder
from outrider.errors import FileError, OptionError
from outrider.scoring.teacher_forcing import Text
from outrider.system.files import read_text, write_whole
from outrider.text.example_prompts import PROMPTS
from outrider.text.tokenizer import encode

_PROMPT_LEN = 16  # tokens of the user's text that the target continues
_WRITTEN_AT_ONCE = 64  # sequences; also the size of a file, and so the most that a killed process loses
_HELD_OUT = 0.05  # of the text, and of the generated sequences; not trained on
_MOST_HELD_OUT = 64  # sequences


def text_tokens(tokenizer: Any, path: Path) -> Tensor:
    """A text file as one long row of tokens. [N]

    Raises:
        FileError
    """
    text = read_text(path)
    if not text.strip():
        raise FileError(f"{path} contains no text")
    # Piece by piece, at line ends: tokenizers need a lot of memory for one long text.
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
    share: tuple[int, int] = (0, 1),
    on_done: Callable[[int], None] | None = None,
) -> None:
    """Let the target generate, at temperature 1, and store the result; sequences from an earlier run are kept.

    Args:
        decoder: with or without a draft: the output follows the target's law in either case.
        text: prompts are taken from random places in it; None: the sentences of text/example_prompts.py. [N]
        folder: for the files.
        length: tokens in a sequence, including the prompt.
        share: (i, n): only every n-th file, from the i-th on, for one of n processes.
        on_done: called with the number of sequences just done, for a progress bar.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for indices in _files(num_sequences)[share[0] :: share[1]]:
        if _kept_part(folder, indices, length) is None:
            prompts = [_prompt(decoder, text, index, length, seed) for index in indices]
            completions = decoder.generate(
                prompts,
                max_new_tokens=[length - len(prompt) for prompt in prompts],
                seed=[seed + index for index in indices],
                ignore_eos=True,
                num_slots=len(prompts),
            )
            rows = [[*prompt, *done.token_ids] for prompt, done in zip(prompts, completions, strict=True)]
            tensors = {"ids": torch.tensor(rows), "num_given": torch.tensor([len(prompt) for prompt in prompts])}
            write_whole(_path(folder, indices), save(tensors))
        if on_done is not None:
            on_done(len(indices))


def read_sequences(folder: Path, *, num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """The output of ``write_sequences``, from all processes.

    Returns:
        ids [num_sequences, length], and the number of prompt tokens [num_sequences].

    Raises:
        FileError: a file is missing or damaged.
    """
    parts = [(indices, _kept_part(folder, indices, length)) for indices in _files(num_sequences)]
    for indices, part in parts:
        if part is None:
            raise FileError(f"{_path(folder, indices)} cannot be read: remove it, and start again")
    ids, num_given = zip(*(part for _, part in parts if part is not None), strict=True)
    return torch.cat(ids), torch.cat(num_given)


def _files(num_sequences: int) -> list[range]:
    """The sequences of each file."""
    begins = range(0, num_sequences, _WRITTEN_AT_ONCE)
    return [range(begin, min(begin + _WRITTEN_AT_ONCE, num_sequences)) for begin in begins]


def _path(folder: Path, indices: range) -> Path:
    return folder / f"written-{indices.start:07d}.safetensors"


def _kept_part(folder: Path, indices: range, length: int) -> tuple[Tensor, Tensor] | None:
    """The sequences of an earlier run, if complete and of the same form."""
    try:
        tensors = load_file(_path(folder, indices))
        part = tensors["ids"], tensors["num_given"]
    except (OSError, SafetensorError, KeyError):
        return None
    return part if part[0].shape == (len(indices), length) else None


def _prompt(decoder: Decoder, text: Tensor | None, index: int, length: int, seed: int) -> list[int]:
    most = min(_PROMPT_LEN, length // 2)
    if text is None:
        return encode(decoder.tokenizer, PROMPTS[index % len(PROMPTS)])[: length // 2]
    at = int(_random(seed, "prompt", index).integers(max(1, len(text) - most)))
    prompt: list[int] = [*beginning(decoder.tokenizer), *text[at : at + most].tolist()]
    return prompt[: length // 2]


def beginning(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer puts before every text; models trained with them generate poorly without."""
    with_them = [int(i) for i in tokenizer("a", verbose=False).input_ids]
    alone = [int(i) for i in tokenizer("a", add_special_tokens=False, verbose=False).input_ids]
    num_before = next((i for i in range(len(with_them)) if with_them[i : i + len(alone)] == alone), 0)
    return with_them[:num_before]


def _random(seed: int, what: str, index: int) -> np.random.Generator:
    """Random numbers that depend only on the arguments, so that a resumed run uses the same ones."""
    digest = hashlib.sha256(f"{seed} {what} {index}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


@dataclass(frozen=True)
class Mixture(Dataset[dict[str, Tensor]]):
    """An endless supply of training sequences: number i is a function of the seed and i alone.

    Attributes:
        text: [N], or None.
        written: [M, length], or None.
        written_fraction: the probability that a sequence was generated by the target.
        beginning: tokens put before every piece of the text.
    """

    text: Tensor | None
    written: Tensor | None
    length: int
    written_fraction: float
    seed: int
    beginning: Sequence[int] = ()

    def __post_init__(self) -> None:
        assert self.text is not None or self.written is not None
        if self.text is not None and len(self.text) < self.length:
            raise OptionError("length", self.length, f"the text has only {len(self.text)} tokens to train on")

    def __len__(self) -> int:
        return 2**31  # more than any budget; the trainer needs a number

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = _random(self.seed, "sequence", index)
        is_written = random.random() < self.written_fraction
        if self.written is not None and (is_written or self.text is None):
            ids = self.written[random.integers(len(self.written))]
        else:
            assert self.text is not None
            size = self.length - len(self.beginning)
            at = random.integers(len(self.text) - size + 1)
            ids = torch.cat((torch.tensor(self.beginning, dtype=torch.long), self.text[at : at + size]))
        # The key "labels" passes them to the loss.
        return {"input_ids": ids, "labels": ids}


def hold_out_written(written: Tensor, num_given: Tensor) -> tuple[Tensor, list[Text]]:
    """The last sequences are held out, and scored after their prompts.

    Args:
        written: [M, length]
        num_given: [M]

    Returns:
        [M', length], and the held-out texts.
    """
    num_held = _num_held_out(len(written))
    pairs = zip(written[-num_held:].tolist(), num_given[-num_held:].tolist(), strict=True)
    return written[:-num_held], [Text(ids, given) for ids, given in pairs]


def hold_out_text(text: Tensor, length: int) -> tuple[Tensor, list[Text]]:
    """The end of the text is held out, and scored in pieces. [N] -> [N'], texts

    Raises:
        OptionError: the text is too short.
    """
    num_held = _num_held_out(len(text) // length)
    cut = len(text) - num_held * length
    if cut < length:
        raise OptionError("length", length, f"the text has only {len(text)} tokens, for training and for checks")
    return text[:cut], [Text(ids) for ids in text[cut:].reshape(num_held, length).tolist()]


def _num_held_out(num_sequences: int) -> int:
    return min(max(1, round(_HELD_OUT * num_sequences)), _MOST_HELD_OUT)
