"""The law of rounds where p and q depend on the whole text. (For Markov chains: enumeration.py.)"""

import itertools
from collections.abc import Callable

import torch

from outrider.options import Sampling
from outrider.records import Constraint, Draft
from outrider.sampling.history import NO_HISTORY
from outrider.sampling.masks import Masks
from outrider.sampling.noise import RoundUniforms
from outrider.sampling.probs import Settings, to_probs
from outrider.sampling.rules import Rule
from reference import LENGTHS, RESTS, THRESHOLDS, Law, accept_branches, cells


def round_law(
    rule: Rule,
    k: int,
    tables: tuple[torch.Tensor, torch.Tensor],
    prompt: tuple[int, ...],
    sampling: Sampling,
    output: tuple[int, ...],
    constraint: Callable[[], Constraint] | None = None,
) -> Law:
    """What a round commits after this output; ``tables`` are logits of target and draft, by the token before."""
    target, draft_table = tables
    vocab_size = len(target)
    settings = Settings.of([sampling], vocab_size, target.device)
    begin = settings.with_room(NO_HISTORY, 1, vocab_size)
    begin.begin(0, torch.tensor([*prompt, *output]), len(prompt))
    last = (*prompt, *output)[-1]
    held = None
    if constraint is not None:
        held = constraint()
        assert all(map(held.push, output))
    law: Law = {}
    for ids in itertools.product(range(vocab_size), repeat=k):
        masks = Masks([held], vocab_size, target.device)
        history, q, weight = begin, [], 1.0
        for before, x in zip((last, *ids), ids, strict=False):
            here = history.map(lambda values: values[:, None])
            row = to_probs(draft_table[before][None, None], settings, here, masks.here())[0, 0]
            q.append(row.tolist())
            weight *= q[-1][x]
            history = history.then(torch.tensor([x]))
            masks.push(torch.tensor([x]), torch.tensor([1]))
        draft = Draft(
            torch.tensor([ids], dtype=torch.long),
            torch.tensor([q], dtype=torch.float64).view(1, k, vocab_size),
            torch.tensor([k]),
        )
        allowed = masks.along(draft)
        if weight == 0:
            continue
        p_rows = to_probs(target[[last, *ids]][None], settings, begin.along(draft.ids), allowed)
        p = p_rows[0].tolist()
        thresholds = THRESHOLDS[rule.name](p, q, ids)
        for accept, coin_weight in accept_branches(thresholds):
            if coin_weight < 1e-14:  # a threshold of 1, but for rounding: then nothing may be left to draw from
                continue
            length = LENGTHS[rule.name](thresholds, accept)
            for _, low, high in cells(RESTS[rule.name](p, q, ids, length)):
                coins, uniform = torch.tensor([accept], dtype=torch.float64), torch.tensor([(low + high) / 2]).double()
                verdict = rule.verify(p_rows, draft, RoundUniforms.of(torch.zeros(1, k), coins.view(1, k), uniform))
                committed = (*ids[: int(verdict.num_accepted)], int(verdict.next_ids))
                law[committed] = law.get(committed, 0.0) + weight * coin_weight * (high - low)
    return law
