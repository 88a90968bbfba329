"""Outrider.

Arithmetic is float32, but for the arm "in bfloat16". With bfloat16, large matrices stay as they are stored, and models
too small for that to pay (the embedded pair's) are widened as they are loaded. "int8" is a scale for each row of a
matrix. "gguf" takes the blocks of the files as they are; "a8" are activations in 8 bits, as llama.cpp has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.models.memory import only_type, weight_files
from outrider.models.placement import Placement
from peer_arms.base import Arm, Output, Run, Runs


@contextmanager
def outrider_arms(
    target: Path, draft: Path, ks: Sequence[int], acceptance: str, weights: str = "float32"
) -> Iterator[Runs]:
    # Float32 is for all programs, whatever the checkpoint is stored in.
    is_widened = weights == "float32" and only_type(weight_files(target)) == "BF16"
    how = {"store": "plain" if is_widened else "auto", "quantization": "int8" if weights == "int8" else None}

    def pair(dtype: str) -> Decoder:
        plain = replace(load(target, dtype=dtype, acceptance=acceptance, **how), tokenizer=None)
        return replace(plain, drafter=load_drafter(plain, draft, placement=Placement(dtype=dtype)))

    decoder = pair("float32")
    ways = {decoder.target.execution.name: decoder}
    if weights == "gguf":
        ways["a8"] = _with_a8(target, draft, acceptance)
    if weights == "bfloat16":
        ways["in bfloat16"] = pair("bfloat16")

    def arm(way: str, name: str, decoder: Decoder, k: int | None = None) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            options: dict[str, Any] = {"temperature": temperature, "max_new_tokens": num_tokens, "ignore_eos": True}
            [completion] = decoder.generate([list(ids)], num_draft_tokens=k, seed=seed, **options)
            return Output(list(completion.token_ids), num_tokens / (completion.stats.mean_acceptance_length or 1))

        return Arm(f"Outrider {way}, {name}", "outrider", k), run

    arms = []
    for way, decoder in ways.items():
        arms.append(arm(way, "plain", decoder.plain()))
        arms += [arm(way, "draft", decoder, k) for k in ks]
    yield arms


def _with_a8(target: Path, draft: Path, acceptance: str) -> Decoder:
    plain = replace(load(f"{target}:a8", dtype="float32", acceptance=acceptance), tokenizer=None)
    return replace(plain, drafter=load_drafter(plain, f"{draft}:a8", placement=Placement(dtype="float32")))
