"""The suffix drafts where its score is high, and another drafter in the other rows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract import check_state
from outrider.api import load, load_drafter
from outrider.cli.shared.pair_options import PairOptions
from outrider.drafters.base import Drafter, Rows
from outrider.drafters.hybrid import HybridSession, hybrid_drafter
from outrider.drafters.lookups import suffix_drafter
from outrider.drafters.model import ModelSession, model_drafter
from outrider.errors import OptionError
from outrider.measure.log import Header
from outrider.measure.replay import load_draft, replay
from outrider.records import Draft
from outrider.sampling.probs import full
from outrider.sampling.rules import REJECTION, RULES
from pairs import embedded
from toys import as_lm, llama_pair, request, run, tiny_llama, tokens

ALL_RULES = pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.name)
PROMPTS = [[1, 2, 3, 4] * 3, [7, 8, 9], [5] * 8, [10, 3, 10, 2]]
V = 60  # tokens of the pair


def _hybrid(other: Drafter, *, rival: float = 0.4, vocab_size: int = V, **options: Any) -> Drafter:
    return hybrid_drafter(suffix_drafter(**options), other, vocab_size, rival)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Rows, Rows, Draft]]:
    """Of each round: the rows, as the model sees them, too; and the draft."""
    rounds: list[tuple[Rows, Rows, Draft]] = []
    asked: list[Rows] = []
    of_model, of_hybrid = ModelSession.propose, HybridSession.propose

    def ask(self: ModelSession, rows: Rows, *others: Any) -> Draft:
        asked.append(rows)
        return of_model(self, rows, *others)

    def note(self: HybridSession, rows: Rows, *others: Any) -> Draft:
        lengths = rows.lengths.clone()  # the loop updates them
        draft = of_hybrid(self, rows, *others)
        now = replace(rows, lengths=lengths)
        rounds.append((now, replace(asked[-1], lengths=lengths), draft))
        return draft

    monkeypatch.setattr(ModelSession, "propose", ask)
    monkeypatch.setattr(HybridSession, "propose", note)
    return rounds


def test_the_form_of_a_draft_does_not_depend_on_who_drafts(seen: list[tuple[Rows, Rows, Draft]]) -> None:
    """Each form would be a program of its own. q is one-hot in rows of the suffix."""
    target, model = llama_pair()
    run(target, _hybrid(model), [request(prompt, max_new_tokens=40) for prompt in PROMPTS], REJECTION, 3)
    num_of_suffix = 0
    for rows, asked, draft in seen:
        if draft.ids.shape[1] == 0:
            continue
        assert draft.probs is not None and draft.probs.shape == (*draft.ids.shape, V)
        assert draft.is_finite is not None
        for b, (ours, theirs) in enumerate(zip(rows.most_wanted, asked.most_wanted, strict=True)):
            num = int(draft.num_drafted[b])
            if ours > theirs:
                assert theirs == int(asked.num_wanted[b]) == 0
                assert bool((full(draft.probs)[b, range(num), draft.ids[b, :num]] == 1).all())
                num_of_suffix += num
    assert num_of_suffix > 10


def test_both_draft_beyond_the_context_of_the_model(seen: list[tuple[Rows, Rows, Draft]]) -> None:
    target, model = llama_pair(draft_context_len=20)
    requests = [request([1, 2, 3] * 6, max_new_tokens=120, temperature=0.0)]
    assert tokens(target, _hybrid(model), requests, REJECTION, 3) == tokens(target, model, requests, REJECTION, 0)
    beyond = [(asked.most_wanted[0], draft) for rows, asked, draft in seen if int(rows.lengths[0]) > 20]
    assert {num > 0 for num, _ in beyond} == {True, False}
    assert sum(int(draft.num_drafted[0]) for num, draft in beyond if num == 0) > 20


def test_the_rival_decides(seen: list[tuple[Rows, Rows, Draft]]) -> None:
    """With a rival that always agrees the suffix never drafts, and with one that never does it always drafts."""
    target, model = llama_pair()
    for rival, want in ((1.0, False), (0.0, True)):
        seen.clear()
        run(target, _hybrid(model, rival=rival), [request([5] * 12, max_new_tokens=10)], REJECTION, 3)
        rows, asked, _ = seen[0]
        assert (asked.most_wanted[0] < rows.most_wanted[0]) == want


def test_a_model_that_misses_the_tokens_of_the_suffix_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the contract: a round without drafts of the model commits more than one token here."""
    target = as_lm(tiny_llama(vocab_size=4))
    model = model_drafter(as_lm(tiny_llama(1, vocab_size=4), "draft"))
    sequences = [
        ([3, 1, 2, 0], [1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 1, 0, 2]),
        ([0, 2], [0, 2, 0, 2, 0, 2, 0, 1, 3, 2, 1]),
    ]
    drafter = _hybrid(model, vocab_size=4)
    check_state(target, drafter, sequences, 3)

    def note_none(self: ModelSession, rows: Rows) -> None:
        self._gaps = [0] * len(self._gaps)

    monkeypatch.setattr(ModelSession, "_note", note_none)
    with pytest.raises(AssertionError, match="q is off by|is drafted, not"):
        check_state(target, drafter, sequences, 3)


def test_constraints() -> None:
    """The model's drafts are masked; a forbidden token of the suffix is rejected."""
    decoder = load("fable", "suffix+fable-draft", device="cpu", num_draft_tokens=4)
    options: dict[str, Any] = {"regex": "(the (king|queen) and ){12}", "temperature": 0.0, "max_new_tokens": 40}
    prompts = ["the king and the queen and the cat and the king and the queen and ", "Once upon a time "]
    got, want = decoder.generate(prompts, **options), decoder.plain().generate(prompts, **options)
    assert [one.token_ids for one in got] == [one.token_ids for one in want]
    assert all(one.stats.num_accepted_draft_tokens > 10 for one in got)


def test_names(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_text("The old king lived in a castle by the sea.")
    decoder = embedded()
    drafter = load_drafter(decoder, "suffix+fable-draft", corpus=[path])
    assert re.fullmatch("suffix[+][0-9a-f]{8}[+]fable-draft", drafter.name)
    assert drafter.with_models(lambda lm: lm) == drafter
    assert drafter.lm is None and drafter.reads_on_host
    loaded = load("fable", "suffix+fable-draft", device="cpu")
    assert loaded.drafter.name == "suffix+fable-draft" and not loaded.drafter.is_one_hot
    assert loaded.generate("Once", seed=1, max_new_tokens=8)[0].token_ids
    pair = PairOptions(draft=["suffix+fable-draft"], corpus=[path])
    assert pair.load_draft(decoder, pair.single_draft).name == drafter.name
    for name in ("suffix+", "suffix+ngram", "suffix+suffix", "suffix+none", "suffix+suffix+fable-draft"):
        with pytest.raises(OptionError, match="give the name of a model after 'suffix[+]'"):
            load_drafter(decoder, name)


def test_a_log_does_not_tell_its_drafts() -> None:
    decoder = load("fable", "suffix+fable-draft", device="cpu")
    header = Header.of(decoder, {}, has_probs=False)
    with pytest.raises(OptionError, match="its q is known in rounds with the target only"):
        load_draft("suffix+fable-draft", header)
    with pytest.raises(OptionError, match="its q is known in rounds with the target only"):
        next(replay([], header, decoder.drafter, "block", [2]))
