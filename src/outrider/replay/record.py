"""Recording: the target alone answers many prompts, and its probabilities are kept.

The text is that of plain decoding. The probabilities come from one teacher-forced pass over it, under the same sampling
options; they equal those of the loop up to rounding (docs/numerics.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.decoder import Decoder
from outrider.options import DEFAULT_NUM_SLOTS, Sampling
from outrider.records import Chunk
from outrider.replay.log_format import Header, Record, TopProbs
from outrider.runtime.lm import LM
from outrider.sampling.probs import Settings, normalised, wide
from outrider.scoring.teacher_forcing import Text, force
from outrider.text.tokenizer import Prompt, fingerprint


def header_of(decoder: Decoder, options: dict[str, Any], num_probs: int | None, **more: Any) -> Header:
    """The header for the output of a decoder.

    Args:
        options: for ``Decoder.stream_many``, without a seed.
        more: the header's ``settings`` and ``provenance``.
    """
    return Header(
        target=decoder.target.name,
        sampling=Sampling(**options),
        num_probs=num_probs,
        vocab_size=decoder.target.vocab_size,
        context_len=decoder.target.context_len,
        eos_ids=tuple(sorted(decoder.eos_ids)),
        tokenizer=None if decoder.tokenizer is None else fingerprint(decoder.tokenizer),
        **more,
    )


def record_batch(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    labels: Sequence[tuple[int, str, str | None, int]],
    options: dict[str, Any],
    *,
    num_probs: int | None,
    num_slots: int = DEFAULT_NUM_SLOTS,
    on_done: Callable[[int], None] = lambda _: None,
) -> tuple[list[Record], bool]:
    """Records of some prompts.

    Args:
        decoder: without a draft.
        labels: index, text, category and seed of each prompt.
        options: for ``Decoder.stream_many``, without a seed.
        num_probs: N, None for no probabilities.
        num_slots: prompts at a time.
        on_done: told the number of rows just finished.

    Returns:
        The records, and whether Ctrl-C ended the work. If so, they are those of the finished rows, up to the first
        unfinished one.

    Raises:
        NumericsError: the target gave NaN or infinite logits.
    """
    chunks: list[list[Chunk]] = [[] for _ in prompts]
    is_interrupted = False
    try:
        seeds = [seed for *_, seed in labels]
        for chunk in decoder.stream_many(prompts, num_slots=num_slots, **options, seed=seeds):
            chunks[chunk.row].append(chunk)
            if chunk.finish_reason is not None:
                on_done(1)
    except KeyboardInterrupt:
        is_interrupted = True
    records = []
    for prompt, row_chunks, (index, text, category, seed) in zip(prompts, chunks, labels, strict=True):
        reason = row_chunks[-1].finish_reason if row_chunks else None
        if reason is None:
            break
        token_ids = tuple(i for chunk in row_chunks for i in chunk.token_ids)
        records.append(Record(index, text, category, seed, reason, tuple(decoder.encode(prompt)), token_ids))
    if num_probs is not None and records:
        sampling = Sampling(**options).with_ends(decoder.eos_ids)
        texts = [(record.prompt_ids, record.token_ids) for record in records]
        found = [
            probs
            for begin in range(0, len(texts), num_slots)
            for probs in top_probs(decoder.target, texts[begin : begin + num_slots], sampling, num_probs)
        ]
        records = [
            Record(r.index, r.prompt, r.category, r.seed, r.finish_reason, r.prompt_ids, r.token_ids, probs)
            for r, probs in zip(records, found, strict=True)
        ]
    return records, is_interrupted


def top_probs(
    target: LM, texts: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling, num_probs: int
) -> list[TopProbs]:
    """p at every token of the outputs.

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
        p = normalised(raw)
        top = p.topk(n, dim=-1)
        token = p.gather(1, chunk.ids[:, None])[:, 0]
        # Summed, not subtracted from 1: exactly 0 where top-k or top-p leaves nothing.
        tail = wide(p.scatter(1, top.indices, 0.0)).sum(dim=-1)
        kept = (token.to(raw.dtype), top.indices, top.values.to(raw.dtype), tail.to(raw.dtype))
        for row in sorted(set(chunk.rows.tolist())):
            parts[row].append(tuple(tensor[chunk.rows == row].cpu() for tensor in kept))
    return [TopProbs(*(torch.cat(columns) for columns in zip(*part, strict=True))) for part in parts]
