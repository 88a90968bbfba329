"""Proposals of a model-free drafter at every place of existing texts, by its own code."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.base import Drafter, Rows
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.probs import Settings
from outrider.sampling.rules import Rule
from outrider.scoring.teacher_forcing import Text


def proposals(
    drafter: Drafter, texts: Sequence[Text], wanted: Sequence[Sequence[int]], rule: Rule, vocab_size: int
) -> list[list[list[int]]]:
    """The tokens proposed before each scored token of each text.

    One session follows all texts, a token per step: its work is that of generating them.

    Args:
        drafter: with a one-hot q.
        wanted: the most tokens to propose there.
    """
    most = max((num for one in wanted for num in one), default=0)
    ids = torch.zeros(len(texts), max(len(text.ids) for text in texts) + most, dtype=torch.long)
    for row, text in zip(ids, texts, strict=True):
        row[: text.num_given] = torch.tensor(text.ids[: text.num_given])
    session = drafter.open(len(texts), ids.shape[1], ids.device, most)
    settings = Settings.neutral(len(texts), ids.device)
    proposed: list[list[list[int]]] = [[] for _ in texts]
    for step in range(max(map(len, wanted))):
        for row, text in zip(ids, texts, strict=True):
            if 0 < step and text.num_given + step <= len(text.ids):
                row[text.num_given + step - 1] = text.ids[text.num_given + step - 1]
        here = [one[step] if step < len(one) else None for one in wanted]
        lengths = torch.tensor([min(text.num_given + step, len(text.ids)) for text in texts])
        k = max(num or 0 for num in here)
        rows = Rows(
            ids=ids,
            lengths=lengths,
            last_ids=ids.gather(1, torch.stack((lengths - 2, lengths - 1), dim=1).clamp_min(0)),
            num_wanted=torch.tensor([num or 0 for num in here]),
            settings=settings,
            history=NO_HISTORY,
            most_wanted=[num or 0 for num in here],
            longest=int(lengths.max()),
        )
        session.catch_up(rows)
        draft = session.propose(rows, k, rule, rule.make_noise(torch.zeros_like(lengths), lengths, k, vocab_size))
        assert draft.probs is None, "a draft that is looked up has a one-hot q"
        for row, num, drafted, num_drafted in zip(
            proposed, here, draft.ids.tolist(), draft.num_drafted.tolist(), strict=True
        ):
            if num is not None:
                row.append(drafted[:num_drafted])
    return proposed
