"""Rows of probabilities as the candidates that the loop's rules read on the CPU."""

import dataclasses

import torch
from torch import Tensor

from outrider.records import Draft, Verdict
from outrider.sampling.candidates import CandidateBuffers, Candidates
from outrider.sampling.rules import Rule


def as_candidates(rows: Tensor, buffers: CandidateBuffers, *, lists_all: bool = False) -> Candidates:
    """The same rows, which float32 must hold; if asked for, of V weights without ids. [..., V]"""
    flat = rows.reshape(-1, rows.shape[-1]).to(torch.float32)
    made, _ = buffers.of_logits(torch.zeros_like(flat)[None], torch.ones(1))  # V weights of each
    for number, row in zip(made.index[0].tolist(), flat, strict=True):
        start, ids = int(buffers.starts[number]), row.nonzero().flatten()
        weights = row if lists_all else row[ids]
        buffers.weights[start : start + len(weights)] = weights
        if not lists_all:
            buffers.ids[start : start + len(ids)] = ids
            buffers.counts[number] = len(ids)
        buffers.sums[number] = weights.double().sum()
    return Candidates(buffers, made.index.view(rows.shape[:-1]))


def on_candidates(rule: Rule, *, lists_all: bool = False) -> Rule:
    """The rule, given full rows, on candidates."""

    def draw(rows: Tensor, noise: object) -> Tensor:
        return rule.draw(as_candidates(rows, CandidateBuffers(rows.shape[-1]), lists_all=lists_all), noise)

    def verify(target_probs: Tensor, draft: Draft, noise: object) -> Verdict:
        buffers = CandidateBuffers(target_probs.shape[-1])
        p, q = (
            None if rows is None else as_candidates(rows, buffers, lists_all=lists_all)
            for rows in (target_probs, draft.probs)
        )
        return rule.verify(p, dataclasses.replace(draft, probs=q), noise)

    return Rule(rule.name, rule.make_noise, draw, verify)
