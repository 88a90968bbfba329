"""Hugging Face Transformers: eager, and compiled with a static cache.

With bfloat16 it computes in bfloat16, draft included. "int8" is torchao's, with a scale for each channel, and float32
arithmetic. GGUF files are widened as they are loaded: to bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, CompileConfig, GenerationConfig, TorchAoConfig

from peer_arms.base import Arm, Output, Run, Runs, draft_weights


@contextmanager
def hf_arms(target: Path, draft: Path, ks: Sequence[int], weights: str = "float32") -> Iterator[Runs]:
    model = _hf_model(target, weights)
    static = model if weights == "gguf" else _hf_model(target, weights)  # the former has no compiled arm
    assistant = _hf_model(draft, draft_weights(weights))
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model.register_forward_pre_hook(count)

    def generate(model: Any, ids: Sequence[int], temperature: float, seed: int, **options: Any) -> list[int]:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        prompt = torch.tensor([ids])
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **sampling, **options)
        return list(output[0, len(ids) :].tolist())

    def arm(name: str, k: int | None = None, drafting: dict[str, Any] | None = None, **options: Any) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            nonlocal num_forwards
            num_forwards = 0
            if drafting is not None:
                # Read from the assistant's own configuration, not from the arguments of ``generate``.
                assistant.generation_config = GenerationConfig(pad_token_id=0, **drafting)
            token_ids = generate(model, ids, temperature, seed, max_new_tokens=num_tokens, **options)
            return Output(token_ids, num_forwards)

        return Arm(f"HF, {name}", "transformers", k), run

    def run_compiled(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
        config = CompileConfig(mode="default")
        config._compile_all_devices = True  # else it is taken for a GPU only
        options: dict[str, Any] = {"cache_implementation": "static", "compile_config": config}
        token_ids = generate(static, ids, temperature, seed, max_new_tokens=num_tokens, **options)
        return Output(token_ids, len(token_ids))

    # It refuses a static cache with an assistant, and without one there is nothing to compile for.
    compiled = Arm("HF compiled, plain", "transformers", is_compiled=True), run_compiled
    arms = [arm("plain")] if weights == "gguf" else [arm("plain"), compiled]
    for k in ks:
        # With the default threshold it stops early, and K is only the most that it drafts.
        drafting = {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant"}
        drafting["assistant_confidence_threshold"] = 0.0
        arms.append(arm("assistant", k, drafting, assistant_model=assistant))
    if weights == "gguf":
        yield arms
        return
    arms.append(arm("assistant, defaults", None, {}, assistant_model=assistant))
    arms += [arm("prompt lookup", k, prompt_lookup_num_tokens=k) for k in ks]
    yield arms


def _hf_model(path: Path, weights: str) -> Any:
    how: dict[str, Any] = {"dtype": torch.bfloat16 if weights in ("bfloat16", "gguf") else torch.float32}
    if weights == "gguf":
        path, how["gguf_file"] = path.parent, path.name
    if weights == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        how["quantization_config"] = TorchAoConfig(Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(path, **how)
    # Without an end token none ends the text; what the files say of sampling is set aside.
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model
