"""Every drafter keeps the contract of drafters, and mistakes in drafters break it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from assistants import assistant_pair
from block_heads import tiny_block_drafter
from contract import check_no_look_ahead, check_state
from heads import eagle3_drafter, mtp_pair
from hybrids import V, hybrid, hybrid_lm
from outrider.certify.exact import check_exactly
from outrider.decoding.batch import Row
from outrider.decoding.scheduler import SlotAssignment, Slots
from outrider.drafters import head_states
from outrider.drafters.base import NO_DRAFTER, Drafter, Rows, altered_drafter
from outrider.drafters.chains import ChainSession
from outrider.drafters.corpus import Corpus
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.heads import head_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import SuffixSession, ngram_drafter, suffix_drafter
from outrider.drafters.model import ModelSession, model_drafter, self_drafter
from outrider.drafters.translated import translated_drafter
from outrider.measure.teacher_forcing import Text
from outrider.models.few_tokens import with_few_tokens
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL, RULES
from outrider.text.spelling import Spelling
from round_drafters import head
from toys import InTurn, as_lm, llama_pair, request, run, table_pair, tiny_llama, tokens

K = 3
FEW = 4  # tokens, of which all drafts are forced
CORPUS = [3, 1, 2, 0, 1, 2, 2, 0, 1]  # goes on as the prompt whose drafts are all forced


_SPELLING = Spelling((2, -1, 0, -1), ((2,), (1, 4), (0,), (4, 3, 1)), (3,))
Pair = tuple[LM, Drafter]


def _target(num_layers: int = 2) -> LM:
    return as_lm(tiny_llama(vocab_size=FEW, num_layers=num_layers))


def _model(*, mask_id: int | None = None, context_len: int = 256, **options: Any) -> Pair:
    draft = as_lm(tiny_llama(1, vocab_size=FEW), "draft", context_len)
    return _target(), model_drafter(draft, mask_id=mask_id, options=DraftOptions(**options))


def _parallel(**options: Any) -> Pair:
    """The mask token is not of the vocabulary."""
    lm = as_lm(tiny_llama(1, vocab_size=FEW + 1), "draft").with_vocabulary(FEW, ())
    return _target(), model_drafter(lm, mask_id=FEW, options=DraftOptions(**options))


def _other_tokens() -> Pair:
    """The draft has another token at 1, and none at 3."""
    lm = as_lm(tiny_llama(1, vocab_size=FEW - 1), "draft")
    return _target(), model_drafter(lm.with_vocabulary(FEW, (1, 3)))


def _suffix(corpus: Sequence[Sequence[int]]) -> Drafter:
    return suffix_drafter(Corpus(corpus), min_prob=0.02)


def _eagle3(context_len: int | None = None, **options: Any) -> Pair:
    """Two layers, norms of EAGLE-3.1, and three of the tokens."""
    target = _target(4)
    layers: dict[str, Any] = {"num_layers": 2, "fc_norm": True, "norm_output": True}
    drafter = eagle3_drafter(target, token_ids=[0, 1, 3], context_len=context_len, **layers)
    return target, head_drafter(drafter.models[0], DraftOptions(**options))


def _head() -> Pair:
    target = _target()
    return target, head(target)


def _hybrid(pair: Pair, corpus: Sequence[int]) -> Pair:
    target, other = pair
    return target, hybrid_drafter(_suffix([corpus]), other, FEW, rival_acceptance=0.3)


def _translated(**options: Any) -> Pair:
    """The draft has the tokens 0 and 2 under other ids, and spells the others in several."""
    return _target(), translated_drafter(as_lm(tiny_llama(1, vocab_size=5), "draft", **options), _SPELLING)


def _block(**options: Any) -> Pair:
    target = _target(4)
    return target, tiny_block_drafter(target, **options)


def _self() -> Pair:
    target = _target()
    return target, self_drafter(target, DraftOptions(window=16))


def _few(pair: Pair, ids: Sequence[int], make: Callable[[LM], Drafter]) -> Pair:
    """The draft has logits for a few of the tokens only."""
    target, drafter = pair
    return target, make(with_few_tokens(drafter.models[0], torch.tensor(ids)))


def _few_translated() -> Pair:
    """Of the tokens 0 and 2, which the draft has, the second one."""
    lm = as_lm(tiny_llama(1, vocab_size=5), "draft").with_tokens(_SPELLING.equals)
    return _target(), translated_drafter(with_few_tokens(lm, torch.tensor([1, 2])), _SPELLING)


PAIRS: dict[str, Callable[[], Pair]] = {
    "model": _model,
    "greedy": lambda: _model(is_greedy=True),
    "parallel": _parallel,
    "other tokens": _other_tokens,
    "short context": lambda: _model(context_len=16),
    "parallel, short context": lambda: _model(mask_id=2, context_len=16),
    "sure": lambda: _model(min_prob=0.5),
    "parallel, sure": lambda: _parallel(min_prob=0.5),
    "eagle3": _eagle3,
    "eagle3, sure": lambda: _eagle3(min_prob=0.6),
    "assistant": lambda: assistant_pair(FEW),
    "assistant, centroids": lambda: assistant_pair(FEW, num_groups=2, min_prob=0.6),
    "mtp": lambda: mtp_pair(tiny_llama(vocab_size=FEW), "qwen"),
    "ngram": lambda: (_target(), ngram_drafter()),
    "suffix": lambda: (_target(), _suffix([[3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 3]])),
    "head": _head,
    "translated": _translated,
    "translated, short context": lambda: _translated(context_len=24),
    "hybrid": lambda: _hybrid(_model(), CORPUS),
    "hybrid with a head": lambda: _hybrid(_eagle3(), CORPUS),
    "dflash": _block,
    "dflash2": lambda: _block(is_second=True, selector_top_k=3),
    "dflash, from the anchor": lambda: _block(layout="speculators", sample_from_anchor=True),
    "self": _self,
    "eagle3, short context": lambda: _eagle3(context_len=6),
    "dflash, short context": lambda: _block(layers={"max_position_embeddings": 6}),
    "few tokens": lambda: _few(_model(), [1, 3], model_drafter),
    "few tokens, other tokens": lambda: _few(_other_tokens(), [0, 1], model_drafter),
    "few tokens, translated": _few_translated,
    "few tokens of a head": lambda: _few(_eagle3(), [1, 2, 3], head_drafter),
    "few tokens, dflash2": lambda: _few(_block(is_second=True, selector_top_k=2), [0, 1, 3], head_drafter),
}


def _sequences(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Six, with prompts of 1 to 9 tokens; two begin with the prompt of another, and continue otherwise: one while that
    one is being generated in another slot."""
    generator = torch.Generator().manual_seed(3)

    def some(number: int) -> list[int]:
        return torch.randint(vocab_size, (number,), generator=generator).tolist()

    found = [(some(length), some(number)) for length, number in ((1, 5), (5, 9), (9, 18), (2, 5))]
    return [*found, ([*found[2][0], *found[2][1][:3]], some(8)), (found[2][0], some(8))]


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_does_not_look_ahead(name: str) -> None:
    check_no_look_ahead(*PAIRS[name](), prompt=(3, 1, 2, 0, 1, 2), vocab_size=FEW, k=K)


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_is_a_function_of_the_sequence(name: str) -> None:
    check_state(*PAIRS[name](), _sequences(FEW), K)


