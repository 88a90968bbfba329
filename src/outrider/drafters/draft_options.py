"""How a draft is drawn, beside the sampling options: given in its name, like "NAME:min-prob=0.3:greedy"."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outrider.drafters.corpus import OUTPUTS, read_sequences
from outrider.errors import OptionError
from outrider.models.few_tokens import with_few_tokens
from outrider.runtime.lm import LM

# In their order in names.
_WORDS = {"vocab": "vocab", "window": "window", "min_prob": "min-prob", "is_greedy": "greedy"}
_VALUES = {
    "vocab": "a number of tokens, or a file of outputs",
    "window": "a number of tokens",
    "min-prob": "a probability between 0 and 1",
}
_LEAST_WINDOW = 16


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options of a draft model or a head.

    Attributes:
        is_greedy: draft the most probable tokens instead, so that q is one-hot and tokens are accepted with probability
            p instead of min(1, p/q). Several inference engines draft like this.
        min_prob: a draft ends before a token of which the model is unsure (``is_unsure``); 0 for never.
        vocab: draft few tokens only: N, the N most frequent ones of the target; FILE, those that occur in a file of
            outputs; or N@FILE, the N most frequent ones there. Empty: all.
        window: a model reads the last tokens of long sequences only, half to all of so many; 0 for its whole context.
    """

    is_greedy: bool = False
    min_prob: float = 0.0
    vocab: str = ""
    window: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.min_prob < 1:
            raise OptionError("min_prob", self.min_prob, "a number from 0, for none, to below 1")
        if self.window and self.window < _LEAST_WINDOW:
            raise OptionError("window", self.window, f"{_LEAST_WINDOW} tokens or more")
        number, path = self.vocab_parts
        if self.vocab and (number == 0 or path == ""):
            raise OptionError("vocab of the draft", self.vocab, "N, FILE or N@FILE, with N >= 1")

    @property
    def vocab_parts(self) -> tuple[int | None, str | None]:
        """N and FILE of ``vocab``."""
        number, at, path = self.vocab.partition("@")
        if not (number.isascii() and number.isdigit()):
            return None, self.vocab
        return int(number), path if at else None

    def full_name(self, model: str) -> str:
        """Name of a draft: the model and its options (see ``split_name``)."""
        for field, word in _WORDS.items():
            value = getattr(self, field)
            if value:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                model += f":{word}" if value is True else f":{word}={text}"
        return model

    def check_taken(self, model: str, *taken: str) -> None:
        """Raises OptionError: an option is given, and is not among these."""
        for field, word in _WORDS.items():
            value = getattr(self, field)
            if value and field not in taken:
                raise OptionError(f"{word} of the draft", value, f"{model} does not take it: leave it out")


NO_OPTIONS = DraftOptions()


def split_name(name: Any) -> tuple[Any, DraftOptions]:
    """Split a draft's name into the model and its options. Raises OptionError."""
    fields = {word: field for field, word in _WORDS.items()}
    given: dict[str, Any] = {}
    model = name
    for text in reversed(name.split(":")[1:] if isinstance(name, str) else []):
        word, equals, number = text.partition("=")
        field = fields.get(word)
        if word == "min-confidence":
            raise OptionError("draft", name, "no head here predicts acceptance: use min-prob, or leave it out")
        if field is None or bool(equals) == (field == "is_greedy"):
            break
        if field in given:
            raise OptionError("draft", name, f"give {word} once")
        given[field] = _value(name, word, number) if equals else True
        model = model.removesuffix(f":{text}")
    return model, DraftOptions(**given)


def _value(name: str, word: str, text: str) -> float | str:
    if word == "vocab" and text:
        return text
    if word == "window" and text.isascii() and text.isdigit() and int(text):
        return int(text)
    if word == "min-prob":
        with suppress(ValueError):
            if 0 < float(text) < 1:
                return float(text)
    raise OptionError("draft", name, f"{word} is {_VALUES[word]}")


def with_vocab(
    lm: LM, options: DraftOptions, tokenizer: Any | None, end_ids: Iterable[int], quantization: str | None = None
) -> tuple[LM, DraftOptions]:
    """A draft with the tokens that ``options.vocab`` states, and the other options. Its name states them, too, a file
    by the digest of its tokens. Raises OptionError, FileError, UnsupportedModel.

    Tokenizers number tokens in the order in which their training found them, so that low ids are frequent: merges of
    BPE, scores of Unigram. Counts of the target's own outputs are better (``outrider generate --output``).

    Args:
        lm: a model with the target's vocabulary, or a head whose execution is not chosen yet.
        tokenizer: the target's; None if it has none.
        end_ids: tokens that are always among them.
        quantization: of the model's weights.
    """
    if not options.vocab:
        return lm, options
    number, path = options.vocab_parts
    size = lm.vocab_size
    if number is not None and number >= size:
        raise OptionError("vocab of the draft", number, f"fewer than the {size} tokens of the target, or leave it out")
    label = str(number)
    if path is None:
        ids = torch.arange(number or 0)
    else:
        sequences = read_sequences([Path(path)], tokenizer, size, OUTPUTS)
        counts = torch.bincount(torch.tensor([i for ids in sequences for i in ids]), minlength=size)
        order = counts.argsort(descending=True, stable=True)  # of equally frequent ones the lower id first
        ids = order[: int((counts > 0).sum()) if number is None else number]
    ids = torch.cat((ids, torch.tensor([*end_ids], dtype=torch.long))).unique()
    if path is not None:
        label = f"{len(ids)}@{hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:8]}"
    return with_few_tokens(lm, ids, quantization).with_name(f"{lm.name}:vocab={label}"), replace(options, vocab="")
