"""Drafters whose q is known in rounds only: it depends on where the round began, or on the target's hidden states."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import Drafter, DraftSession, Prefill, Rows, VerifyResult
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.probs import to_probs
from outrider.sampling.rules import Rule
from toys import table_lm

HEAD_FEATURES = (1, 2)  # of a target with two layers: the input of the second, and the last hidden state


def _drawn(rows: Rows, k: int, rule: Rule, noise: Any, logits_at: Callable[[int, Tensor], Tensor]) -> Draft:
    """Draw K tokens, of which ``logits_at`` takes an offset and the tokens before it. [B] -> [B, V]"""
    ids, probs, history = [rows.last_ids[:, -1]], [], rows.history
    for i in range(k):
        logits = logits_at(i, ids[-1])[:, None]
        probs.append(to_probs(logits, rows.settings, history.map(lambda values: values[:, None]))[:, 0])
        ids.append(rule.draw(probs[-1], noise.at(i)))
        history = history.then(ids[-1])
    return Draft(torch.stack(ids[1:], dim=1), torch.stack(probs, dim=1), rows.num_wanted)


class _TableSession(DraftSession):
    """A Markov chain for the first token of a round, and another for the rest."""

    def __init__(self, models: tuple[LM, ...], num_slots: int, capacity: int, *_: Any) -> None:
        self.tables = [lm.model.table for lm in models]

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        return _drawn(rows, k, rule, noise, lambda i, last: self.tables[min(i, 1)][last])


def two_tables(first: Tensor, later: Tensor) -> Drafter:
    return Drafter("two tables", _TableSession, (table_lm(first), table_lm(later)))


class _ParallelSession(DraftSession):
    """Reads the sequence and K - 1 mask tokens in one forward, anew in each round. The mask is the last token."""

    def __init__(self, models: tuple[LM, ...], num_slots: int, capacity: int, *_: Any) -> None:
        (self.lm,) = models
        self.capacity = capacity

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        lm, width = self.lm, rows.longest
        positions = rows.lengths[:, None] - width + torch.arange(width + k - 1)  # [B, T]
        ids = rows.ids.gather(1, positions[:, :width].clamp_min(0))
        ids = torch.cat((ids, torch.full((len(rows), k - 1), lm.vocab_size - 1)), dim=1)
        cache = lm.new_cache(len(rows), self.capacity + k)
        logits = lm.forward(ids, positions.clamp_min(-1), cache, lm.view_len(width + k, cache), num_logits=k)
        return _drawn(rows, k, rule, noise, lambda i, last: logits[:, i])


def parallel(lm: LM) -> Drafter:
    return Drafter("parallel", _ParallelSession, (lm,))


class _HeadSession(DraftSession):
    """A linear map of the target's hidden states and the last token, whose sign turns after the first. [F + V, V]"""

    def __init__(self, weights: Tensor, num_slots: int, capacity: int) -> None:
        self.of_state, self.of_token = weights[: -weights.shape[1]], weights[-weights.shape[1] :]
        # The last place takes padding, and is read where there is no state yet.
        self.states = torch.zeros(num_slots, capacity + 1, len(self.of_state), dtype=torch.float64)

    def propose(self, rows: Rows, k: int, rule: Rule, noise: Any) -> Draft:
        state = self.states[torch.arange(len(rows)), rows.lengths - 2] @ self.of_state  # [B, V]
        return _drawn(rows, k, rule, noise, lambda i, last: (state if i == 0 else -state) + self.of_token[last])

    def assign(self, slot: int, source: int | None, num_tokens: int) -> None:
        if source is None:
            self.states[slot, num_tokens:] = 0
        else:
            self.states[slot, :num_tokens] = self.states[source, :num_tokens].clone()

    def prefill(self, chunk: Prefill) -> None:
        if chunk.features is None:  # nothing was fed
            return
        for row, (start, end) in enumerate(zip(chunk.starts, chunk.ends, strict=True)):
            self.states[chunk.first_slot + row, start:end] = chunk.features[row, : end - start]

    def observe(self, result: VerifyResult) -> None:
        assert result.features is not None
        num_rows, num_columns, _ = result.features.shape
        columns = torch.arange(num_columns)
        is_valid = result.old_lengths[:, None] + columns < result.lengths[:, None]
        places = torch.where(is_valid, result.old_lengths[:, None] - 1 + columns, self.states.shape[1] - 1)
        self.states[torch.arange(num_rows)[:, None], places] = result.features
        self.states[:, -1] = 0


def head(target: LM) -> Drafter:
    """Reads features of a target, to which it is fitted: its logits along random sequences, by least squares."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(target.vocab_size, (200, 12), generator=generator)
    cache = target.new_cache(*ids.shape)
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    view_len = target.view_len(ids.shape[1], cache)
    with torch.inference_mode():
        logits, states = target.forward_with_features(ids, positions, cache, view_len, HEAD_FEATURES)
    assert states is not None
    tokens = torch.nn.functional.one_hot(ids[:, 1:], target.vocab_size).double()
    x = torch.cat((states[:, :-1], tokens), dim=-1).flatten(0, 1)
    squares = x.T @ x + torch.eye(x.shape[1], dtype=x.dtype)
    weights = torch.linalg.solve(squares, x.T @ logits[:, 1:].flatten(0, 1)).clone()
    return Drafter("head", lambda models, *sizes: _HeadSession(weights, *sizes[:2]), features=HEAD_FEATURES)
