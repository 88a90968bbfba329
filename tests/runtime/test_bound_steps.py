"""A step that is bound gives what it gives without: whatever argument changes, in place or for another."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.records import Draft
from outrider.runtime.cache import SlotCache
from outrider.runtime.cuda_graphs import CapturedExecution
from outrider.runtime.lm import LM
from toys import as_lm, tiny_llama


def _sums(lm: LM, factor: int, cache: SlotCache, values: Tensor, draft: Draft, more: Tensor | None) -> tuple[Tensor]:
    total = cache.storage[0].sum() + values.sum() + draft.ids.sum() + draft.num_drafted.sum()
    return (factor * (total if more is None else total + more.sum()),)


@pytest.fixture
def lm() -> LM:
    lm = as_lm(tiny_llama())
    lm.execution = CapturedExecution()
    return lm


def test_bound_steps_see_every_change(lm: LM) -> None:
    run, table = lm.bind(_sums), torch.arange(12.0).view(3, 4)
    draft = Draft(torch.ones(1, 2, dtype=torch.long), None, torch.tensor([2]))
    caches = [lm.new_cache(1, 100), lm.new_cache(1, 100)]
    caches[1].storage[0].fill_(1.0)
    whole, strided, more = table[0], table[:, 1], torch.ones(5)  # the second is not contiguous: it is copied

    def check(factor: int, *arguments: Any) -> None:
        (got,) = run((factor,), *arguments)
        assert got.item() == _sums(lm, factor, *arguments)[0].item()

    for values in (whole, strided, whole, whole[:2]):
        for one in (draft, replace(draft, ids=draft.ids + 3), replace(draft, ids=draft.ids[:, :1])):
            for cache in caches:
                for extra in (None, more, more[:2]):
                    for factor in (1, 2, 2):
                        check(factor, cache, values, one, extra)
                        table += 1.0
                        cache.storage[0][0, 0] += 1.0
                        check(factor, cache, values, one, extra)


def test_a_bound_step_takes_apart_what_has_changed_alone(lm: LM, monkeypatch: pytest.MonkeyPatch) -> None:
    import outrider.runtime.calls as calls

    run, cache, values = lm.bind(_sums), lm.new_cache(1, 100), torch.ones(3)
    drafts = [Draft(torch.full((1, 2), i), None, torch.tensor([2])) for i in range(3)]
    run((1,), cache, values, drafts[0], values)
    taken: list[Any] = []
    take_apart = calls._take_apart

    def note(given: Any, parts: Any) -> None:
        taken.extend(given)
        take_apart(given, parts)

    monkeypatch.setattr(calls, "_take_apart", note)
    for draft in drafts:
        run((1,), cache, values, draft, values)
    assert not any(value is values for value in taken)
    assert all(any(value is draft for value in taken) for draft in drafts[1:])
    assert lm.execution.num_programs == 1  # type: ignore[attr-defined]
