"""How much the logits of a forward over five tokens differ from those of five forwards over one.

    python benchmarks/block_rounding.py

The embedded target on the built-in prompts, by dtype. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from outrider.api import load
from outrider.runtime.lm import LM
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_BLOCK = 5


@torch.inference_mode()
def logits_in_blocks(lm: LM, ids: Tensor, width: int) -> Tensor:
    """[1, N] -> [1, N, V], ``width`` tokens a forward."""
    positions = torch.arange(ids.shape[1], device=lm.device)[None]
    cache = lm.new_cache(1, ids.shape[1])
    parts = []
    for begin in range(0, ids.shape[1], width):
        block = slice(begin, begin + width)
        parts.append(lm.forward(ids[:, block], positions[:, block], cache, min(begin + width, ids.shape[1])))
    return torch.cat(parts, dim=1)


def main() -> None:
    results = {}
    for dtype in ("float64", "float32", "bfloat16"):
        decoder = load("fable", dtype=dtype)
        largest_difference = largest_logit = 0.0
        for prompt in PROMPTS:
            ids = torch.tensor([decoder.encode(prompt)])
            single, block = (logits_in_blocks(decoder.target, ids, width).double() for width in (1, _BLOCK))
            largest_difference = max(largest_difference, float((single - block).abs().max()))
            largest_logit = max(largest_logit, float(single.abs().max()))
        print(f"{dtype:9} largest difference {largest_difference:.2g}, largest logit {largest_logit:.1f}")
        results[dtype] = {"largest_difference": largest_difference, "largest_logit": largest_logit}
    print(json.dumps({"results": results, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    main()
