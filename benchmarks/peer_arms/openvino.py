"""OpenVINO GenAI.

The folders decide on the weights; with bfloat16, those of float32 are narrowed as they are loaded, the draft's too, and
arithmetic and cache are bfloat16.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from peer_arms.base import EXACT, OTHER, Arm, Output, Run, Runs


@contextmanager
def openvino_arms(
    target: Path,
    draft: Path | None,
    ks: Sequence[int],
    num_threads: int,
    weights: str = "float32",
    isa: str | None = None,
) -> Iterator[Runs]:
    if isa is not None:
        os.environ["ONEDNN_MAX_CPU_ISA"] = isa  # read as the library is loaded
    import openvino
    import openvino_genai

    precision = "bf16" if weights == "bfloat16" else "f32"
    device: dict[str, Any] = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), precision)
    device["INFERENCE_NUM_THREADS"] = num_threads

    def pipeline_of(draft: Path | None = None) -> Any:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False  # else the prefill of a prompt is done once for all temperatures
        options: dict[str, Any] = {"scheduler_config": scheduler, **device}
        if draft is not None:
            options["draft_model"] = openvino_genai.draft_model(draft, "CPU", **device)
        return openvino_genai.LLMPipeline(target, "CPU", **options)

    def arm(name: str, pipeline: Any, k: int | None = None) -> tuple[Arm, Run]:
        def run(ids: Sequence[int], temperature: float, seed: int, num_tokens: int) -> Output:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.rng_seed = num_tokens, True, seed
            if temperature:
                config.do_sample, config.temperature = True, temperature
            if k is not None:
                config.num_assistant_tokens = k
            result = pipeline.generate(openvino.Tensor(torch.tensor([ids]).numpy()), config)
            token_ids = list(result.tokens[0])
            num_accepted = 0 if k is None else result.extended_perf_metrics.get_num_accepted_tokens()
            return Output(token_ids, len(token_ids) - num_accepted)

        return Arm(f"OpenVINO GenAI, {name}", "openvino-genai", k, EXACT if k is None else OTHER), run

    arms = [arm("plain", pipeline_of())]
    if draft is not None:
        pipeline = pipeline_of(draft)
        arms += [arm("draft", pipeline, k) for k in ks]
    yield arms
