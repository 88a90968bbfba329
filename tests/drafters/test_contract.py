"""Every drafter keeps the contract of drafters, and mistakes in drafters break it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from block_heads import block_drafter
from contract import check_no_look_ahead, check_state
from heads import eagle3_drafter
from hybrids import V, hybrid, hybrid_lm
from outrider.decoding.batch import Row
from outrider.decoding.slots import SlotAssignment, Slots
from outrider.drafters import block
from outrider.drafters.base import AlteredDrafter, Drafter, Rows
from outrider.drafters.corpus import Corpus
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.hybrid import HybridDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.drafters.translated import TranslatedDrafter
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.text.spelling import Spelling
from round_drafters import head
from toys import as_lm, llama_pair, table_pair, tiny_llama

K = 3
FEW = 4  # tokens, of which all drafts are forced


def _model() -> tuple[LM, Drafter]:
    return as_lm(tiny_llama(vocab_size=FEW)), ModelDrafter(as_lm(tiny_llama(1, vocab_size=FEW), "draft"))


def _greedy() -> tuple[LM, Drafter]:
    target, drafter = _model()
    return target, ModelDrafter(drafter.models[0], options=DraftOptions(is_greedy=True))


def _parallel() -> tuple[LM, Drafter]:
    """The mask token is not of the vocabulary."""
    lm = as_lm(tiny_llama(1, vocab_size=FEW + 1), "draft").with_vocabulary(FEW, ())
    return as_lm(tiny_llama(vocab_size=FEW)), ModelDrafter(lm, mask_id=FEW)


def _other_tokens() -> tuple[LM, Drafter]:
    """The draft has another token at 1, and none at 3."""
    lm = as_lm(tiny_llama(1, vocab_size=FEW - 1), "draft")
    return as_lm(tiny_llama(vocab_size=FEW)), ModelDrafter(lm.with_vocabulary(FEW, (1, 3)))


def _short_context() -> tuple[LM, Drafter]:
    return as_lm(tiny_llama(vocab_size=FEW)), ModelDrafter(
        as_lm(tiny_llama(1, vocab_size=FEW), "draft", context_len=16)
    )


def _sure() -> tuple[LM, Drafter]:
    target, drafter = _model()
    return target, ModelDrafter(drafter.models[0], options=DraftOptions(min_prob=0.5))


def _parallel_sure() -> tuple[LM, Drafter]:
    target, drafter = _parallel()
    return target, ModelDrafter(drafter.models[0], mask_id=FEW, options=DraftOptions(min_prob=0.5))


def _parallel_short_context() -> tuple[LM, Drafter]:
    target, drafter = _short_context()
    return target, ModelDrafter(drafter.models[0], mask_id=2)


def _ngram() -> tuple[LM, Drafter]:
    return as_lm(tiny_llama(vocab_size=FEW)), NgramDrafter()


def _suffix() -> tuple[LM, Drafter]:
    return as_lm(tiny_llama(vocab_size=FEW)), SuffixDrafter(
        Corpus([[3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 3]]), min_prob=0.02
    )


def _eagle3() -> tuple[LM, Drafter]:
    """Two layers, norms of EAGLE-3.1, and three of the tokens."""
    target = as_lm(tiny_llama(vocab_size=FEW, num_layers=4))
    return target, eagle3_drafter(target, token_ids=[0, 1, 3], num_layers=2, fc_norm=True, norm_output=True)


def _head() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(vocab_size=FEW))
    return target, head(target)


def _hybrid(corpus: Sequence[int]) -> tuple[LM, Drafter]:
    target, model = _model()
    return target, HybridDrafter(SuffixDrafter(Corpus([corpus]), min_prob=0.02), model, FEW, rival_acceptance=0.3)


def _hybrid_matching() -> tuple[LM, Drafter]:
    """Its corpus continues the prompt whose drafts are all forced."""
    return _hybrid([3, 1, 2, 0, 1, 2, 2, 0, 1])


def _hybrid_without() -> tuple[LM, Drafter]:
    return _hybrid([3, 3, 3])


def _hybrid_with_head() -> tuple[LM, Drafter]:
    target, drafter = _eagle3()
    corpus = Corpus([[3, 1, 2, 0, 1, 2, 2, 0, 1]])
    return target, HybridDrafter(SuffixDrafter(corpus, min_prob=0.02), drafter, FEW, rival_acceptance=0.3)


def _translated(
    spelled: Sequence[tuple[int, ...]] = ((2,), (1, 4), (0,), (4, 3, 1)), **options: Any
) -> tuple[LM, Drafter]:
    """The draft has the tokens 0 and 2 under other ids, and spells the others in several."""
    spelling = Spelling((2, -1, 0, -1), ((2,), (1, 4), (0,), (4, 3, 1)), (3,))
    draft = as_lm(tiny_llama(1, vocab_size=5), "draft", **options)
    return as_lm(tiny_llama(vocab_size=FEW)), TranslatedDrafter.of(draft, spelling)


def _translated_short() -> tuple[LM, Drafter]:
    """The draft's context ends within its spellings."""
    return _translated(context_len=24)


