"""Constrained rows: their law is the target's masked law, whatever the drafter, K, the rule and the neighbours."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import scipy.stats
import torch

from languages import Remainders, letters_tokenizer, masked_law
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import NumericsError
from outrider.options import Sampling
from outrider.records import Draft, Request
from outrider.runtime.lm import LM
from outrider.sampling.masks import Masks
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, RULES, Rule
from outrider.text.structure import Structure
from reference import Law, law_distance, rounds_law
from round_laws import round_law
from toys import StopAt, llama_pair, random_table, request, table_lm, table_pair, tokens

pytestmark = pytest.mark.each_execution

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
PIECES = ("a", "b", "ab", "c", "ba", "<end>")
END = len(PIECES) - 1
REGEX = "a(b|ab){1,2}c?"
MIDDLES = [("b",), ("ab",), *itertools.product(["b", "ab"], repeat=2)]
LANGUAGE = {"a" + "".join(middle) + end for middle in MIDDLES for end in ("", "c")}
TABLES = random_table(len(PIECES), 0, 1.5), random_table(len(PIECES), 1)
NUM_SEEDS = 1500
FALSE_ALARM = 1e-6


def structure() -> Structure:
    return Structure(Sampling(regex=REGEX), _tokenizer(), len(PIECES), frozenset({END}))


@cache
def _tokenizer() -> object:
    return letters_tokenizer(PIECES)


def _constrained(one: Request, vocab_size: int) -> Request:
    return replace(one, constraint=Remainders(vocab_size))


def _requests(vocab_size: int, num_tokens: int = 16, **options: object) -> list[Request]:
    """Constrained ones, and one that is not among them."""
    plain = [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(PROMPTS * 2)]
    return [one if i == 2 else _constrained(one, vocab_size) for i, one in enumerate(plain)]


@pytest.fixture(scope="module", params=["table", "llama"])
def pair(request: pytest.FixtureRequest, _execution: None) -> tuple[LM, ModelDrafter]:
    return table_pair(8) if request.param == "table" else llama_pair()


@pytest.fixture(scope="module", params=[{"temperature": 0.0}, {"top_k": 5, "frequency_penalty": 0.5}], ids=str)
def plain(
    request: pytest.FixtureRequest, pair: tuple[LM, ModelDrafter]
) -> tuple[dict[str, float], list[tuple[int, ...]]]:
    """Options, and the texts of plain decoding with them."""
    size = pair[0].vocab_size
    texts = tokens(pair[0], NoDrafter(), _requests(size, **request.param), GUMBEL, 0)
    assert [_is_right(ids, size) for ids in texts] == [i != 2 for i in range(len(texts))]
    return request.param, texts


def _is_right(ids: tuple[int, ...], vocab_size: int) -> bool:
    return all(map(Remainders(vocab_size).push, ids))


@pytest.mark.parametrize("k", [0, 1, 4])
def test_the_text_is_that_of_plain_decoding(
    pair: tuple[LM, ModelDrafter], plain: tuple[dict[str, float], list[tuple[int, ...]]], k: int
) -> None:
    """Greedy, and under ``gumbel``; for every drafter, in a batch and alone. Drafts are accepted, and rejected."""
    target, drafter = pair
    size = target.vocab_size
    options, texts = plain
    drafters = (
        drafter,
        replace(drafter, options=DraftOptions(is_greedy=True)),
        replace(drafter, mask_id=2),
        replace(drafter, options=DraftOptions(min_prob=0.4)),
        replace(drafter, mask_id=2, options=DraftOptions(min_prob=0.4)),
        NgramDrafter(),
        ModelDrafter(target),
    )
    for one in drafters:
        assert tokens(target, one, _requests(size, **options), GUMBEL, k) == texts
    if k == 4:
        assert [tokens(target, drafter, [one], GUMBEL, k)[0] for one in _requests(size, **options)] == texts
    if "temperature" in options:
        for rule in (REJECTION, BLOCK):
            assert tokens(target, drafter, _requests(size, **options), rule, k) == texts


@ALL_RULES
@pytest.mark.parametrize("k", [1, 3])
def test_a_row_does_not_depend_on_its_neighbours(pair: tuple[LM, ModelDrafter], rule: Rule, k: int) -> None:
    """Nor do those without a constraint, beside rows that have one."""
    target, model = pair
    for drafter in (model, replace(model, mask_id=2), replace(model, options=DraftOptions(min_prob=0.4))):
        together = tokens(target, drafter, _requests(target.vocab_size, 3 * k + 3), rule, k)
        alone = [tokens(target, drafter, [one], rule, k)[0] for one in _requests(target.vocab_size, 3 * k + 3)]
        assert together == alone
    assert all(_is_right(ids, target.vocab_size) for i, ids in enumerate(together) if i != 2)


def _law(num_tokens: int) -> Law:
    return masked_law(TABLES[0], 3, PIECES, LANGUAGE, num_tokens, 1.0)


@pytest.mark.eager_only
@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_targets_masked_law(rule: Rule, k: int) -> None:
    """By enumeration, to 1e-12: a regular expression over six tokens, whose texts end within the rounds."""

    def of_round(output: tuple[int, ...]) -> Law:
        if END in output:
            return {(END,): 1.0}
        law = round_law(rule, k, TABLES, (3,), Sampling(), output, structure)
        cut: Law = {}
        for ids, mass in law.items():
            ids = ids[: ids.index(END) + 1] if END in ids else ids
            cut[ids] = cut.get(ids, 0.0) + mass
        return cut

    law: Law = {}
    for ids, mass in rounds_law(of_round, 4).items():
        ids = ids[: ids.index(END) + 1] if END in ids else ids
        law[ids] = law.get(ids, 0.0) + mass
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, _law(4)) < 1e-12


@pytest.mark.eager_only
@pytest.mark.parametrize("drafter", ["model", "greedy", "ngram"])
@ALL_RULES
def test_the_loop_follows_the_masked_law(rule: Rule, drafter: str) -> None:
    """K = 3, thousands of seeds, and a chi-square test of whole texts. False alarm: 1e-6 each."""
    target, model = table_lm(TABLES[0]), ModelDrafter(table_lm(TABLES[1], name="draft"))
    drafters: dict[str, Drafter] = {
        "model": model,
        "greedy": replace(model, options=DraftOptions(is_greedy=True)),
        "ngram": NgramDrafter(),
    }
    requests = [
        replace(request((0, 1, 3), StopAt(END), seed=seed, max_new_tokens=8), constraint=structure())
        for seed in range(NUM_SEEDS)
    ]
    counts = Counter(tokens(target, drafters[drafter], requests, rule, 3))
    law = _law(8)
    assert counts.keys() <= law.keys()
    expected, observed = [0.0], [0]
    for text, prob in law.items():
        is_rare = prob * NUM_SEEDS < 5
        if is_rare:
            expected[0] += prob * NUM_SEEDS
            observed[0] += counts[text]
        else:
            expected.append(prob * NUM_SEEDS)
            observed.append(counts[text])
    first = 1 if expected[0] < 5 else 0
    expected[-1] += first * expected[0]
    observed[-1] += first * observed[0]
    assert scipy.stats.chisquare(observed[first:], expected[first:], sum_check=False).pvalue > FALSE_ALARM


def test_masks_that_do_not_follow_the_drafts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask of the first place at all places the target says what it must not."""
    along = Masks.along

    def first(masks: Masks, draft: Draft) -> torch.Tensor:
        return along(masks, draft)[:, :1].expand(-1, draft.ids.shape[1] + 1, -1)

    monkeypatch.setattr(Masks, "along", first)
    target, drafter = table_pair(8)
    with pytest.raises(NumericsError, match="every token that the constraint allows has a logit of minus infinity"):
        tokens(target, drafter, _requests(8), BLOCK, 3)


