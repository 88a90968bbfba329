"""All that can happen in a round, put through the real rule. The text of a Markov chain is summed up by its last token,
so that rounds are few. The slow twins of reference.py say where the uniform numbers of each case lie, and how probable
it is: just inside the case, so that a threshold that is off by 1e-9 shows as well."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.records import Draft
from outrider.sampling.noise import RoundUniforms
from outrider.sampling.rules import Rule
from reference import LENGTHS, RESTS, THRESHOLDS, Law, Probs, accept_branches, cells, draft_paths

Table = Sequence[Probs]


@dataclass(frozen=True)
class Case:
    """One way a round may go."""

    last: int
    ids: tuple[int, ...]
    accept: list[float]
    next: float
    weight: float


@dataclass(frozen=True)
class Outcome:
    """What the rule made of a case."""

    case: Case
    num_accepted: int
    committed: tuple[int, ...]


def _drafted_from(draft: Table, later: Table | None, last: int, ids: Sequence[int]) -> list[Probs]:
    """q of each drafted token."""
    tables = [draft, *[later or draft] * len(ids)]
    return [table[x] for table, x in zip(tables, (last, *ids[:-1]), strict=False)][: len(ids)]


def list_cases(
    name: str, target: Table, draft: Table, num_drafted: Sequence[int], later: Table | None = None
) -> list[Case]:
    """The cases of rounds that draft so many tokens, after each token of the vocabulary."""
    found = []
    for last in range(len(target)):
        for n in num_drafted:
            for ids, path_weight in draft_paths(last, draft, n, later):
                q = _drafted_from(draft, later, last, ids)
                p = [target[x] for x in (last, *ids)]
                for accept, coin_weight in accept_branches(THRESHOLDS[name](p, q, ids)):
                    length = LENGTHS[name](THRESHOLDS[name](p, q, ids), accept)
                    for _, low, high in cells(RESTS[name](p, q, ids, length)):
                        margin = min(1e-9, (high - low) / 4)
                        weight = path_weight * coin_weight * (high - low) / 3
                        for u in (low + margin, (low + high) / 2, high - margin):
                            found.append(Case(last, ids, accept, u, weight))
    return found


def outcomes(
    rule: Rule, name: str, target: Table, draft: Table, num_drafted: Sequence[int], later: Table | None = None
) -> list[Outcome]:
    """All cases through ``rule``: those of the thresholds of the rule ``name``. Padding is rubbish."""
    cases = list_cases(name, target, draft, num_drafted, later)
    k, vocab_size = max(num_drafted), len(target)
    p_rows = [[target[x] for x in _pad((case.last, *case.ids), k + 1)] for case in cases]
    q_rows = [_drafted_from(draft, later, case.last, case.ids) + _rubbish(k, case) for case in cases]
    is_one_hot = all(max(row) == 1.0 for row in draft)
    made = Draft(
        ids=torch.tensor([_pad(case.ids, k) for case in cases], dtype=torch.long).view(-1, k),
        probs=None if is_one_hot else _float64(q_rows).view(-1, k, vocab_size),
        num_drafted=torch.tensor([len(case.ids) for case in cases]),
    )
    noise = RoundUniforms.of(
        draft=torch.full((len(cases), k), torch.nan),
        accept=_float64([case.accept + [0.0] * (k - len(case.ids)) for case in cases]).view(-1, k),
        next=_float64([case.next for case in cases]),
    )
    verdict = rule.verify(_float64(p_rows), made, noise)
    lengths, next_ids = verdict.num_accepted.tolist(), verdict.next_ids.tolist()
    return [Outcome(c, n, (*c.ids[:n], x)) for c, n, x in zip(cases, lengths, next_ids, strict=True)]


def _float64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def _pad(ids: tuple[int, ...], length: int) -> list[int]:
    return [*ids, *[0] * (length - len(ids))]


def _rubbish(k: int, case: Case) -> list[Probs]:
    """Rows of q that were never drafted from: they make the padding (token 0) look worth accepting, or not."""
    row = [[0.0, 0.5, 0.5], [1e-9, 0.5, 0.5], [1.0, 0.0, 0.0]][case.last % 3]
    return [row] * (k - len(case.ids))


def round_laws(found: Sequence[Outcome]) -> dict[tuple[int, int], Law]:
    """(last token, number drafted) -> law of what the round commits."""
    laws: dict[tuple[int, int], Law] = defaultdict(lambda: defaultdict(float))
    for outcome in found:
        laws[outcome.case.last, len(outcome.case.ids)][outcome.committed] += outcome.case.weight
    return laws
