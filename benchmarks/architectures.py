"""Which architectures work: every type of causal model in Transformers that a tiny random model can be made of.

    python benchmarks/architectures.py [TYPE ...] > architectures.txt

Each model is loaded as a target, in float64 and, if it refuses that, in float32. It works if its greedy text is that of
Hugging Face's `generate`, token for token: plain, and with a draft (the model itself with perturbed weights, K = 4),
for prompts of different lengths, alone and in a batch. Weights are large, so that logits are far from ties. What is
refused is shown with the message. A type is left out, and counted, if no model below 20 million parameters comes from
the sizes below, or if `generate` itself fails with it. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import sys
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from tiny_models import SPAN, V, tiny
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.decoding.engine import decode
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OutriderError
from outrider.models.loading import Checkpoint, build_lm
from outrider.options import Sampling
from outrider.records import Request
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from outrider.system.provenance import provenance

_NUM_TOKENS, _K = 20, 4
_PROMPTS = [[5, 9, 11, 3, 44], [7, 8] * 12, [(20 + 7 * i) % V for i in range(4 * SPAN + 8)]]  # beyond every window


@dataclass(frozen=True, slots=True)
class _Found:
    """
    Attributes:
        why: it is refused or left out, or does not work in float64.
        has_states: it works, and has states.
    """

    result: str
    why: str = ""
    has_states: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="as in configurations; all by default")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    found = {}
    # An assistant is a draft, which reads the keys of its target.
    models = sorted(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if not name.endswith("_assistant"))
    for name in arguments.types or models:
        one = found[name] = _look_at(name)
        states = "states " if one.has_states else ""
        print(f"{name:28} {one.result:18} {states}{one.why}".rstrip(), flush=True)
    counts = Counter(one.result for one in found.values())
    print(", ".join(f"{number} {result}" for result, number in counts.most_common()))
    types = {name: asdict(one) for name, one in found.items()}
    json.dump({"provenance": provenance("cpu"), "types": types}, sys.stdout)
    print()


def _look_at(name: str) -> _Found:
    try:
        model = tiny(name)
    except Exception as error:  # whatever a configuration makes of sizes that it does not expect
        return _Found("left out", _one_line(error))
    why = ""
    for dtype, result in ((torch.float64, "works"), (torch.float32, "works in float32")):
        try:
            lm = build_lm(Checkpoint(name, model.to(dtype), tokenizer=None), V)
            return _Found(result if _is_right(lm) else "WRONG", why, any(shape.states for shape in lm.layer_shapes))
        except OutriderError as error:
            why = re.sub(rf"^{name} \([^)]*\) ", "", str(error))
            if dtype is torch.float32 or "float32" not in why.lower():
                return _Found("refused", why)
            why = "its grouped experts have no float64"
        except Exception as error:
            return _Found("left out", f"generate: {_one_line(error)}")
    raise AssertionError("both types were tried")


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _is_right(target: LM) -> bool:
    name, model = target.name, target.model
    expected = [_generated(model, prompt) for prompt in _PROMPTS]
    drafter = model_drafter(build_lm(Checkpoint(name, _perturbed(model), tokenizer=None), V))
    together = all(_texts(target, one, _PROMPTS, k) == expected for one, k in ((NO_DRAFTER, 0), (drafter, _K)))
    return together and _texts(target, drafter, _PROMPTS[:1], _K) == expected[:1]


def _perturbed(model: Any) -> Any:
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(2)
    for parameter in draft.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
        parameter.add_(0.03 * parameter.std(correction=0) * noise)
    return draft


def _generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=_NUM_TOKENS, pad_token_id=0)
    new_ids: list[int] = text[0, len(prompt) :].tolist()
    return new_ids


def _texts(target: LM, drafter: Drafter, prompts: list[list[int]], k: int) -> list[list[int]]:
    sampling = Sampling(temperature=0.0, max_new_tokens=_NUM_TOKENS)
    requests = [Request(prompt, sampling) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    for round_ in decode(target, drafter, requests, BLOCK, num_draft_tokens=k):
        for row in round_.rows:
            texts[row.row] += row.token_ids
    return texts


if __name__ == "__main__":
    main()