PROMPTS = [(2, 3, 2, 3, 2), (1,), (2, 3) * 5, (1, 0, 2)]


@pytest.mark.each_execution
@pytest.mark.parametrize(
    "name",
    [
        "parallel",
        "short context",
        "eagle3",
        "assistant",
        "dflash2",
        "suffix",
        "hybrid",
        "translated",
        "hybrid with a head",
        "self",
        "eagle3, short context",
    ],
)
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    """Greedy, and sampled under ``gumbel`` with all kinds of options; also where rounds are started ahead. Rows join,
    catch up after rounds of other K and of none, and some drafts are accepted."""
    target, drafter = PAIRS[name]()
    num_accepted = 0
    for options, k, lookahead in (
        ({"temperature": 0.0, "repetition_penalty": 1.3}, 4, 2),
        ({"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.5}, InTurn(3, 0, 0, 0, 0, 0, 2), 0),
    ):
        asked = [request(ids, seed=i, max_new_tokens=8 + 4 * (i % 3), **options) for i, ids in enumerate(PROMPTS)]
        target.execution.lookahead = 0
        plain = tokens(target, NO_DRAFTER, asked, GUMBEL, 0)
        target.execution.lookahead = lookahead
        outputs = run(target, drafter, asked, GUMBEL, k)
        assert [output.token_ids for output in outputs] == plain
        num_accepted += sum(output.stats.num_accepted_draft_tokens for output in outputs)
    assert num_accepted > 0


@pytest.mark.parametrize("name", ["greedy", "suffix", "hybrid", "translated", "eagle3"])
def test_a_round_follows_the_targets_law(name: str) -> None:
    """By enumeration."""
    texts = [Text([1, 2, 3, 1, 2, 3, 1, 2]), Text([2] * 5)]
    for rule in RULES.values():
        report = check_exactly(*PAIRS[name](), Sampling(temperature=0.8, top_p=0.9), rule, texts)
        assert report.is_ok, report


@pytest.mark.parametrize("name", ["model", "short context", "eagle3", "assistant", "dflash", "translated", "suffix"])
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
        ([*shared[: 20 - i], (shared[20 - i - 1] + i) % FEW], torch.randint(FEW, (6,), generator=generator).tolist())
        for i in range(4)
    ]
    check_state(*PAIRS[name](), sequences, K)
    assert sum(num > 0 for num in num_shared) >= 3


def test_drafts_of_a_hybrid_are_a_function_of_the_sequence() -> None:
    """Its recurrences compute in float32."""
    target = as_lm(tiny_llama(vocab_size=V))
    draft = hybrid_lm(hybrid("qwen3_5_text"), "draft")
    check_state(target, model_drafter(draft), _sequences(V)[:2], K, atol=1e-4)
    spelled = tuple((i,) if i % 3 else (i, 1, 2)[: 1 + i % 2 * 2] for i in range(V))
    spelling = Spelling(tuple(i if i % 3 else -1 for i in range(V)), spelled)
    check_state(target, translated_drafter(draft, spelling), _sequences(V)[:2], K, atol=1e-4)
    draft.context_len = 12
    check_state(target, model_drafter(draft, options=DraftOptions(min_prob=0.05)), _sequences(V)[:2], K, atol=1e-4)


def test_blocks_of_a_hybrid_target_are_a_function_of_the_sequence() -> None:
    target = hybrid_lm(hybrid("qwen3_5_text"))
    check_state(target, tiny_block_drafter(target), _sequences(V)[:2], K, atol=1e-4)


@pytest.mark.parametrize(("family", "layout"), [("qwen3_5_text", "qwen"), ("deepseek_v3", "deepseek")])
def test_drafts_of_mtp_layers_are_a_function_of_the_sequence(family: str, layout: str) -> None:
    """In float32, or with recurrences in float32."""
    check_state(*mtp_pair(hybrid(family), layout), _sequences(V)[:3], K, atol=1e-4)


def test_a_bias_may_forbid_all_tokens_of_the_head() -> None:
    """Then it drafts others, which it does not know; other rows do not change."""
    target, ids = as_lm(tiny_llama(num_layers=4)), [*range(0, 60, 5)]
    drafter = eagle3_drafter(target, token_ids=ids)
    bias = dict.fromkeys(ids, -torch.inf)
    requests = [request((1, 2, 3), max_new_tokens=16, logit_bias=bias), request((4, 5, 6), max_new_tokens=16)]
    plain = tokens(target, NO_DRAFTER, requests, GUMBEL, 0)
    assert tokens(target, drafter, requests, GUMBEL, 3) == plain


def test_an_entry_of_another_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a shared prefix has the token after it, which differs in the new sequence."""
    target = as_lm(tiny_llama(vocab_size=4, num_layers=4))
    drafter = eagle3_drafter(target)
    shared = [3, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 3] * 2
    sequences = [([*shared, first], [2, 0, 1, 3, 2, 1]) for first in (1, 2, 3)]
    check_state(target, drafter, sequences, 3)
    assign = ChainSession.assign

    def stale(self: ChainSession, slot: int, source: int | None, num_tokens: int) -> None:
        known = None if source is None else min(int(self._cached[source]), num_tokens)
        assign(self, slot, source, num_tokens)
        if known is not None:
            self._cached[slot] = known

    monkeypatch.setattr(ChainSession, "assign", stale)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, drafter, sequences, 3)


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
        check_no_look_ahead(target, altered_drafter(drafter, "wrong", mistake), (3, 1, 2), FEW, K)


def test_a_q_that_depends_on_neighbours_is_detected() -> None:
    target, drafter = _model()
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, altered_drafter(drafter, "wrong", _depend_on_width), _sequences(FEW), K)


def test_a_block_as_wide_as_the_round_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its width would be that of the row that drafts most."""
    target, drafter = _block()
    feed = head_states.feed_blocks

    def feed_wrong(head: LM, view_len: int, k: int, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head.model, "block_size", k + 1)
            return feed(head, view_len, k, *arguments)

    monkeypatch.setattr(head_states, "feed_blocks", feed_wrong)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, _sequences(FEW), K)


