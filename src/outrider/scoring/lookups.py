"""Proposals of a model-free drafter at every position of existing texts, by its own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.drafters.base import Drafter, Rows
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule

_BATCH_SIZE = 256  # prefixes; bounds the memory


def proposals(
    drafter: Drafter, prefixes: Sequence[Sequence[int]], wanted: Sequence[int], rule: Rule, vocab_size: int
) -> Iterator[list[int]]:
    """The tokens proposed after each prefix, at most ``wanted`` of them.

    Args:
        drafter: with a one-hot q.
    """
    for begin in range(0, len(prefixes), _BATCH_SIZE):
        part, num_wanted = prefixes[begin : begin + _BATCH_SIZE], wanted[begin : begin + _BATCH_SIZE]
        k = max(num_wanted)
        lengths = torch.tensor([len(ids) for ids in part])
        ids = torch.zeros(len(part), max(map(len, part)) + k, dtype=torch.long)
        for row, prefix in zip(ids, part, strict=True):
            row[: len(prefix)] = torch.tensor(prefix)
        rows = Rows(
            ids=ids,
            lengths=lengths,
            last_ids=ids.gather(1, torch.stack((lengths - 2, lengths - 1), dim=1).clamp_min(0)),
            num_wanted=torch.tensor(num_wanted),
            settings=Settings.neutral(len(part), ids.device),
            history=NO_HISTORY,
            most_wanted=num_wanted,
            longest=max(map(len, part)),
        )
        noise = rule.make_noise(torch.zeros_like(lengths), lengths, k, vocab_size)
        draft = drafter.open(len(part), ids.shape[1], ids.device).propose(rows, k, rule, noise)
        assert draft.probs is None, "a draft that is looked up has a one-hot q"
        for ids, num_drafted in zip(draft.ids.tolist(), draft.num_drafted.tolist(), strict=True):
            yield ids[:num_drafted]