def _eagle3_sure() -> tuple[LM, Drafter]:
    target, drafter = _eagle3()
    return target, replace(drafter, options=DraftOptions(min_prob=0.6))


def _dflash() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(vocab_size=FEW, num_layers=4))
    return target, block_drafter(target)


def _dflash2() -> tuple[LM, Drafter]:
    target = as_lm(tiny_llama(vocab_size=FEW, num_layers=4))
    return target, block_drafter(target, is_second=True, selector_top_k=3)


def _dspark() -> tuple[LM, Drafter]:
    """A draft ends before confidence is low: in the prompt below, after two of the four first tokens."""
    target = as_lm(tiny_llama(vocab_size=FEW, num_layers=4))
    options: dict[str, Any] = {"layout": "speculators", "markov": "rnn", "has_confidence": True}
    return target, replace(block_drafter(target, **options), options=DraftOptions(min_confidence=0.76))


PAIRS: dict[str, Callable[[], tuple[LM, Drafter]]] = {
    "model": _model,
    "greedy": _greedy,
    "parallel": _parallel,
    "other tokens": _other_tokens,
    "short context": _short_context,
    "parallel, short context": _parallel_short_context,
    "sure": _sure,
    "parallel, sure": _parallel_sure,
    "eagle3": _eagle3,
    "eagle3, sure": _eagle3_sure,
    "ngram": _ngram,
    "suffix": _suffix,
    "head": _head,
    "translated": _translated,
    "translated, short context": _translated_short,
    "hybrid": _hybrid_matching,
    "hybrid, no match": _hybrid_without,
    "hybrid with a head": _hybrid_with_head,
    "dflash": _dflash,
    "dflash2": _dflash2,
    "dspark": _dspark,
}


def _sequences(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Six, with prompts of 1 to 9 tokens; two begin with the prompt of another, and continue otherwise: one while that
    one is being generated in another slot."""
    generator = torch.Generator().manual_seed(3)

    def some(number: int) -> list[int]:
        return torch.randint(vocab_size, (number,), generator=generator).tolist()

    found = [(some(length), some(number)) for length, number in ((1, 5), (5, 14), (9, 24), (2, 6))]
    return [*found, ([*found[2][0], *found[2][1][:3]], some(12)), (found[2][0], some(12))]


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_does_not_look_ahead(name: str) -> None:
    check_no_look_ahead(*PAIRS[name](), prompt=(3, 1, 2, 0, 1, 2), vocab_size=FEW, k=K)


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_is_a_function_of_the_sequence(name: str) -> None:
    check_state(*PAIRS[name](), _sequences(FEW), K)


@pytest.mark.parametrize(
    "name", ["model", "parallel", "short context", "eagle3", "dflash", "translated", "suffix", "hybrid with a head"]
)
def test_a_shared_prefix_changes_no_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sequence that has ended, in its slot and in another one, and of one that is running."""
    num_shared: list[int] = []
    place = Slots.place

    def counted(self: Slots, row: Row) -> SlotAssignment:
        found = place(self, row)
        num_shared.append(found.num_shared)
        return found

    monkeypatch.setattr(Slots, "place", counted)
    generator = torch.Generator().manual_seed(4)
    shared = torch.randint(FEW, (20,), generator=generator).tolist()
    sequences = [
        ([*shared[: 20 - i], (shared[20 - i - 1] + i) % FEW], torch.randint(FEW, (9,), generator=generator).tolist())
        for i in range(4)
    ]
    check_state(*PAIRS[name](), sequences, K)
    assert sum(num > 0 for num in num_shared) >= 3


def test_drafts_of_a_hybrid_are_a_function_of_the_sequence() -> None:
    """Its recurrences compute in float32."""
    target = as_lm(tiny_llama(vocab_size=V))
    draft = hybrid_lm(hybrid("qwen3_5_text"), "draft")
    check_state(target, ModelDrafter(draft), _sequences(V)[:3], K, atol=1e-4)
    draft.context_len = 12
    check_state(target, ModelDrafter(draft, options=DraftOptions(min_prob=0.05)), _sequences(V)[:2], K, atol=1e-4)


def test_blocks_of_a_hybrid_target_are_a_function_of_the_sequence() -> None:
    target = hybrid_lm(hybrid("qwen3_5_text"))
    check_state(target, block_drafter(target), _sequences(V)[:3], K, atol=1e-4)


def _cut_at_unlikely(rows: Rows, k: int, draft: Draft) -> Draft:
    """Looks at the token that it cuts."""
    assert draft.probs is not None
    is_unlikely = draft.probs.gather(-1, draft.ids[..., None]).squeeze(-1) < 0.1
    first = (is_unlikely.long().cumsum(dim=1) == 0).long().sum(dim=1)
    return replace(draft, num_drafted=torch.minimum(draft.num_drafted, first))


def _report_flatter(rows: Rows, k: int, draft: Draft) -> Draft:
    assert draft.probs is not None
    return replace(draft, probs=0.5 * draft.probs + 0.5 / draft.probs.shape[-1])


def _depend_on_width(rows: Rows, k: int, draft: Draft) -> Draft:
    """As where the tokens of a block see its whole width, which other rows decide."""
    return draft if draft.probs is None else replace(draft, probs=draft.probs.roll(draft.ids.shape[1], dims=-1))


@pytest.mark.parametrize(
    ("mistake", "message"), [(_cut_at_unlikely, "depends on later tokens"), (_report_flatter, "drawn from another q")]
)
def test_mistakes_within_a_round_are_detected(mistake: Any, message: str) -> None:
    target, drafter = table_pair(FEW)
    with pytest.raises(AssertionError, match=message):
        check_no_look_ahead(target, AlteredDrafter(drafter, "wrong", mistake), (3, 1, 2), FEW, K)


def test_a_q_that_depends_on_neighbours_is_detected() -> None:
    target, drafter = _model()
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, AlteredDrafter(drafter, "wrong", _depend_on_width), _sequences(FEW), K)


