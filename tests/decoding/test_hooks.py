"""Hooks at each position: the law is that of the target with the hook, whatever the drafts, the rule and the batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import outrider
from languages import letters_tokenizer
from outrider import Decoder, Sampling
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError, OptionError
from outrider.records import Draft
from outrider.requests.hooks import Hook, constraint_of
from outrider.sampling.masks import Masks
from outrider.sampling.rules import BLOCK, REJECTION, Rule
from pairs import embedded, random_llama
from reference import Law, law_distance, rounds_law
from round_laws import round_law
from toys import random_table

V = 3
TABLES = random_table(V, 0, 1.5), random_table(V, 1)
PROMPT = (2, 1)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1], [2, 3] * 5]
LENGTH = 4


def lean(ids: list[int]) -> torch.Tensor:
    """Depends on all tokens so far, and forbids one of every two."""
    total = sum((i + 1) * token for i, token in enumerate(ids))
    return torch.tensor([0.7 * total % 2.1, -torch.inf if total % 2 else 0.3, 1.1], dtype=torch.float64)


def sway(ids: list[int]) -> torch.Tensor:
    """Forbids nothing."""
    return lean(ids).nan_to_num(neginf=-1.5)


def _law(hook: Hook) -> Law:
    law: Law = {(): 1.0}
    for _ in range(LENGTH):
        longer: Law = {}
        for ids, mass in law.items():
            before = [*PROMPT, *ids]
            probs = (TABLES[0][before[-1]].double() + hook(before)).softmax(-1).tolist()
            longer |= {(*ids, token): mass * prob for token, prob in enumerate(probs) if prob > 0}
        law = longer
    return law


def _found_law(rule: Rule, k: int, hook: Hook = lean) -> Law:
    sampling = Sampling(processor=hook)

    def of_round(output: tuple[int, ...]) -> Law:
        given = rule, k, TABLES, PROMPT, replace(sampling, processor=None), output
        return round_law(*given, lambda: constraint_of(sampling, None, V, frozenset(), PROMPT))

    return rounds_law(of_round, LENGTH)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("rule", [REJECTION, BLOCK], ids=lambda rule: rule.name)
def test_the_law_is_the_targets_with_the_hook(rule: Rule, k: int) -> None:
    """By enumeration, to 1e-12."""
    assert law_distance(_found_law(rule, k), _law(lean)) < 1e-12


def test_a_hook_on_the_committed_prefix_alone_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert law_distance(_found_law(REJECTION, 2, sway), _law(sway)) < 1e-12
    along = Masks.along

    def first(masks: Masks, draft: Draft) -> object:
        return along(masks, draft)[:, :1].expand(-1, draft.ids.shape[1] + 1, -1)  # type: ignore[index]

    monkeypatch.setattr(Masks, "along", first)
    assert law_distance(_found_law(REJECTION, 2, sway), _law(sway)) > 1e-3


def _parity(ids: list[int]) -> np.ndarray:
    """After an even sum, odd tokens are forbidden, and the other way round every third time."""
    return (np.arange(97) + sum(ids)) % 3 != len(ids) % 3


def _biased(ids: list[int]) -> torch.Tensor:
    return torch.arange(97) * 0.05 * (len(ids) % 5) - 0.1 * ids[-1]


HOOKS = [_parity, None, _biased]


@cache
def _decoder(draft: str | None = "model") -> Decoder:
    target = random_llama(seed=0, context_len=128).double()
    return outrider.load(target, random_llama(seed=1, context_len=128).double() if draft == "model" else draft)


@pytest.mark.parametrize("draft", ["model", "ngram"])
def test_gumbel_gives_the_text_of_plain_decoding(draft: str) -> None:
    """With a hook for each row, in batches and alone; masks and biases are followed."""
    options = {"processor": HOOKS, "seed": 3, "max_new_tokens": 12, "acceptance": "gumbel"}
    plain = [one.token_ids for one in _decoder(None).generate(PROMPTS, **options)]
    assert [one.token_ids for one in _decoder(draft).generate(PROMPTS, **options)] == plain
    own = [dict(options, processor=hook, seed=3 + i) for i, hook in enumerate(HOOKS)]
    for i, one in enumerate(own):
        chunks = _decoder(draft).stream(PROMPTS[i], num_draft_tokens=3, **one)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain[i]
    for i, token in enumerate(plain[0]):
        assert _parity([*PROMPTS[0], *plain[0][:i]])[token]
    assert plain != [one.token_ids for one in _decoder(None).generate(PROMPTS, **{**options, "processor": None})]


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Nor a resumed one on the cut; a draft that is the target keeps every token, since q is changed as p is."""
    options = {"max_new_tokens": 12, "acceptance": "block", "ignore_eos": True}
    together = _decoder().generate(PROMPTS, processor=HOOKS, seed=3, **options)
    for i, hook in enumerate(HOOKS):
        assert _decoder().generate([PROMPTS[i]], processor=hook, seed=3 + i, **options)[0] == together[i]
    one = {"processor": _parity, "seed": 3, **options}
    assert len(_decoder().generate([PROMPTS[0]], **one, resume_ids=[together[0].token_ids[:1]])[0].token_ids) == 11
    with pytest.raises(OptionError, match="the constraint forbids this token"):
        bad = int(np.flatnonzero(~_parity(PROMPTS[0]))[0])
        _decoder().generate([PROMPTS[0]], processor=_parity, resume_ids=[[bad]])
    same = replace(_decoder(), drafter=model_drafter(_decoder().target))
    (found,) = same.generate([[1]], processor=_biased, seed=1, max_new_tokens=20, ignore_eos=True, num_draft_tokens=4)
    assert found.stats.draft_acceptance_rate == 1


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (torch.ones(97, dtype=torch.uint8), r"gave torch.uint8 of shape \[97\]: .* as bools or floats"),
        (torch.zeros(97, dtype=torch.float8_e4m3fn), "gave torch.float8_e4m3fn"),
        (None, "raised KeyError: 1"),
        ([float("nan")] * 97, "gave NaN, or numbers beyond"),
        (torch.full((97,), torch.inf, dtype=torch.float16), "gave NaN, or numbers beyond"),
        ([0.0] * 96, r"gave float64 of shape \[96\]: give a mask or biases of shape \[97\]"),
        ([False] * 97, "leaves no token at position 1"),
        ([[1], [1, 2]], "gave object"),
        (np.arange(97) == 96, "leaves no token"),  # the end, which another option forbids
    ],
)
def test_results_that_cannot_be_used_end_their_own_stream_alone(result: object, message: str) -> None:
    def wrong(ids: list[int]) -> object:
        if result is None:
            raise KeyError(len(ids))
        return result

    for draft in ("model", None):
        with pytest.raises(NumericsError, match=f"processor .*wrong {message}"):
            _decoder(draft).generate([[1]], processor=wrong, max_new_tokens=4, min_tokens=2)
    with _decoder().session(slots=2, capacity=64) as session:
        stream = session.stream(PROMPTS[0], max_new_tokens=8, ignore_eos=True)
        next(stream)
        with pytest.raises(NumericsError, match=message):
            session.generate([[1]], processor=wrong, max_new_tokens=8, min_tokens=2)
        assert [chunk.finish_reason for chunk in stream][-1] == "length"


