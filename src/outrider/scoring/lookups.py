"""What a drafter without a model would have proposed in texts that are there already, by its own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from outrider.decoding.batch import Batch
from outrider.drafters.base import Drafter
from outrider.options import Sampling
from outrider.records import Request
from outrider.sampling.rules import Rule

_AT_ONCE = 256  # prefixes in one batch; bounds the memory


def proposals(
    drafter: Drafter, prefixes: Sequence[Sequence[int]], wanted: Sequence[int], rule: Rule, vocab_size: int
) -> Iterator[list[int]]:
    """The tokens proposed after each prefix, at most ``wanted`` of them.

    Args:
        drafter: whose q is one-hot.
    """
    for begin in range(0, len(prefixes), _AT_ONCE):
        part, num_wanted = prefixes[begin : begin + _AT_ONCE], wanted[begin : begin + _AT_ONCE]
        k = max(num_wanted)
        batch = Batch(
            # A round adds one token to those that it drafts.
            [Request(ids, Sampling(max_new_tokens=n + 1, seed=0)) for ids, n in zip(part, num_wanted, strict=True)],
            vocab_size=vocab_size,
            context_len=max(map(len, part)) + k + 1,
            device=torch.device("cpu"),
            k=k,
        )
        noise = rule.make_noise(batch.seeds, batch.lengths, k, vocab_size)
        draft = drafter.open(batch).propose(batch, k, rule, noise)
        assert draft.probs is None, "a draft that is looked up has a one-hot q"
        for ids, num_drafted in zip(draft.ids.tolist(), draft.num_drafted.tolist(), strict=True):
            yield ids[:num_drafted]