def test_a_block_as_wide_as_the_round_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its width would be that of the row that drafts most."""
    target, drafter = _dflash()
    feed = block._block_step

    def feed_wrong(head: LM, view_len: int, k: int, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head.model, "block_size", k + 1)
            return feed(head, view_len, k, *arguments)

    monkeypatch.setattr(block, "_block_step", feed_wrong)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, _sequences(FEW), K)


def test_a_confidence_that_looks_at_its_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be that of the next token."""
    target, drafter = _dspark()
    draw = block._draw

    def draw_first(head: Any, rule: Any, options: Any, logits: Any, output: Any, *arguments: Any) -> Any:
        drawn, _, state = draw(head, rule, options, logits, output, *arguments)
        return drawn, head.model.confidence(output, drawn[0]) < options.min_confidence, state

    monkeypatch.setattr(block, "_draw", draw_first)
    with pytest.raises(AssertionError, match="depends on later tokens"):
        check_no_look_ahead(target, drafter, (3, 1, 2, 0, 1, 2), FEW, K)


@pytest.mark.parametrize("what", ["assign", "observe"])
def test_a_stale_context_of_blocks_is_detected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prefix hit, or after rounds without drafts."""
    target, drafter = _dflash()
    method = getattr(block.BlockSession, what)

    def wrong(self: Any, *arguments: Any) -> None:
        if what == "observe" and arguments[0].ids.shape[1] > 1:
            method(self, *arguments)

    monkeypatch.setattr(block.BlockSession, what, wrong)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, _sequences(FEW), K)


@pytest.mark.parametrize("what", ["prefix", "rejection", "plain rounds"])
def test_a_stale_state_is_detected(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that keeps what it had in a slot, or rejected tokens, or does not read what was generated meanwhile."""
    target, drafter = llama_pair()
    opened = type(drafter).open

    def open_wrong(self: Any, *arguments: Any) -> Any:
        session = opened(self, *arguments)
        if what == "prefix":
            session.assign = lambda slot, source, num_tokens: None
        elif what == "rejection":
            propose = session.propose

            def keep(rows: Rows, *others: Any) -> Draft:
                draft: Draft = propose(rows, *others)
                session._cached[: len(rows)] += 1
                return draft

            session.propose = keep
        else:
            session.catch_up = lambda rows: False
        return session

    monkeypatch.setattr(type(drafter), "open", open_wrong)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, drafter, _sequences(60), K)
