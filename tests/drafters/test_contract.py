"""Every drafter keeps the contract of drafters, and mistakes in drafters break it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from assistants import assistant_pair
from block_heads import tiny_block_drafter
from contract import check_no_look_ahead, check_state
from heads import eagle3_drafter, mtp_pair
from hybrids import V, hybrid, hybrid_lm
from outrider.certify.exact import check_exactly
from outrider.drafters import heads
from outrider.drafters.base import NO_DRAFTER, Drafter, Rows, altered_drafter
from outrider.drafters.corpus import Corpus
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.heads import head_drafter
from outrider.drafters.hybrid import hybrid_drafter
from outrider.drafters.lookups import SuffixSession, ngram_drafter, suffix_drafter
from outrider.drafters.model import model_drafter, self_drafter
from outrider.drafters.translated import translated_drafter
from outrider.measure.teacher_forcing import Text
from outrider.models.executions import capture
from outrider.models.few_tokens import with_few_tokens
from outrider.options import Sampling
from outrider.records import Draft
from outrider.runtime import cuda_graphs
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL, RULES
from outrider.text.spelling import Spelling
from round_drafters import head
from toys import InTurn, as_lm, request, run, table_pair, tiny_llama, tokens

K = 3
FEW = 4  # tokens, of which all drafts are forced
CORPUS = [3, 1, 2, 0, 1, 2, 2, 0, 1]  # goes on as the prompt whose drafts are all forced


_SPELLING = Spelling((2, -1, 0, -1), ((2,), (1, 4), (0,), (4, 3, 1)), (3,))  # 0 and 2 have other ids
Pair = tuple[LM, Drafter]


def _target(num_layers: int = 2) -> LM:
    return as_lm(tiny_llama(vocab_size=FEW, num_layers=num_layers))


def _model(context_len: int = 256, **options: Any) -> Pair:
    draft = as_lm(tiny_llama(1, vocab_size=FEW), "draft", context_len)
    return _target(), model_drafter(draft, options=DraftOptions(**options))


def _with_tokens(num: int, unknown: tuple[int, ...], **options: Any) -> Pair:
    lm = as_lm(tiny_llama(1, vocab_size=num), "draft").with_vocabulary(FEW, unknown)
    return _target(), model_drafter(lm, **options)


def _suffix(corpus: Sequence[Sequence[int]]) -> Drafter:
    return suffix_drafter(Corpus(corpus), min_prob=0.02)


def _eagle3(context_len: int | None = None, **options: Any) -> Pair:
    """Two layers, norms of EAGLE-3.1, and three of the tokens."""
    target = _target(4)
    layers: dict[str, Any] = {"num_layers": 2, "fc_norm": True, "norm_output": True}
    drafter = eagle3_drafter(target, token_ids=[0, 1, 3], context_len=context_len, **layers)
    return target, head_drafter(drafter.models[0], DraftOptions(**options))


def _hybrid(pair: Pair, corpus: Sequence[int]) -> Pair:
    target, other = pair
    return target, hybrid_drafter(_suffix([corpus]), other, FEW, rival_acceptance=0.3)


def _block(**options: Any) -> Pair:
    target = _target(4)
    return target, tiny_block_drafter(target, **options)


def _few(pair: Pair, ids: Sequence[int], make: Callable[[LM], Drafter]) -> Pair:
    """The draft has logits for a few of the tokens only."""
    target, drafter = pair
    return target, make(with_few_tokens(drafter.models[0], torch.tensor(ids)))


PAIRS: dict[str, Callable[[], Pair]] = {
    "model": _model,
    "greedy": lambda: _model(is_greedy=True),
    "parallel": lambda: _with_tokens(FEW + 1, (), mask_id=FEW),
    "other tokens": lambda: _with_tokens(FEW - 1, (1, 3)),  # another one at 1, and none at 3
    "short context": lambda: _model(context_len=16),
    "sure": lambda: _model(min_prob=0.5),
    "eagle3": _eagle3,
    "eagle3, sure": lambda: _eagle3(min_prob=0.6),
    "assistant": lambda: assistant_pair(FEW),
    "assistant, centroids": lambda: assistant_pair(FEW, num_groups=2, min_prob=0.6),
    "mtp": lambda: mtp_pair(tiny_llama(vocab_size=FEW), "qwen"),
    "ngram": lambda: (_target(), ngram_drafter()),
    "suffix": lambda: (_target(), _suffix([[3, 1, 2, 2, 0, 1], [0, 1, 2, 3, 3]])),
    "head": lambda: ((target := _target()), head(target)),
    "translated": lambda: (_target(), translated_drafter(as_lm(tiny_llama(1, vocab_size=5), "draft"), _SPELLING)),
    "hybrid": lambda: _hybrid(_model(), CORPUS),
    "hybrid with a head": lambda: _hybrid(_eagle3(), CORPUS),
    "dflash": _block,
    "dflash2": lambda: _block(is_second=True, selector_top_k=3),
    "self": lambda: ((target := _target()), self_drafter(target, DraftOptions(window=16))),
    "eagle3, short context": lambda: _eagle3(context_len=6),
    "dflash, short context": lambda: _block(layers={"max_position_embeddings": 6}),
    "few tokens": lambda: _few(_model(), [1, 3], model_drafter),
    "few tokens of a head": lambda: _few(_eagle3(), [1, 2, 3], head_drafter),
}


def _sequences(vocab_size: int) -> list[tuple[list[int], list[int]]]:
    """Six; two begin with the prompt of another, one of them while the other is being generated."""
    generator = torch.Generator().manual_seed(3)

    def some(number: int) -> list[int]:
        return torch.randint(vocab_size, (number,), generator=generator).tolist()

    found = [(some(length), some(number)) for length, number in ((1, 5), (5, 9), (9, 18), (2, 5))]
    return [*found, ([*found[2][0], *found[2][1][:3]], some(8)), (found[2][0], some(8))]


@pytest.mark.parametrize("name", PAIRS)
def test_a_draft_does_not_look_ahead_and_is_a_function_of_the_sequence(name: str) -> None:
    pair = PAIRS[name]()
    check_no_look_ahead(*pair, prompt=(3, 1, 2, 0, 1, 2), vocab_size=FEW, k=K)
    check_state(*pair, _sequences(FEW), K)


PROMPTS = [(2, 3, 2, 3, 2), (1,), (2, 3) * 5, (1, 0, 2)]


@pytest.mark.each_execution
@pytest.mark.parametrize(
    "name", ["parallel", "short context", "eagle3", "assistant", "dflash2", "hybrid", "translated"]
)
def test_the_output_is_that_of_plain_decoding(name: str) -> None:
    """Also where rounds are started ahead. Rows join, and catch up after rounds of other K and of none."""
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


_OPTIONS = {"top_k": 2, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.2, "frequency_penalty": 0.5, "min_tokens": 2}
_OPTIONS |= {"repetition_penalty": 1.3, "logit_bias": {1: 0.3}, "stop_token_ids": (0,)}


@pytest.mark.parametrize("name", ["sure", "parallel", "eagle3", "dflash2", "assistant, centroids"])
def test_no_captured_step_waits_for_a_value(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called, required = cuda_graphs._called, partial(capture, is_required=True)

    def fake(inputs: Any, call: Any) -> Any:
        with FakeTensorMode(allow_non_fake_inputs=True):
            call()
        return called(inputs, call)

    monkeypatch.setattr(cuda_graphs, "_called", fake)
    target, drafter = PAIRS[name]()
    for options, rule in product(({"temperature": 0.0}, _OPTIONS), RULES.values()):
        asked = [request(ids, max_new_tokens=9, **options) for ids in PROMPTS]
        tokens(required(target), drafter.with_models(required), asked, rule, K)


@pytest.mark.parametrize("name", ["greedy", "suffix", "hybrid", "translated", "eagle3"])
def test_a_round_follows_the_targets_law(name: str) -> None:
    texts = [Text([1, 2, 3, 1, 2, 3, 1, 2]), Text([2] * 5)]
    for rule in RULES.values():
        report = check_exactly(*PAIRS[name](), Sampling(temperature=0.8, top_p=0.9), rule, texts)
        assert report.is_ok, report


@pytest.mark.parametrize(
    "make",
    [
        lambda: (as_lm(tiny_llama(vocab_size=V)), model_drafter(hybrid_lm(hybrid("qwen3_5_text"), "draft"))),
        lambda: ((target := hybrid_lm(hybrid("qwen3_5_text"))), tiny_block_drafter(target)),
        lambda: mtp_pair(hybrid("qwen3_5_text"), "qwen"),
        lambda: mtp_pair(hybrid("deepseek_v3"), "deepseek"),
    ],
)
def test_drafts_with_recurrences_are_a_function_of_the_sequence(make: Callable[[], Pair]) -> None:
    """Recurrences compute in float32."""
    check_state(*make(), _sequences(V)[:2], K, atol=1e-4)


def _cut_at_unlikely(rows: Rows, k: int, draft: Draft) -> Draft:
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


def test_mistakes_within_a_round_are_detected() -> None:
    target, drafter = table_pair(FEW)
    for mistake, message in ((_cut_at_unlikely, "depends on later tokens"), (_report_flatter, "drawn from another q")):
        with pytest.raises(AssertionError, match=message):
            check_no_look_ahead(target, altered_drafter(drafter, "wrong", mistake), (3, 1, 2), FEW, K)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, altered_drafter(drafter, "wrong", _depend_on_width), _sequences(FEW), K)


def test_a_block_as_wide_as_the_round_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its width would be that of the row that drafts most."""
    target, drafter = _block()
    feed = heads.feed_blocks

    def feed_wrong(head: LM, view_len: int, k: int, *arguments: Any) -> Any:
        monkeypatch.setattr(head.model, "block_size", k + 1)
        return feed(head, view_len, k, *arguments)

    monkeypatch.setattr(heads, "feed_blocks", feed_wrong)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, _sequences(FEW), K)


