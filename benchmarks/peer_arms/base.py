"""What an arm is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

WEIGHTS = ("float32", "bfloat16", "int8", "gguf")
EXACT = "exact"
OTHER = "not the published rule"
TEMPERATURES = (0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Output:
    """What one call gave, in how many forwards of the target."""

    token_ids: list[int]
    num_forwards: float


Run = Callable[[Sequence[int], float, int, int], Output]
"""(token ids of the prompt, temperature, seed, number of tokens) -> output"""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to generate.

    Attributes:
        family: its name, less K.
        package: "outrider", "transformers", "llama.cpp", "openvino-genai" or "ctranslate2".
        k: drafted tokens per round, where that is ours to choose.
        law: at temperature 1, what the output's distribution is to that of the model.
        temperatures: those at which it differs from the other arms.
        is_compiled: programs are made for the sizes that it meets first.
    """

    family: str
    package: str
    k: int | None = None
    law: str = EXACT
    temperatures: Sequence[float] = TEMPERATURES
    is_compiled: bool = False

    @property
    def name(self) -> str:
        return self.family if self.k is None else f"{self.family}, K = {self.k}"


Runs = list[tuple[Arm, Run]]


def draft_weights(weights: str) -> str:
    """Those of the draft, given those of the target: a draft is small, and few quantize it to 8 bits."""
    return "float32" if weights == "int8" else weights
