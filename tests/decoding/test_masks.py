"""Constraints and hooks: the law is that of the target with them, whatever the drafter, K, rule and neighbours."""

import itertools
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

import outrider
from languages import Remainders, letters_tokenizer, masked_law
from outrider import Decoder
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import NumericsError, OptionError
from outrider.options import Sampling
from outrider.records import Draft, Request
from outrider.requests.hooks import ReadOptions, constraint_of
from outrider.sampling.masks import Masks
from outrider.sampling.rules import BLOCK, GUMBEL, REJECTION, Rule
from outrider.text.structure import Structure
from outrider.text.thinking import Thinking, Thoughts
from pairs import embedded, random_llama
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


V = 3
HOOKED = random_table(V, 0, 1.5), random_table(V, 1)
PROMPT = (2, 1)
ID_PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [1], [2, 3] * 5]
NUM_HOOKED = 4


@pytest.mark.parametrize("k", [1, 2])
@BY_UNIFORMS
def test_the_law_is_the_targets_with_the_hook(rule: Rule, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 1e-12, of a hook that depends on all tokens so far. The control: its biases at the first place, everywhere."""

    def hook(ids: list[int]) -> torch.Tensor:
        total = sum((i + 1) * token for i, token in enumerate(ids))
        return torch.tensor([0.7 * total % 2.1, -1.5 if total % 2 else 0.3, 1.1], dtype=torch.float64)

    def next_law(ids: tuple[int, ...]) -> Law:
        before = [*PROMPT, *ids]
        probs = (HOOKED[0][before[-1]] + hook(before)).softmax(-1).tolist()
        return {(token,): prob for token, prob in enumerate(probs)}

    def of_round(output: tuple[int, ...]) -> Law:
        sampling = Sampling(processor=hook)
        held = partial(constraint_of, ReadOptions.of(sampling, None, V), None, V, frozenset(), PROMPT)
        return round_law(rule, k, HOOKED, PROMPT, Sampling(), output, held)

    law = rounds_law(next_law, NUM_HOOKED)
    assert law_distance(rounds_law(of_round, NUM_HOOKED), law) < 1e-12
    along = Masks.along
    monkeypatch.setattr(Masks, "along", lambda self, draft: along(self, draft)[:, :1].expand(-1, k + 1, -1))
    assert law_distance(rounds_law(of_round, NUM_HOOKED), law) > 1e-3


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
    """With a hook for each row, in batches and alone; masks and biases are followed. A draft that is the target keeps
    every token, since q is changed as p is. A text is not resumed with a token that its hook forbids."""
    options = {"processor": HOOKS, "seed": 3, "max_new_tokens": 12, "acceptance": "gumbel"}
    plain = [one.token_ids for one in _decoder(None).generate(ID_PROMPTS, **options)]
    assert [one.token_ids for one in _decoder(draft).generate(ID_PROMPTS, **options)] == plain
    own = [dict(options, processor=hook, seed=3 + i) for i, hook in enumerate(HOOKS)]
    for i, one in enumerate(own):
        chunks = _decoder(draft).stream(ID_PROMPTS[i], num_draft_tokens=3, **one)
        assert tuple(token for chunk in chunks for token in chunk.token_ids) == plain[i]
    for i, token in enumerate(plain[0]):
        assert _parity([*ID_PROMPTS[0], *plain[0][:i]])[token]
    assert plain != [one.token_ids for one in _decoder(None).generate(ID_PROMPTS, **{**options, "processor": None})]
    same = replace(_decoder(), drafter=model_drafter(_decoder().target))
    (found,) = same.generate([[1]], processor=_biased, seed=1, max_new_tokens=20, ignore_eos=True, num_draft_tokens=4)
    assert found.stats.draft_acceptance_rate == 1
    with pytest.raises(OptionError, match="the constraint forbids this token"):
        bad = int(np.flatnonzero(~_parity(ID_PROMPTS[0]))[0])
        _decoder().generate([ID_PROMPTS[0]], processor=_parity, resume_ids=[[bad]])


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
        stream = session.stream(ID_PROMPTS[0], max_new_tokens=8, ignore_eos=True)
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
    held = constraint_of(ReadOptions.of(sampling, tokenizer, 6), tokenizer, 6, frozenset({5}), [0])
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
