"""A plan for a pair that is not here: memory and speed of a 70B target with an 8B draft on GPUs of 80 GB. Predictions.

    python benchmarks/big_plan.py > big_plan.txt

Configurations are those published for Llama 3.1. Memory: outrider.bench.predicted_memory, the target shared by tensor
parallelism, the draft whole on each GPU. Speed: a step takes as long as reading its weights and caches at the GPU's
bandwidth (3.35 TB/s, the data sheet of an H100 SXM, times 0.8), for the verify as for a plain step; communication
between GPUs is left out, which flatters many of them. A drafted token is accepted with probability alpha, independently
(Leviathan et al. 2211.17192, equation 1). The last line of standard output is one JSON document.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig

from outrider.bench.predicted_memory import Memory, Predictor
from outrider.measure.tables import new_table
from outrider.measure.tau import predict as predict_speed_up

_BANDWIDTH = 0.8 * 3.35e12  # bytes per second
_GPU_BYTES = 80e9
_ALPHA = 0.8
_NUM_ROWS, _CONTEXT = 4, 8192
_FORMS = (("none", "none"), ("int8", "none"), ("int8", "int8"), ("int4", "int4"))
_KS = range(1, 13)


def llama(hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int) -> LlamaConfig:
    """A configuration of the Llama 3.1 family."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate_size,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    )


def main() -> None:
    target, draft = llama(8192, 80, 64, 28672), llama(4096, 32, 32, 14336)
    title = f"70B with 8B, {_NUM_ROWS} x {_CONTEXT} tokens, alpha = {_ALPHA}: predictions for each GPU of 80 GB"
    table = new_table(title, "GPUs", "target", "draft", "GB", "fits", "plain ms", "draft ms", "c", "best K", "speed-up")
    rows: list[dict[str, Any]] = []
    targets, drafts = (Predictor(config, _CONTEXT, _NUM_ROWS, torch.bfloat16) for config in (target, draft))
    for num_gpus in (1, 2, 4, 8):
        for target_form, draft_form in _FORMS:
            share, whole = targets.memory(target_form, num_gpus), drafts.memory(draft_form)
            total = share.total + whole.total
            plain_s, draft_s = _seconds(share), _seconds(whole)
            best = max(
                predict_speed_up(_KS, alpha=_ALPHA, c=draft_s / plain_s, v=1.0, c_ops=0.0), key=lambda one: one.speed_up
            )
            row = {"gpus": num_gpus, "target": target_form, "draft": draft_form, "bytes": total}
            row |= {"fits": total <= _GPU_BYTES, "plain_s": plain_s, "draft_s": draft_s}
            row |= {"k": best.k if best.speed_up > 1 else 0, "speed_up": max(1.0, best.speed_up)}
            rows.append(row)
            table.add_row(
                str(num_gpus),
                *("bfloat16" if form == "none" else form for form in (target_form, draft_form)),
                f"{total / 1e9:.0f}",
                "yes" if row["fits"] else "no",
                f"{1e3 * plain_s:.1f}",
                f"{1e3 * draft_s:.1f}",
                f"{draft_s / plain_s:.2f}",
                str(row["k"] or "none"),
                f"{row['speed_up']:.2f}",
            )
    Console(width=120).print(table)
    print(json.dumps({"alpha": _ALPHA, "rows": rows}))


def _seconds(memory: Memory) -> float:
    """A step that reads all of it."""
    return (memory.weights + memory.cache) / _BANDWIDTH


if __name__ == "__main__":
    main()
