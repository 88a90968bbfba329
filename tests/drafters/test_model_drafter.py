"""Draft models: greedy, unsure, and those that fill in mask tokens (PARD). (Their contract is in test_contract.py.)"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from contract import check_state, lead
from hybrids import V, hybrid, hybrid_lm
from outrider.api import load_drafter
from outrider.drafters.base import Rows
from outrider.drafters.draft_cache import DraftCache
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError, UnsupportedModel
from outrider.records import Draft
from pairs import embedded, random_llama, save, word_tokenizer
from toys import as_lm, perturbed, tiny_llama

MASK = 59


def test_a_target_drafts_for_itself() -> None:
    """With a window: all is accepted while it holds the sequence, and less beyond. The text is plain decoding's."""
    decoder = embedded(acceptance="gumbel")
    drafter = load_drafter(decoder, "self:window=32")
    assert drafter.name == "self:window=32" and drafter.models[0].weights is decoder.target.weights
    options: dict[str, Any] = {"max_new_tokens": 24, "seed": 5, "ignore_eos": True}
    shares = []
    for prompt in ("Once", "Once upon a time there was a king who had three sons. " * 6):
        both = replace(decoder, drafter=drafter, num_draft_tokens=2), decoder.plain()
        [got], [want] = (one.generate([prompt], **options) for one in both)
        assert got.token_ids == want.token_ids
        shares.append(got.stats.draft_acceptance_rate)
    assert shares[0] == 1.0 > shares[1] > 0.3
    wrong = ("self:window=5", f"self:window={decoder.target.context_len}", "fable-draft:min-prob=1.5")
    for name in wrong:
        with pytest.raises(OptionError, match="window|min-prob is a probability between 0 and 1"):
            load_drafter(decoder, name)


def test_a_slot_is_used_again_as_far_as_its_window_reaches_back() -> None:
    """What left the window before the shared part is computed again: a session used before drafts as a fresh one."""
    decoder = embedded(acceptance="gumbel")
    decoder = replace(decoder, drafter=load_drafter(decoder, "self:window=32"), num_draft_tokens=2)
    long = torch.randint(200, 900, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    short, options = [*long[:18], 60, 61], {"max_new_tokens": 10, "temperature": 0.0, "ignore_eos": True}
    with decoder.session(1) as fresh, decoder.session(1) as used:
        used.generate([long], **options)
        [want], [got] = (session.generate([short], **options) for session in (fresh, used))
    assert got.num_cached_tokens and got.token_ids == want.token_ids
    assert got.stats.draft_acceptance_rate == want.stats.draft_acceptance_rate > 0.5


def test_q_is_that_of_an_uncached_forward() -> None:
    """One forward over the sequence and K-1 mask tokens, at every beginning of a round."""
    model = tiny_llama()
    target, drafter = as_lm(model), model_drafter(as_lm(perturbed(model, 0.1), "draft"), mask_id=MASK)
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(60, (30,), generator=generator).tolist()
    led = lead(target, drafter, [(whole[:7], whole[7:])], 4, drawn=[[(i * i) % 60 for i in range(30)]])
    assert len(led.drafts) > 10
    for (_, length), (num, _, q) in led.drafts.items():
        ids = torch.tensor([[*whole[:length], *[MASK] * (num - 1)]])
        with torch.inference_mode():
            want = drafter.models[0].model(ids).logits[0, length - 1 :].softmax(-1)
        torch.testing.assert_close(q, want, rtol=0.0, atol=1e-12)


def test_entries_of_mask_tokens_are_not_taken_for_committed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they advance states. (Recurrences compute in float32.) The control counts them."""
    target = as_lm(tiny_llama(vocab_size=V))
    drafter = model_drafter(hybrid_lm(hybrid("qwen3_5_text"), "draft"), mask_id=3)
    ids = torch.randint(V, (30,), generator=torch.Generator().manual_seed(3)).tolist()
    sequences = [(ids[:1], ids[1:13]), (ids[13:18], ids[18:])]
    check_state(target, drafter, sequences, 3, atol=1e-4)
    propose = DraftCache.propose

    def keep(self: DraftCache, rows: Rows, *others: Any) -> Draft:
        draft = propose(self, rows, *others)
        self._cached[: len(rows)] += (rows.num_wanted - 1).clamp_min(0)
        return draft

    monkeypatch.setattr(DraftCache, "propose", keep)
    drafter = model_drafter(as_lm(tiny_llama(1, vocab_size=V), "draft"), mask_id=3)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, sequences, 3)


def test_a_model_is_recognised_by_its_configuration(tmp_path: Path) -> None:
    def folder(name: str, **keys: int) -> Path:
        model = random_llama()
        for key, value in keys.items():
            setattr(model.config, key, value)
        return save(tmp_path / name, model, word_tokenizer())

    target = folder("target")
    for keys, is_parallel in (({"pard_token": 90}, True), ({"ptd_token_id": 4}, True), ({}, False)):
        drafter = outrider.load(target, f"{folder('draft', **keys)}:greedy").drafter
        assert drafter.is_one_hot and bool(drafter.favoured_k) == (drafter.lm is None) == is_parallel
    decoder = outrider.load(target, folder("parallel", pard_token=90), acceptance="gumbel")
    (one,), (plain,) = (each.generate("w1 w2 w3", max_new_tokens=20, seed=1) for each in (decoder, decoder.plain()))
    assert one.text == plain.text and one.stats.num_draft_tokens > 0
    with pytest.raises(UnsupportedModel, match="states pard_token = 97, but has embeddings for 97 tokens"):
        outrider.load(target, folder("wrong", pard_token=97))
