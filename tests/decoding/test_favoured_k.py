"""The K that adaptive schedules choose from: those of the execution and those of the drafter."""

from dataclasses import replace
from pathlib import Path

import pytest

from block_heads import block_drafter
from compile_services import OnCall
from outrider.compile.compiled_lm import compiled_lm
from outrider.decoder import Decoder
from outrider.decoding import cost_cache
from outrider.decoding.cost_cache import round_costs
from outrider.decoding.measured_costs import MeasuredCosts, favoured_ks
from outrider.drafters.base import AlteredDrafter, Drafter, NoDrafter
from outrider.drafters.hybrid import HybridDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES
from toys import as_lm, measured, tiny_llama

EAGER, COMPILED = {0, 1, 2, 3, 4, 6, 8}, {0, 2, 4}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outrider" / "costs"


def _block(size: int) -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(num_layers=4), "target")
    return target, block_drafter(target, block_size=size)


def test_a_drafter_adds_its_own() -> None:
    """The whole block, and half of a large one; none beyond what the drafter can draft. One or two more when compiled,
    where each K takes programs."""
    for size, of_eager, of_compiled in (
        (17, EAGER | {16}, {0, 2, 4, 8, 16}),
        (16, EAGER | {7, 15}, {0, 2, 4, 7, 15}),
        (8, {0, 1, 2, 3, 4, 6, 7}, {0, 2, 4, 7}),
        (4, {0, 1, 2, 3}, {0, 2, 3}),
    ):
        target, drafter = _block(size)
        compiled = compiled_lm(target, service=OnCall())  # type: ignore[arg-type]
        assert set(favoured_ks(target, drafter)) == of_eager and set(favoured_ks(compiled, drafter)) == of_compiled
    draft = as_lm(tiny_llama(), "draft")
    at_once = ModelDrafter(draft, mask_id=59)
    beside = HybridDrafter(SuffixDrafter(None), at_once, 60)
    for one in (at_once, beside, AlteredDrafter(at_once, "altered", lambda rows, k, draft: draft)):
        assert favoured_ks(draft, one) == (0, 1, 2, 3, 4, 6, 7, 8, 15)
    assert set(favoured_ks(draft, ModelDrafter(draft))) == EAGER and favoured_ks(draft, NoDrafter()) == (0,)


def test_auto_drafts_a_whole_block_where_it_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds with drafts take equally long, and plain ones far longer. (Times are made up.) With a seed K is 4."""

    def made_up(target: LM, drafter: Drafter, *_: object) -> MeasuredCosts:
        return measured({k: 0.01 if k else 0.1 for k in favoured_ks(target, drafter)})

    monkeypatch.setattr(cost_cache, "measure_round_costs", made_up)
    target, drafter = _block(16)
    decoder = Decoder(target, None, frozenset(), drafter, num_draft_tokens="auto")
    free, seeded = (next(decoder.stream([1, 2, 3], max_new_tokens=40, seed=seed)) for seed in (None, 1))
    assert (free.stats.num_draft_tokens, seeded.stats.num_draft_tokens) == (15, 4)


def test_costs_of_another_set_of_k_are_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters of one name, one of which drafts in one forward: neither takes the other's file away."""
    asked: list[Drafter] = []

    def made_up(target: LM, drafter: Drafter, *_: object) -> MeasuredCosts:
        asked.append(drafter)
        return measured({k: 1.0 + k for k in favoured_ks(target, drafter)})

    monkeypatch.setattr(cost_cache, "measure_round_costs", made_up)
    target, one = as_lm(tiny_llama(), "target"), ModelDrafter(as_lm(tiny_llama(), "draft"))
    both = [one, replace(one, mask_id=59)]
    for drafter in both * 2:
        assert tuple(round_costs(target, drafter, RULES["block"], 1, 60)) == favoured_ks(target, drafter)
    assert asked == both and len(list(folder.iterdir())) == 2
