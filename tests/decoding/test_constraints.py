"""Constrained rows: their law is the target's masked law, whatever the drafter, K, the rule and the neighbours."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from languages import Remainders, letters_tokenizer, masked_law
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError
from outrider.options import Sampling
from outrider.records import Draft, Request
from outrider.sampling.masks import Masks
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule
from outrider.text.structure import Structure
from outrider.text.thinking import Thinking, Thoughts
from reference import Law, law_distance, rounds_law
from round_laws import round_law
from toys import llama_pair, random_table, request, table_pair, tokens

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5]
BY_UNIFORMS = pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
PIECES = ("a", "b", "ab", "c", "ba", "<end>")
END = len(PIECES) - 1
REGEX = "a(b|ab){1,2}c?"
MIDDLES = [("b",), ("ab",), *itertools.product(["b", "ab"], repeat=2)]
LANGUAGE = {"a" + "".join(middle) + end for middle in MIDDLES for end in ("", "c")}
TABLES = random_table(len(PIECES), 0, 1.5), random_table(len(PIECES), 1)


THINKING, BUDGET = Thinking("<a>", "<b>", (1,), 2), 5  # tokens 1 and 2 are its markers


def _constrained(one: Request, vocab_size: int, has_thoughts: bool = False) -> Request:
    inner = Remainders(vocab_size)
    thoughts = Thoughts(inner, THINKING, "in", vocab_size, frozenset(), BUDGET)
    return replace(one, constraint=thoughts if has_thoughts else inner)


def _requests(vocab_size: int, num_tokens: int = 16, has_thoughts: bool = False, **options: object) -> list[Request]:
    """Constrained ones, and one that is not among them."""
    plain = [request(ids, seed=10 + i, max_new_tokens=num_tokens, **options) for i, ids in enumerate(PROMPTS * 2)]
    return [one if i == 2 else _constrained(one, vocab_size, has_thoughts) for i, one in enumerate(plain)]


def _is_right(ids: tuple[int, ...], vocab_size: int, has_thoughts: bool = False) -> bool:
    if has_thoughts:
        num = ids.index(THINKING.end_id) if THINKING.end_id in ids else len(ids)
        return num <= BUDGET and _is_right(ids[num + 1 :], vocab_size)
    return all(map(Remainders(vocab_size).push, ids))


@pytest.mark.each_execution
@pytest.mark.parametrize("has_thoughts", [False, True], ids=["constraint", "thoughts"])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_the_text_is_that_of_plain_decoding(is_greedy: bool, has_thoughts: bool) -> None:
    """Greedy, and under ``gumbel``; for every way to draft. Drafts are accepted, and rejected; some go beyond a budget
    of thoughts (vLLM's issue 39573), and some across their end, after which the constraint begins."""
    target, drafter = llama_pair() if is_greedy else table_pair(8)
    options = {"temperature": 0.0} if is_greedy else {"top_k": 5, "frequency_penalty": 0.5}
    size = target.vocab_size
    new = partial(_requests, size, has_thoughts=has_thoughts, **options)
    plain = tokens(target, NO_DRAFTER, new(), GUMBEL, 0)
    assert [_is_right(ids, size, has_thoughts) for ids in plain] == [i != 2 for i in range(len(plain))]
    drafters = (
        drafter,
        model_drafter(drafter.models[0], DraftOptions(is_greedy=True)),
        model_drafter(drafter.models[0], DraftOptions(min_prob=0.4), 2),
        ngram_drafter(),
    )
    for one in drafters:
        assert tokens(target, one, new(), GUMBEL, 4) == plain
    for rule in (REJECTION, BLOCK) if is_greedy else ():
        assert tokens(target, drafter, new(), rule, 3) == plain


@BY_UNIFORMS
def test_a_row_does_not_depend_on_its_neighbours(rule: Rule) -> None:
    """Nor do those without a constraint, beside rows that have one."""
    target, model = table_pair(8)
    for drafter in (model, model_drafter(model.models[0], DraftOptions(min_prob=0.4), 2)):
        together = tokens(target, drafter, _requests(8, 12), rule, 3)
        assert together == [tokens(target, drafter, [one], rule, 3)[0] for one in _requests(8, 12)]
    assert all(_is_right(ids, 8) for i, ids in enumerate(together) if i != 2)


@pytest.mark.parametrize("k", [0, 1, 2])
@BY_UNIFORMS
def test_the_law_is_the_targets_masked_law(rule: Rule, k: int) -> None:
    """By enumeration, to 1e-12: a regular expression over six tokens, whose texts end within the rounds."""
    tokenizer = letters_tokenizer(PIECES)

    def ended(law: Law) -> Law:
        cut: Law = {}
        for ids, mass in law.items():
            ids = ids[: ids.index(END) + 1] if END in ids else ids
            cut[ids] = cut.get(ids, 0.0) + mass
        return cut

    def of_round(output: tuple[int, ...]) -> Law:
        if END in output:
            return {(END,): 1.0}
        structure = partial(Structure, Sampling(regex=REGEX), tokenizer, len(PIECES), frozenset({END}))
        return ended(round_law(rule, k, TABLES, (3,), Sampling(), output, structure))

    law = ended(rounds_law(of_round, 4))
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert law_distance(law, masked_law(TABLES[0], 3, PIECES, LANGUAGE, 4, 1.0)) < 1e-12


def test_masks_that_do_not_follow_the_drafts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask of the first place at all places the target says what it must not."""
    along = Masks.along
    monkeypatch.setattr(
        Masks, "along", lambda self, draft: along(self, draft)[:, :1].expand(-1, draft.ids.shape[1] + 1, -1)
    )
    with pytest.raises(NumericsError, match="every token that the constraint allows has a logit of minus infinity"):
        tokens(*table_pair(8), _requests(8), BLOCK, 3)


def test_a_constraint_ends_its_row_with_its_reason_and_is_rolled_back() -> None:
    """Masks after a drafted token that is not allowed do not matter."""

    class Tired(Remainders):
        def effect(self) -> object:
            self.error = "too complex" if len(self.ids) > 5 else None
            return super().effect() if self.error is None else None

    tired = replace(request((1,), max_new_tokens=12), constraint=Tired(8))
    with pytest.raises(NumericsError, match="prompt 1: too complex"):
        tokens(*table_pair(8), [request((2,), max_new_tokens=12), tired], BLOCK, 3)
    constraint = Remainders(4)
    assert constraint.push(2)
    masks = Masks([constraint, None], 4, torch.device("cpu"))
    assert masks.here().tolist() == [[[True, True, False, True]], [[True] * 4]]
    allowed = masks.along(Draft(torch.tensor([[1, 1, 3], [0, 0, 0]]), None, torch.tensor([3, 2])))
    assert allowed[0].tolist() == [[True, True, False, True], [True, False, True, True], [True] * 4, [True] * 4]
    assert allowed[1].all() and constraint.ids == [2]
