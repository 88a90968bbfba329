"""Are texts the same bytes with any draft? Those of published files, plain and alone, then with drafts and in batches.

    python benchmarks/same_bytes.py spec_bench.jsonl STATE [--models smollm2 gemma3] [--num-prompts 200] [--tokens 256]
        [--slots 16] [--threads 1] [--drafts NAME ...]

Prompts are first turns of Spec-Bench in a fixed random order, at most 192 tokens of each (in SmolLM2's chat template;
Gemma is a base model). The reference decodes each prompt alone without a draft: greedy, and at temperature 1 under
`gumbel`, prompt i with seed i. Each other arm runs the same in ``--slots`` rows that join and leave. In a draft's name
FILE is the target's own file; K is 4, and with "auto" whatever pays at the moment, so that it changes in a text.

STATE, JSON lines, keeps what is done: another run goes on, perhaps with more prompts. A digest is the SHA-256 of all
texts in turn. Exits with 1 if one differs from its reference. The last line of standard output is one JSON document.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from real_models import PUBLISHED, real_file

import outrider
from outrider.decoder import Decoder
from outrider.records import Completion
from outrider.system.provenance import provenance
from outrider.text.tokenizer import encode

_MOST_OF_PROMPT = 192
_OPTIONS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0.0}, "gumbel": {"temperature": 1.0}}
_DRAFTS = ("none", "ngram", "suffix auto", "self:window=48", "FILE:vocab=4096", "suffix+FILE:vocab=2048")
_ALONE = "alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=[*PUBLISHED])
    parser.add_argument("--num-prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--drafts", nargs="+", default=_DRAFTS, metavar="NAME")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [row for model in arguments.models for row in _rows(model, arguments)]
    for row in rows:
        drafted = "" if row["mean_acceptance_length"] is None else f", tau {row['mean_acceptance_length']:.2f}"
        verdict = "same bytes" if not row["different"] else f"DIFFERENT: {row['different'][:9]}"
        print(f"{row['model']:8} {row['rule']:6} {row['arm']:24} {row['sha256'][:16]}  {verdict}{drafted}")
    print(json.dumps({"provenance": provenance("cpu"), "slots": arguments.slots, "rows": rows}))
    if any(row["different"] for row in rows):
        sys.exit(1)


def _rows(model: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the table for each arm of a model."""
    file = real_file(model)
    plain = outrider.load(file)
    assert plain.target.execution.name == "native"
    prompts = _prompts(plain, arguments, is_chat=model == "smollm2")
    references: dict[str, list[str]] = {}
    for arm in (_ALONE, *arguments.drafts):
        name, _, k = arm.partition(" ")
        decoder = plain if arm == _ALONE else None
        for rule, options in _OPTIONS.items():
            key = [model, rule, arm, arguments.tokens]
            done = _done(arguments.state, key)
            own = options | {"acceptance": "block" if rule == "greedy" else rule, "num_draft_tokens": k or 4}
            own |= {"max_new_tokens": arguments.tokens, "ignore_eos": True}
            missing = [i for i in range(len(prompts)) if i not in done]
            if missing and decoder is None:
                decoder = outrider.load(file, name.replace("FILE", str(file)))
            for i, found in _completions(decoder, prompts, missing, own, 1 if arm == _ALONE else arguments.slots):
                digest = hashlib.sha256(json.dumps([found.token_ids, found.text]).encode()).hexdigest()
                done[i] = [digest, len(found.token_ids), found.stats.num_rounds, found.stats.num_accepted_draft_tokens]
                with open(arguments.state, "a") as state:
                    state.write(json.dumps([*key, i, *done[i]]) + "\n")
            texts = [done[i] for i in range(len(prompts))]
            digests = [text[0] for text in texts]
            reference = references.setdefault(rule, digests)
            num_rounds, num_accepted = (sum(text[j] for text in texts) for j in (2, 3))
            yield {
                "model": model,
                "rule": rule,
                "arm": arm,
                "num_texts": len(texts),
                "num_tokens": sum(text[1] for text in texts),
                "mean_acceptance_length": 1 + num_accepted / num_rounds if num_accepted else None,
                "sha256": hashlib.sha256("".join(digests).encode()).hexdigest(),
                "different": [i for i, (one, other) in enumerate(zip(digests, reference, strict=True)) if one != other],
            }


def _completions(
    decoder: Decoder | None, prompts: list[list[int]], numbers: list[int], options: dict[str, Any], num_slots: int
) -> Iterator[tuple[int, Completion]]:
    if decoder is None:  # all are done
        return
    if num_slots == 1:  # each alone, with a cache of its own
        for i in numbers:
            yield i, decoder.generate([prompts[i]], seed=i, **options)[0]
        return
    with_seeds = ((prompts[i], {"seed": i}) for i in numbers)
    for at, found in decoder.complete(with_seeds, num_slots=num_slots, **options):
        assert isinstance(found, Completion), found
        yield numbers[at], found


def _done(state: Path, key: list[Any]) -> dict[int, list[Any]]:
    """By prompt: the digest of its text, and numbers of tokens, rounds and accepted tokens."""
    lines = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    return {line[4]: line[5:] for line in lines if line[:4] == key}


def _prompts(decoder: Decoder, arguments: argparse.Namespace, *, is_chat: bool) -> list[list[int]]:
    turns = [json.loads(line)["turns"][0] for line in arguments.prompts.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(turns)
    texts = turns[: arguments.num_prompts]
    if is_chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        template = decoder.tokenizer.apply_chat_template
        texts = [template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [encode(decoder.tokenizer, text)[:_MOST_OF_PROMPT] for text in texts]


if __name__ == "__main__":
    main()
