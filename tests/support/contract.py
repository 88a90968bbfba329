"""The contract of drafters: a forcing rule (outrider.measure.along) draws given tokens, some of them wrong, and commits
those of a given sequence, as many as were drafted right. So the real engine shows the draft and the q of a drafter at
any place of any sequence, after rounds of every kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from outrider.decoding.engine import decode
from outrider.decoding.schedule import Schedule
from outrider.drafters.base import Drafter, Rows, altered_drafter
from outrider.measure.along import GivenTokens, forcing_rule, table_of
from outrider.options import Sampling
from outrider.records import Draft, Request, Verdict
from outrider.runtime.lm import LM
from outrider.sampling.probs import full
from toys import InTurn

_MOST_K = 8


@dataclass
class Led:
    """Drafts by sequence and length at which the round began: K, tokens, and q [K, V] unless one-hot; and q as drawn
    from."""

    drafts: dict[tuple[int, int], tuple[int, list[int], Tensor | None]] = field(default_factory=dict)
    drawn: dict[tuple[int, int], list[Tensor]] = field(default_factory=dict)


def lead(
    target: LM,
    drafter: Drafter,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    schedule: int | Schedule,
    *,
    drawn: Sequence[Sequence[int]] | None = None,
    num_slots: int | None = None,
    constant_ks: Sequence[int | None] | None = None,
    **options: Any,
) -> Led:
    """Lead sequences, each a prompt and its continuation, through the engine; drafters draw ``drawn`` instead."""
    whole = [[*prompt, *rest] for prompt, rest in sequences]
    longest = max(map(len, whole)) + 2 * _MOST_K
    table, committed = (table_of(rows, longest, target.device) for rows in (whole if drawn is None else drawn, whole))
    led, given, wanted = Led(), list[Tensor](), list[int]()

    def note_k(rows: Rows, k: int, draft: Draft) -> Draft:
        wanted[:] = rows.num_wanted.tolist()
        return draft

    def draw(q: Tensor, tokens: Tensor) -> Tensor:
        given.append(full(q).clone())
        return tokens

    def verify(p: Tensor, draft: Draft, noise: GivenTokens) -> Verdict:
        for b, num in enumerate(draft.num_drafted.tolist()):
            if num > 0:
                key = int(noise.seeds[b]), int(noise.starts[b])
                q = None if draft.probs is None else full(draft.probs[b, :num]).clone()
                led.drafts[key] = wanted[b], draft.ids[b, :num].tolist(), q
                led.drawn[key] = [q[b] for q in given[:num]]
        given.clear()
        places = noise.starts[:, None] + torch.arange(draft.ids.shape[1] + 1)
        tokens = committed[noise.seeds[:, None], places]
        offsets = torch.arange(draft.ids.shape[1])
        is_right = (draft.ids == tokens[:, :-1]) & (offsets < draft.num_drafted[:, None])
        num = is_right.long().cumprod(dim=1).sum(dim=1)
        probs = torch.zeros(*draft.ids.shape, 2, dtype=torch.float64)
        return Verdict(num, tokens.gather(1, num[:, None]).squeeze(1), probs)

    rule = forcing_rule(table, verify, draw)
    requests = [
        Request(
            list(prompt),
            Sampling(seed=i, max_new_tokens=len(rest), **options),
            num_draft_tokens=None if constant_ks is None else constant_ks[i],
            drafts_beyond_end=True,
        )
        for i, (prompt, rest) in enumerate(sequences)
    ]
    noted = altered_drafter(drafter, drafter.name, note_k)
    for round_ in decode(target, noted, requests, rule, num_draft_tokens=schedule, num_slots=num_slots):
        assert all(row.error is None for row in round_.rows)
    return led


def check_no_look_ahead(target: LM, drafter: Drafter, prompt: Sequence[int], vocab_size: int, k: int) -> None:
    """Force every draft of k tokens: tokens and their q are functions of the tokens before alone."""
    paths = list(product(range(vocab_size), repeat=k))
    led = lead(target, drafter, [(prompt, path) for path in paths], k)
    by_beginning: dict[tuple[int, ...], list[Tensor | None]] = {}
    for i, path in enumerate(paths):
        _, ids, q = led.drafts.get((i, len(prompt)), (k, [], None))
        # Not those that were looked up; a hybrid reports them with a one-hot q.
        is_drawn = q is not None and led.drawn[i, len(prompt)] != []
        assert not is_drawn or ids == [*path[: len(ids)]], "it is not drawn by the rule"
        assert is_drawn or q is None or bool((q[range(len(ids)), ids] == 1).all())
        for offset in range(k):
            is_reached = len(ids) >= offset and (is_drawn or ids[:offset] == [*path[:offset]])
            if not is_reached:
                continue
            here = None
            if len(ids) > offset:
                here = torch.tensor(ids[offset]) if q is None else q[offset]
                if is_drawn:
                    assert torch.equal(here, led.drawn[i, len(prompt)][offset]), "it is drawn from another q"
                    assert abs(float(here.sum()) - 1) < 1e-6, "q does not sum to 1"
            by_beginning.setdefault(path[:offset], []).append(here)
    assert by_beginning, "nothing was drafted"
    for beginning, found in by_beginning.items():
        first = found[0]
        for other in found[1:]:
            assert (first is None) == (other is None), f"after {beginning}, whether it drafts depends on later tokens"
            assert first is None or torch.allclose(first, other, rtol=0, atol=1e-12), f"q after {beginning} differs"


def check_state(
    target: LM,
    drafter: Drafter,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    k: int,
    *,
    atol: float = 1e-12,
) -> None:
    """Drafts are a function of the sequence: those of an engine that has just read the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for prompt, rest in sequences:
        is_wrong = torch.rand(len(prompt) + len(rest), generator=generator) < 0.25
        drawn.append(
            [(i + wrong) % target.vocab_size for i, wrong in zip([*prompt, *rest], is_wrong.tolist(), strict=True)]
        )
    num = len(sequences)

    @cache
    def fresh(i: int, length: int, own_k: int) -> Led:
        whole = [*sequences[i][0], *sequences[i][1]]
        return lead(target, drafter, [(whole[:length], whole[length : length + 1])], own_k, drawn=[drawn[i]])

    for schedule, num_slots, ks in (
        (InTurn(k, 0, 2, 0, 0, 0, 0, 0, k, 1), 2, None),
        (InTurn(0, 0, 0, k, k, 0, 1), 3, None),
        (InTurn(k, 0, k), num, [1 + i % k for i in range(num)]),
        (k, 1, None),
    ):
        led = lead(target, drafter, sequences, schedule, drawn=drawn, num_slots=num_slots, constant_ks=ks)
        assert len(led.drafts) > num, "too little was drafted"
        for (i, length), (own_k, ids, q) in led.drafts.items():
            if length >= len(drawn[i]):
                continue
            _, want_ids, want_q = fresh(i, length, own_k).drafts.get((0, length), (own_k, [], None))
            assert ids == want_ids, f"{i} at {length}, K = {own_k}: {ids} is drafted, not {want_ids}"
            if q is not None and want_q is not None:
                error = float((q - want_q).abs().max())
                assert error <= atol, f"{i} at {length}: q is off by {error:.2g}"
