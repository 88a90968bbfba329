"""`model.generate` of Transformers three ways: plain, with its `assistant_model`, and with `outrider.assisted`.

    python benchmarks/in_transformers.py

The embedded pair, greedy and sampled, one row. All arms in turn, prompt by prompt; a time is that of a whole call.
`assistant_model` runs at its defaults and at the best of a few constant K, found in a pilot on one prompt, as does
`assisted`. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.models.registry import resolve

NUM_TOKENS = 96
KS = (3, 5, 8)
PROMPTS = ["Once upon a time", "The old fox sat by the river and", "One morning the little bird", "In the forest a"]
Arm = Callable[[Any], Any]


def _load(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(resolve(name, None).location, dtype=torch.float32).eval()


def _generate(model: Any, options: dict[str, Any], inputs: Any) -> Any:
    return model.generate(**inputs, **options)


def _constant(assistant: Any, k: int) -> Any:
    config = assistant.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
    config.assistant_confidence_threshold = 0.0
    return assistant


def _seconds(arm: Arm, inputs: Any) -> float:
    begin_s = time.perf_counter()
    arm(inputs)
    return time.perf_counter() - begin_s


def _best(arms: dict[int, Arm], inputs: Any) -> int:
    for arm in arms.values():
        arm(inputs)
    return min(arms, key=lambda k: min(_seconds(arms[k], inputs) for _ in range(2)))


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = _load("fable"), AutoTokenizer.from_pretrained(resolve("fable", None).location)
    draft = _load("fable-draft")
    defaults, constant = _load("fable-draft"), {k: _constant(_load("fable-draft"), k) for k in KS}
    results: dict[str, Any] = {}
    for kind, options in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        common = {**options, "max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "pad_token_id": 0}
        theirs = {k: partial(_generate, model, common | {"assistant_model": one}) for k, one in constant.items()}
        drafting = {k: {"custom_generate": outrider.assisted(draft, num_draft_tokens=k)} for k in KS}
        ours = {k: partial(_generate, model, common | more) for k, more in drafting.items()}
        inputs = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
        best = {"assistant": _best(theirs, inputs[0]), "assisted": _best(ours, inputs[0])}
        arms = {
            "plain": partial(_generate, model, common),
            "assistant, defaults": partial(_generate, model, common | {"assistant_model": defaults}),
            f"assistant, K={best['assistant']}": theirs[best["assistant"]],
            f"assisted, K={best['assisted']}": ours[best["assisted"]],
        }
        times: dict[str, list[float]] = {name: [] for name in arms}
        for given in inputs:
            for name, one in arms.items():
                times[name].append(_seconds(one, given))
        results[kind] = {name: round(NUM_TOKENS / statistics.median(own), 1) for name, own in times.items()}
        for name, speed in results[kind].items():
            print(f"{kind:8} {name:22} {speed:7.1f} tokens per second")
    print(json.dumps({"schema": "outrider/in_transformers/1", "tokens_per_s": results}))


if __name__ == "__main__":
    main()