@pytest.mark.parametrize(
    ("name", "session", "what"),
    [
        ("dflash", head_states.BlockSession, "assign"),
        ("dflash", head_states.BlockSession, "observe"),
        ("suffix", SuffixSession, "assign"),
        ("translated", ModelSession, "forget"),
    ],
)
def test_a_stale_context_is_detected(name: str, session: type, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prefix hit or another sequence in the slot, or after rounds without drafts."""
    method = getattr(session, what)

    def wrong(self: Any, *arguments: Any) -> None:
        if what == "observe" and arguments[0].ids.shape[1] > 1:
            method(self, *arguments)

    monkeypatch.setattr(session, what, wrong)
    with pytest.raises((AssertionError, KeyError), match="is drafted, not|q is off by|^[0-9]+$"):
        check_state(*PAIRS[name](), _sequences(FEW), K)


@pytest.mark.parametrize("what", ["prefix", "rejection", "plain rounds"])
def test_a_stale_state_is_detected(what: str) -> None:
    """A session that keeps what it had in a slot, or rejected tokens, or does not read what was generated meanwhile."""
    target, drafter = llama_pair()

    def open_wrong(*arguments: Any) -> Any:
        session: Any = drafter.opens(*arguments)
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

    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, replace(drafter, opens=open_wrong), _sequences(60), K)
