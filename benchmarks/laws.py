"""Tokens per round under the acceptance rules of several engines: predicted by replay, and measured.

    pip install gguf
    python benchmarks/laws.py --llama-server llama-build/bin/llama-server > laws_fable.txt

The target generates texts at temperature 1, without a draft; tau is predicted from them for each rule
(outrider.export.engine_rules) and each K. Then Outrider, Transformers and llama.cpp generate with the draft,
on the same prompts with other seeds, and the tokens per round are counted (peer_arms/; peers.py says how to get the
server). Both count rounds that the end of a text cuts short. Weights are float32, llama.cpp's cache is float16;
intervals are over the prompts, 95%. The last line of standard output is the result in JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from peer_arms.hugging_face import hf_arms
from peer_arms.llama_cpp import llama_cpp_arms

from outrider.api import load, load_drafter
from outrider.drafters.base import Drafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.export.engine_rules import GREEDY, RATIO, RATIO_OF_TEN, EngineRule
from outrider.models.registry import resolve
from outrider.records import Stats
from outrider.replay.record import header_of, record_outputs
from outrider.stats.intervals import Interval, ratio_of_sums
from outrider.system.provenance import provenance
from outrider.text.example_prompts import PROMPTS

_KS = (1, 2, 4, 8)
_BLOCK = EngineRule("block", "Outrider's default rule", "block")
_RULES = {"ratio": RATIO, "block": _BLOCK, "ratio of ten": RATIO_OF_TEN, "greedy": GREEDY}


def _tau(num_tokens: Sequence[float], num_rounds: Sequence[float]) -> Interval:
    """Over the prompts; each has several texts, one after the other."""
    size = len(PROMPTS)
    by_prompt = [(sum(num_tokens[i::size]), sum(num_rounds[i::size])) for i in range(size)]
    tokens, rounds = zip(*by_prompt, strict=True)
    return ratio_of_sums(tokens, rounds)


def _predicted(
    plain: Any, drafter: ModelDrafter, num_texts: int, num_tokens: int
) -> Iterator[tuple[str, int, Interval]]:
    options = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True}
    texts = [plain.encode(PROMPTS[i % len(PROMPTS)]) for i in range(num_texts)]
    records = record_outputs(plain, texts, options | {"seed": 0}, num_probs=1)
    header = header_of(plain, options, 1)
    for name, rule in _RULES.items():
        for k, one in rule.expected(records, header, drafter.lm, _KS).items():
            counts: Sequence[Stats] = one.prompts
            tokens = [each.num_generated_tokens for each in counts]
            yield name, k, _tau(tokens, [each.num_rounds + each.num_truncated_rounds for each in counts])


def _by_outrider(plain: Any, drafter: Drafter, rule: str, num_texts: int, num_tokens: int, k: int) -> Interval:
    options = {"temperature": 1.0, "max_new_tokens": num_tokens, "ignore_eos": True, "num_draft_tokens": k}
    decoder = replace(plain, drafter=drafter, acceptance=rule)
    texts = [PROMPTS[i % len(PROMPTS)] for i in range(num_texts)]
    done = decoder.generate(texts, seed=[10**6 + i for i in range(num_texts)], **options)
    rounds = [one.stats.num_rounds + one.stats.num_truncated_rounds for one in done]
    return _tau([num_tokens] * num_texts, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-texts", type=int, default=60)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--llama-server", type=Path)
    arguments = parser.parse_args()
    num_texts, num_tokens = arguments.num_texts, arguments.num_tokens
    plain = load("fable", dtype="float32")
    drafter = load_drafter(plain, "fable-draft")
    assert isinstance(drafter, ModelDrafter)
    rows: list[tuple[str, str, int, Interval]] = []

    def add(name: str, program: str, k: int, tau: Interval) -> None:
        rows.append((name, program, k, tau))
        print(f"{name:14} {program:14} K = {k}: {tau.value:.3f} [{tau.low:.3f}, {tau.high:.3f}]", flush=True)

    for name, k, tau in _predicted(plain, drafter, num_texts, num_tokens):
        add(name, "predicted", k, tau)
    arms = {"ratio": (drafter, "rejection"), "block": (drafter, "block")}
    arms["greedy"] = replace(drafter, options=DraftOptions(is_greedy=True)), "rejection"
    for name, (one, rule) in arms.items():
        for k in _KS:
            add(name, "Outrider", k, _by_outrider(plain, one, rule, num_texts, num_tokens, k))
    folders = [Path(resolve(name).location) for name in ("fable", "fable-draft")]
    prompts = [plain.encode(PROMPTS[i % len(PROMPTS)]) for i in range(num_texts)]
    with ExitStack() as stack:
        runs = stack.enter_context(hf_arms(*folders, _KS))
        if arguments.llama_server is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = arguments.llama_server.resolve()
            runs += stack.enter_context(llama_cpp_arms(*folders, _KS, server, 2, plain.context_len, folder))
        rules = {
            "HF, assistant": ("ratio", "Transformers"),
            "llama.cpp f16, argmax draft": ("greedy", "llama.cpp"),
            "llama.cpp f16, sampled draft": ("ratio of ten", "llama.cpp"),
        }
        for arm, run in runs:
            if arm.family not in rules or arm.k is None:
                continue
            # llama.cpp samples the first token when it reads the prompt, which is not a round.
            first = int(arm.package == "llama.cpp")
            outputs = [run(prompt, 1.0, 10**6 + i, num_tokens) for i, prompt in enumerate(prompts)]
            rounds = [output.num_forwards - first for output in outputs]
            add(*rules[arm.family], arm.k, _tau([len(output.token_ids) - first for output in outputs], rounds))
    body = [{"law": name, "program": program, "k": k, "tau": tau.to_json()} for name, program, k, tau in rows]
    settings = {"num_texts": num_texts, "num_tokens": num_tokens, "temperature": 1.0}
    print(json.dumps({"results": body, **settings, "provenance": provenance("cpu")}))


if __name__ == "__main__":
    sys.exit(main())
