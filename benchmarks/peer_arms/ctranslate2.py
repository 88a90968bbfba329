"""CTranslate2, which has no speculative mode.

Its models are made here, by its own converter. "int8" is a scale for each row of a matrix, embeddings included, and
activations in 8 bits, with a scale for each of their rows; all else is float32. It has no bfloat16 on CPUs.

On two cores it was no faster with two threads than with one, and in 8 bits only half as fast: there is an arm for each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peer_arms.base import Arm, Output, Run, Runs


@contextmanager
def ctranslate2_arms(target: Path, num_threads: int, folder: Path, weights: str = "float32") -> Iterator[Runs]:
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    made = TransformersConverter(str(target)).convert(str(folder / "ctranslate2"), quantization=weights)
    texts = json.loads((Path(made) / "vocabulary.json").read_text(encoding="utf-8"))
    ctranslate2.set_random_seed(0)  # of the process, and read once: all texts go on with one stream of random numbers

    def arm(threads: int) -> tuple[Arm, Run]:
        generator = ctranslate2.Generator(made, compute_type=weights, inter_threads=1, intra_threads=threads)

        def run(ids: Sequence[int], temperature: float, _: int, num_tokens: int) -> Output:
            # With a top-k of 1 it is greedy, and 0 is none. The end token is a number that no token has.
            sampling: dict[str, Any] = {"sampling_topk": 0, "sampling_temperature": temperature} if temperature else {}
            limits: dict[str, Any] = {"max_length": num_tokens, "end_token": [len(texts)]}
            # With the prompt in the result, it would be read token by token.
            [result] = generator.generate_batch(
                [[texts[i] for i in ids]], include_prompt_in_result=False, **limits, **sampling
            )
            return Output(result.sequences_ids[0], num_tokens)

        return Arm(f"CTranslate2 on {threads} {'thread' if threads == 1 else 'threads'}, plain", "ctranslate2"), run

    yield [arm(threads) for threads in sorted({1, num_threads})]
