"""Texts of toy targets, as records in memory."""

from collections.abc import Sequence

from outrider.drafters.base import NO_DRAFTER
from outrider.measure.log import Header, Record, token_probs
from outrider.measure.teacher_forcing import Text
from outrider.options import Sampling
from outrider.runtime.lm import LM
from outrider.sampling.rules import REJECTION
from toys import StopAt, request, run

EOS = 5


def header_of(target: LM, *, has_probs: bool = False, **options: object) -> Header:
    return Header("target", Sampling(**options), has_probs, target.vocab_size, target.context_len, (EOS,), None)


def written(
    target: LM, prompts: Sequence[Sequence[int]], *, has_probs: bool = False, seed: int = 0, **options: object
) -> tuple[Header, list[Record]]:
    """What the loop writes without a draft; a text ends at token 5."""
    requests = [request(ids, StopAt(EOS), seed + i, **options) for i, ids in enumerate(prompts)]
    outputs = run(target, NO_DRAFTER, requests, REJECTION, 0)
    pairs = [(tuple(ids), output.token_ids) for ids, output in zip(prompts, outputs, strict=True)]
    texts = [Text((*ids, *token_ids), len(ids)) for ids, token_ids in pairs]
    probs = map(tuple, token_probs(target, texts, Sampling(**options))) if has_probs else [None] * len(prompts)
    records = [
        Record(i, None, seed + i, output.finish_reason, *pair, some)
        for i, (output, pair, some) in enumerate(zip(outputs, pairs, probs, strict=True))
    ]
    return header_of(target, has_probs=has_probs, **options), records
