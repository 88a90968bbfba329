"""Rows of probabilities as the candidates that the loop's rules read on the CPU."""

import dataclasses

import torch
from torch import Tensor

from outrider.records import Draft, Verdict
from outrider.sampling.candidates import Candidates
from outrider.sampling.rules import Rule


def as_candidates(rows: Tensor, *, lists_all: bool = False) -> Candidates:
    """The same rows, which float32 must hold; of V weights without ids, as where nothing is filtered, if asked for.
    [..., V]"""
    table, owners = [], []
    for row in rows.reshape(-1, rows.shape[-1]).to(torch.float32):
        ids = row.nonzero().flatten().to(torch.int32)
        weights = row.clone() if lists_all else row[ids.long()]
        total = weights.double().sum().view(torch.long).item()
        table.append([0 if lists_all else ids.data_ptr(), weights.data_ptr(), len(weights), total])
        owners += [ids, weights]
    shape = (*rows.shape[:-1], 4)
    return Candidates(torch.tensor(table, dtype=torch.long).view(shape), rows.shape[-1], tuple(owners))


def on_candidates(rule: Rule, *, lists_all: bool = False) -> Rule:
    """The rule, given full rows, on candidates."""

    def rows_of(rows: Tensor) -> Candidates:
        return as_candidates(rows, lists_all=lists_all)

    def verify(target_probs: Tensor, draft: Draft, noise: object) -> Verdict:
        q = None if draft.probs is None else rows_of(draft.probs)
        return rule.verify(rows_of(target_probs), dataclasses.replace(draft, probs=q), noise)

    return Rule(rule.name, rule.make_noise, lambda rows, noise: rule.draw(rows_of(rows), noise), verify)