def test_hooks_are_not_called_after_an_end_and_may_raise_where_no_text_gets() -> None:
    """The greedy text has even tokens and ends with 4; the draft leads elsewhere, and beyond the end."""
    seen: list[list[int]] = []

    def hook(ids: list[int]) -> np.ndarray:
        seen.append(ids)
        if ids[-1] % 2 and len(ids) > 1:
            raise LookupError("an odd token")
        return np.arange(97) % 2 == 0 if len(ids) < 4 else np.arange(97) == 4

    options = {"processor": hook, "temperature": 0, "max_new_tokens": 8, "num_draft_tokens": 6}
    texts = set()
    for draft in (None, "model", "ngram"):
        decoder = Decoder(_decoder().target, None, frozenset({4}), _decoder(draft).drafter)
        texts.add(decoder.generate([[1]], **options)[0].token_ids)
        assert all(4 not in ids for ids in seen)
        assert decoder.generate([[1]], **options, ignore_eos=True)[0].token_ids[3:] == (4,) * 5
        seen.clear()
    assert len(texts) == 1 and texts.pop()[-1] == 4


def test_a_hook_and_a_grammar_hold_together() -> None:
    tokenizer = letters_tokenizer(("a", "b", "ab", "c", "ba", "<end>"))
    sampling = Sampling(regex="(a|b|c){6}", processor=lambda ids: np.arange(6) != ids[-1])
    held = constraint_of(sampling, tokenizer, 6, frozenset({5}), [0])
    assert held is not None and list(held.effect()) == [False, True, True, True, True, False]
    assert held.push(1) and not held.push(1) and held.push(3)
    held.pop(1)
    assert list(held.effect()) == [True, False, True, True, True, False] and held.error is None
    with pytest.raises(OptionError, match="bad_words .* may forbid what regex requires"):
        replace(sampling, bad_words=["a"])


def test_bad_words_are_not_generated() -> None:
    """Sequences of tokens, after the prompt's tokens too; and texts, at the beginning and after a space."""
    target, prompt = _decoder(None), [5, 6, 7]
    for decoder in (target, _decoder()):
        ids: tuple[int, ...] = ()
        words: list[tuple[int, ...]] = []
        for _ in range(3):
            (found,) = decoder.generate([prompt], temperature=0, max_new_tokens=6, bad_words=words or None)
            assert found.token_ids != ids
            ids = found.token_ids
            text = (*prompt, *ids)
            assert all(text[i : i + len(word)] != word for word in words for i in range(len(text)))
            words.append((7, ids[0]) if not words else ids[1:3])
    for wrong, message in (([[1, 97]], "token ids are below 97"), (["cat"], "texts need a tokenizer")):
        with pytest.raises(OptionError, match=message):
            target.generate([prompt], bad_words=wrong)
    for word in ("cat", [""], [[]], [[-1]], [1]):
        with pytest.raises(OptionError, match="bad_words"):
            Sampling(bad_words=word)
    by_text = replace(embedded(), drafter=ngram_drafter())
    (plain,) = by_text.generate("Once upon a time", temperature=0, max_new_tokens=24)
    texts = [word for word in plain.text.replace(".", " ").replace(",", " ").split() if len(word) > 2][:2]
    rows = by_text.generate(["Once upon a time"] * 2, temperature=0, max_new_tokens=24, bad_words=[texts, None])
    assert texts and not any(f" {word}" in rows[0].text for word in texts) and rows[1].text == plain.text
