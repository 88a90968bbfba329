"""Kinds of drafts that can be trained, as the training sees them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.drafters.base import Drafter
from outrider.drafters.model import model_drafter
from outrider.models.loading import Checkpoint, build_lm
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.scoring.alpha import measure_alpha
from outrider.scoring.teacher_forcing import Text
from outrider.stats.intervals import Interval

Pair = tuple[Tensor, Tensor]


class Student(ABC):
    """A draft in training.

    Attributes:
        target: what it is trained for.
        module: what the trainer runs, trains and stores, in float32; it takes ``input_ids`` [B, T].
        later: weight of the loss at a drafted token, over that at the one before it: rounds often end before them.
    """

    target: LM
    module: nn.Module
    later: float = 1.0

    @abstractmethod
    def pairs(self, outputs: Any, ids: Tensor) -> Sequence[Pair]:
        """Logits of the target and of the draft at the same positions.

        Args:
            outputs: of the module.
            ids: what it was given. [B, T]

        Returns:
            [B, T', D] and [B, T', D], for the first drafted token of a round, the second, ...; for a draft that reads
            nothing but the sequence all of them are alike, and there is one pair.
        """

    @abstractmethod
    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        """The drafter that will be loaded from the files: its weights are rounded to their type."""

    @abstractmethod
    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        """alpha on texts of equal length, for the first drafted token of a round, the second, ... as in ``pairs``.

        Args:
            drafter: from ``as_stored``.

        Raises:
            NumericsError: there is no distribution at some position.
        """

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the files of a checkpoint."""


class ModelStudent(Student):
    """A draft model.

    Args:
        model: a Hugging Face model in float32, with the target's tokens.
    """

    def __init__(self, target: LM, model: Any, tokenizer: Any) -> None:
        self.target, self.module = target, model
        self._tokenizer = tokenizer

    def pairs(self, outputs: Any, ids: Tensor) -> list[Pair]:
        size = self.target.vocab_size
        with torch.no_grad():
            target_logits = self.target.model(input_ids=ids, use_cache=False).logits
        return [(target_logits[..., :size], outputs.logits[..., :size])]

    def as_stored(self, name: str, dtype: torch.dtype) -> Drafter:
        model = copy.deepcopy(self.module)
        for parameter in model.parameters():  # not buffers, which are not stored
            parameter.data = parameter.to(dtype).to(torch.float32)
        return model_drafter(build_lm(Checkpoint(name, model, self._tokenizer), self.target.vocab_size))

    def alphas(self, drafter: Drafter, texts: Sequence[Text]) -> tuple[Interval, ...]:
        return (measure_alpha(self.target, drafter, texts, [Sampling()])[0].alpha,)

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        model: Any = copy.deepcopy(self.module).to(dtype)
        model.config.use_cache = True  # the trainer has switched it off
        model.save_pretrained(folder)
        if self._tokenizer is not None:
            self._tokenizer.save_pretrained(folder)