def test_a_constraint_that_gives_up_ends_its_row_alone() -> None:
    """With its reason."""

    class Tired(Remainders):
        def effect(self) -> object:
            self.error = "too complex" if len(self.ids) > 5 else None
            return super().effect() if self.error is None else None

    target, drafter = table_pair(8)
    tired = replace(request((1,), max_new_tokens=12), constraint=Tired(8))
    with pytest.raises(NumericsError, match="prompt 1: too complex"):
        tokens(target, drafter, [request((2,), max_new_tokens=12), tired], BLOCK, 3)


def test_tokens_beyond_one_that_is_not_allowed_do_not_matter() -> None:
    """The masks of a draft of which the second token must not come; and afterwards the constraint is where it was."""
    constraint = Remainders(4)
    assert constraint.push(2)
    masks = Masks([constraint, None], 4, torch.device("cpu"))
    assert masks.here().tolist() == [[[True, True, False, True]], [[True] * 4]]
    draft = Draft(torch.tensor([[1, 1, 3], [0, 0, 0]]), None, torch.tensor([3, 2]))
    allowed = masks.along(draft)
    assert allowed[0].tolist() == [[True, True, False, True], [True, False, True, True], [True] * 4, [True] * 4]
    assert allowed[1].all() and constraint.ids == [2]


@pytest.mark.parametrize("rule", [GUMBEL, BLOCK], ids=lambda rule: rule.name)
def test_programs_are_few(rule: Rule) -> None:
    """A constrained row needs programs of its own: one of a single drafted token, and one to verify with masks."""
    target, drafter = llama_pair()
    if not target.execution.is_prepared:
        pytest.skip("nothing is prepared")
    tokens(target, drafter, [_constrained(request((1,), max_new_tokens=12), target.vocab_size)], rule, 2)
    steps = [key for lm in (target, drafter.lm) for key in lm.execution._programs]  # type: ignore[attr-defined]
    assert 0 < len(steps) <= 6
