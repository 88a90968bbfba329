"""Validated options of training a draft: recipe and budget."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.distill.losses import LOSSES
from outrider.errors import OptionError


@dataclass(frozen=True, slots=True)
class Budget:
    """Training budget: a number of steps, or of seconds."""

    num_steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.num_steps is None) == (self.seconds is None):
            raise OptionError("steps", self.num_steps, "either --steps or --minutes")
        if not 0 < (self.num_steps or self.seconds or 0) < math.inf:
            raise OptionError("steps", self.num_steps or self.seconds, "steps or minutes above 0")

    def spent(self, num_steps: int, seconds: float) -> float:
        """Fraction of the budget that is spent, from 0 to 1."""
        used = num_steps / self.num_steps if self.num_steps is not None else seconds / (self.seconds or 1)
        return min(1.0, used)


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of training.

    Attributes:
        loss: a key of ``LOSSES``.
        patience: stop after this many checks in a row without a better alpha.
        save_s: approximate seconds between checkpoints.
    """

    loss: str = "kl"
    batch_size: int = 8
    learning_rate: float = 2e-3
    patience: int = 8
    seed: int = 0
    save_s: float = 120.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise OptionError("loss", self.loss, f"choose one of {', '.join(LOSSES)}")
        if self.batch_size < 1:
            raise OptionError("batch_size", self.batch_size, "a whole number >= 1")
        if not 0 < self.learning_rate < math.inf:
            raise OptionError("learning_rate", self.learning_rate, "a number above 0")
        if self.patience < 1:
            raise OptionError("patience", self.patience, "a whole number >= 1")
        if not 0 <= self.seed < 2**32:
            raise OptionError("seed", self.seed, "a whole number, 0 <= seed < 2**32")
