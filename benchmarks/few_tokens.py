"""A draft step with the LM head of few tokens (``--draft NAME:vocab=N``): its cost, and what it drafts.

    PYTHONPATH=src python benchmarks/few_tokens.py --prompts FILE.jsonl [--model smollm2] [-n 64] [--threads 1]

Each published file (real_models.py) drafts for itself: so q is p on the tokens of the draft, and alpha is what p has
there. The tokens are those of lowest ids, or the most frequent ones of the target's own outputs for two thirds of the
prompts, at temperature 1; alpha is taken along the outputs for the others. Steps of all arms take turns. The last line
of standard output is one JSON document.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from real_models import PUBLISHED, real_file
from torch import Tensor

from outrider import load
from outrider.decoder import Decoder
from outrider.models.few_tokens import with_few_tokens
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.candidates import candidate_buffers
from outrider.sampling.probs import Settings, draw, probs_of

SIZES = (16384, 8192, 4096, 2048)
SAMPLINGS = {"T=1": Sampling(), "top-p 0.95": Sampling(top_p=0.95)}
ROUNDS, PLACES = 60, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines with a prompt, a question or turns")
    parser.add_argument("--model", choices=PUBLISHED, action="append")
    parser.add_argument("-n", type=int, default=64, help="tokens of an output")
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    texts = [_prompt(json.loads(line)) for line in lines[:: max(1, len(lines) // options.num_prompts)]]
    names = options.model or list(PUBLISHED)
    print(json.dumps({name: _measure(name, texts, options.n) for name in names}))


def _prompt(row: dict[str, Any]) -> str:
    found = row.get("prompt") or row.get("question") or row["turns"][0]
    return str(found)


@torch.inference_mode()
def _measure(name: str, texts: list[str], num_tokens: int) -> dict[str, Any]:
    decoder = load(real_file(name), None)
    target, outputs = decoder.target, _outputs(decoder, texts, num_tokens)
    size = target.vocab_size
    counted = [output for i, (_, output) in enumerate(outputs) if i % 3]
    counts = torch.bincount(torch.tensor([i for output in counted for i in output]), minlength=size)
    by_count = counts.argsort(descending=True, stable=True)
    held_out = [both for i, both in enumerate(outputs) if i % 3 == 0]
    states, probs = _states(target, held_out)
    num_counted, num_kinds = int(counts.sum()), int((counts > 0).sum())
    print(f"{name}: {size} tokens; {num_kinds} different ones of {num_counted} that were counted", file=sys.stderr)
    drafts: dict[str, LM] = {f"{size}": target}
    found: dict[str, Any] = {}
    for number in SIZES:
        for order, ids in (("ids", torch.arange(size)), ("counts", by_count)):
            chosen = ids[:number].sort().values
            key, draft = f"{number} by {order}", with_few_tokens(target, chosen)
            found[key] = _alpha(draft, chosen, states, probs)
            if order == "ids":
                drafts[key] = draft
    for key, ratios in _costs(drafts).items():
        found.setdefault(key, {}).update(ratios)
    for key, row in found.items():
        print(f"{key:>22}  " + "  ".join(f"{what} {value:.3f}" for what, value in row.items()), file=sys.stderr)
    return {"vocab_size": size, "num_counted": num_counted, "num_kinds": num_kinds, "arms": found}


def _outputs(decoder: Decoder, texts: list[str], num_tokens: int) -> list[tuple[list[int], list[int]]]:
    """Prompts and outputs of the target at temperature 1."""
    prompts = [decoder.encode(text)[-512:] for text in texts]
    done = decoder.generate(prompts, temperature=1.0, seed=0, max_new_tokens=num_tokens, num_slots=8)
    return [(prompt, list(one.token_ids)) for prompt, one in zip(prompts, done, strict=True)]


def _states(target: LM, outputs: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Inputs of the LM head [N, H], and p [N, V], where the tokens of outputs are drawn."""
    model: Any = target.model
    last, states, probs = len(model.get_decoder().layers), [], []
    for prompt, output in outputs:
        ids = torch.tensor([[*prompt, *output][:-1]])
        length = ids.shape[1]
        cache = target.new_cache(1, length)
        given = ids, torch.arange(length)[None], cache, target.view_len(length, cache), (last,)
        logits, features = target.forward_with_features(*given, num_logits=len(output))
        assert features is not None
        states.append(model.get_decoder().norm(features[0, -len(output) :]))
        probs.append(logits[0].softmax(-1))
    return torch.cat(states), torch.cat(probs)


def _alpha(draft: LM, chosen: Tensor, states: Tensor, probs: Tensor) -> dict[str, float]:
    model: Any = draft.model
    logits = model.get_output_embeddings()(states)
    cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    q = (logits if cap is None else cap * torch.tanh(logits / cap)).softmax(-1)
    alpha = torch.minimum(q, probs[:, chosen]).sum(-1).mean()
    is_best = chosen[q.argmax(-1)] == probs.argmax(-1)
    return {"alpha at T=1": float(alpha), "alpha at T=0": float(is_best.float().mean())}


def _costs(drafts: dict[str, LM]) -> dict[str, dict[str, float]]:
    """Time of a step over that of the first draft, with the drawing of a token."""
    found: dict[str, dict[str, float]] = {key: {} for key in drafts}
    for name, sampling in SAMPLINGS.items():
        steps = {key: _step(draft, sampling) for key, draft in drafts.items()}
        times: dict[str, list[float]] = {key: [] for key in drafts}
        for _ in range(ROUNDS):
            for key, step in steps.items():
                begin_s = time.perf_counter()
                step()
                times[key].append(time.perf_counter() - begin_s)
        first = next(iter(times.values()))
        for key, own in times.items():
            found[key][f"step, {name}"] = median(one / whole for one, whole in zip(own, first, strict=True))
    return found


def _step(draft: LM, sampling: Sampling) -> Callable[[], Tensor]:
    cache = draft.new_cache(1, PLACES + 1)
    ids, positions = torch.tensor([[7]]), torch.tensor([[PLACES]])
    buffers = candidate_buffers(draft.vocab_size, draft.device)
    settings = Settings.neutral(1, draft.device, buffers).with_row(0, sampling, draft.vocab_size)
    uniform = torch.tensor([0.4], dtype=torch.float64)

    def step() -> Tensor:
        if buffers is not None:
            buffers.clear()
        logits = draft.forward(ids, positions, cache, cache.capacity, spreads=False)
        rows, _ = probs_of(logits, settings, token_ids=draft.token_ids, vocab_size=draft.vocab_size)
        return draw(rows[:, 0], uniform)

    return step


if __name__ == "__main__":
    main()
