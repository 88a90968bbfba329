"""Outputs of the target for many prompts, with its probabilities.

The outputs come from plain decoding. The probabilities come from one teacher-forced pass over them, with the same
sampling options; they equal those of the loop up to rounding (docs/internals/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.decoder import Decoder
from outrider.errors import OutriderError
from outrider.options import DEFAULT_NUM_SLOTS, Sampling
from outrider.replay.log import Header, Record, TopProbs
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalise, wide
from outrider.scoring.teacher_forcing import Text, force
from outrider.text.tokenizer import fingerprint


def model_json(decoder: Decoder) -> dict[str, Any]:
    """Fields about the target, for a line of a log."""
    return {
        "name": decoder.target.name,
        "vocab_size": decoder.target.vocab_size,
        "context_len": decoder.target.context_len,
        "eos_ids": sorted(decoder.eos_ids),
        "tokenizer": None if decoder.tokenizer is None else fingerprint(decoder.tokenizer),
    }


def header_of(decoder: Decoder, options: dict[str, Any], num_probs: int | None) -> Header:
    """Header for the outputs of a decoder.

    Args:
        options: fields of ``Sampling``; the seed is left out.
    """
    model, sampling = model_json(decoder), Sampling(**options | {"seed": None})
    return Header(
        model["name"],
        sampling,
        num_probs,
        model["vocab_size"],
        model["context_len"],
        tuple(model["eos_ids"]),
        model["tokenizer"],
    )


def record_outputs(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    options: dict[str, Any],
    *,
    num_probs: int | None,
    categories: Sequence[str | None] | None = None,
    num_slots: int = DEFAULT_NUM_SLOTS,
    on_done: Callable[[int], None] = lambda _: None,
) -> list[Record]:
    """Generate and record the outputs for some prompts.

    Args:
        decoder: without a draft.
        options: fields of ``Sampling``; prompt i has the given seed + i.
        num_probs: N; None for no probabilities.
        categories: of the prompts.
        num_slots: prompts that run concurrently.
        on_done: called with the number of rows just finished.

    Raises:
        NumericsError: the target returned NaN or infinite logits.
    """
    records: dict[int, Record] = {}
    for index, done in decoder.complete(prompts, Sampling(**options), num_slots=num_slots):
        if isinstance(done, OutriderError):
            raise done
        assert done.finish_reason is not None
        category = None if categories is None else categories[index]
        given = tuple(prompts[index]), tuple(done.token_ids)
        records[index] = Record(index, category, done.seed, done.finish_reason, *given)
        on_done(1)
    ordered = [records[index] for index in range(len(prompts))]
    if num_probs is None:
        return ordered
    sampling = Sampling(**options).with_ends(decoder.eos_ids)
    texts = [(record.prompt_ids, record.token_ids) for record in ordered]
    found = [
        probs
        for begin in range(0, len(texts), num_slots)
        for probs in top_probs(decoder.target, texts[begin : begin + num_slots], sampling, num_probs)
    ]
    return [replace(record, probs=probs) for record, probs in zip(ordered, found, strict=True)]


def top_probs(
    target: LM, texts: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling, num_probs: int
) -> list[TopProbs]:
    """Compute p at every token of the outputs.

    Args:
        texts: prompt and output of each.
        num_probs: N, at most V.
    """
    n = min(num_probs, target.vocab_size)
    settings = Settings.of([sampling], target.vocab_size, target.device)
    parts: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in texts]
    forced = [Text((*prompt_ids, *token_ids), len(prompt_ids)) for prompt_ids, token_ids in texts]
    for chunk in force(target, forced, [settings]):
        raw = chunk.probs(settings)
        p = normalise(raw)
        top = p.topk(n, dim=-1)
        token = p.gather(1, chunk.ids[:, None])[:, 0]
        # Summed, not 1 - sum: exactly 0 where top-k or top-p leaves nothing.
        tail = wide(p.scatter(1, top.indices, 0.0)).sum(dim=-1)
        kept = (token.to(raw.dtype), top.indices, top.values.to(raw.dtype), tail.to(raw.dtype))
        for row in sorted(set(chunk.rows.tolist())):
            parts[row].append(tuple(tensor[chunk.rows == row].cpu() for tensor in kept))
    return [TopProbs(*(torch.cat(columns) for columns in zip(*part, strict=True))) for part in parts]