def _with_drafts_only(right: Any) -> Any:
    return lambda self, result: right(self, result) if result.places.shape[1] > 1 else None


def _keeping_rejected_tokens(right: Any) -> Any:
    def wrong(self: Any, rows: Rows, *others: Any) -> Draft:
        draft: Draft = right(self, rows, *others)
        self._cached[: len(rows)] += 1
        return draft

    return wrong


def test_an_entry_of_another_token_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last entry of a shared prefix has the token after it, which differs in the new sequence."""
    target = as_lm(tiny_llama(vocab_size=4, num_layers=4))
    drafter = eagle3_drafter(target)
    shared = [3, 1, 2, 0, 3, 1, 2, 0, 1, 1, 2, 3] * 2
    sequences = [([*shared, first, 2], [2, 0, 1, 3, 2, 1]) for first in (1, 2, 3)]
    check_state(target, drafter, sequences, 3)
    assign = DraftCache.assign

    def stale(self: DraftCache, slot: int, source: int | None, num_tokens: int) -> None:
        known = None if source is None else min(int(self._cached[source]), num_tokens)
        assign(self, slot, source, num_tokens)
        if known is not None:
            self._cached[slot] = known

    monkeypatch.setattr(DraftCache, "assign", stale)
    with pytest.raises(AssertionError, match="is drafted, not|q is off by"):
        check_state(target, drafter, sequences, 3)


@pytest.mark.parametrize(
    ("name", "session", "what", "wrong"),
    [
        ("dflash", heads.BlockSession, "assign", None),
        ("dflash", heads.BlockSession, "observe", _with_drafts_only),
        ("suffix", SuffixSession, "assign", None),
        ("translated", DraftCache, "forget", None),
        ("model", DraftCache, "assign", None),
        ("model", DraftCache, "catch_up", None),
        ("model", DraftCache, "propose", _keeping_rejected_tokens),
    ],
)
def test_stale_contexts_show(name: str, session: type, what: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a prefix hit or another sequence in the slot, after rounds without drafts, or after a rejection."""
    monkeypatch.setattr(session, what, wrong(getattr(session, what)) if wrong else lambda *arguments: None)
    with pytest.raises((AssertionError, KeyError), match="is drafted, not|q is off by|^[0-9]+$"):
        check_state(*PAIRS[name](), _sequences(FEW), K)
