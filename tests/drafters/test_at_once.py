"""Drafts of K tokens in one forward of an ordinary model that fills in mask tokens (PARD)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import outrider
from contract import check_state, lead
from hybrids import V, hybrid, hybrid_lm
from outrider.drafters.base import NO_DRAFTER, Drafter, Rows
from outrider.drafters.draft_options import DraftOptions
from outrider.drafters.model import ModelSession, model_drafter
from outrider.errors import UnsupportedModel
from outrider.records import Draft, Request, Stats
from outrider.runtime.lm import LM
from outrider.sampling.rules import GUMBEL
from pairs import random_llama, save, word_tokenizer
from toys import InTurn, as_lm, perturbed, request, run, tiny_llama, tokens

MASK = 59
PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 5, tuple(range(30)), (5, 6, 7)]


def _pair() -> tuple[LM, Drafter]:
    """A model, and itself with perturbed weights: right in the first token at most."""
    model = tiny_llama()
    return as_lm(model), model_drafter(as_lm(perturbed(model, 0.1), "draft"), mask_id=MASK)


def _requests(**options: object) -> list[Request]:
    return [request(ids, seed=i, max_new_tokens=12 + 4 * (i % 3), **options) for i, ids in enumerate(PROMPTS)]


@pytest.mark.each_execution
@pytest.mark.parametrize("is_greedy", [False, True])
def test_the_output_is_that_of_plain_decoding(is_greedy: bool) -> None:
    """Greedy, and sampled under ``gumbel`` with all kinds of options. Drafts are accepted, and rejected; rows with
    rounds of other K, and of none, catch up."""
    target, drafter = _pair()
    drafter = model_drafter(drafter.models[0], DraftOptions(is_greedy=is_greedy), MASK)
    for options, k in (
        ({"temperature": 0.0, "repetition_penalty": 1.3}, 4),
        ({"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.5, "min_tokens": 3}, InTurn(3, 0, 0, 0, 0, 0, 2)),
    ):
        outputs = run(target, drafter, _requests(**options), GUMBEL, k)
        assert [output.token_ids for output in outputs] == tokens(target, NO_DRAFTER, _requests(**options), GUMBEL, 0)
        stats = sum((output.stats for output in outputs), Stats())
        assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def test_q_is_that_of_an_uncached_forward() -> None:
    """One forward over the sequence and K-1 mask tokens, at every beginning of a round."""
    target, drafter = _pair()
    generator = torch.Generator().manual_seed(1)
    whole = torch.randint(60, (30,), generator=generator).tolist()
    k = 4
    led = lead(target, drafter, [(whole[:7], whole[7:])], k, drawn=[[(i * i) % 60 for i in range(30)]])
    assert len(led.drafts) > 10
    for (_, length), (num, _, q) in led.drafts.items():
        ids = torch.tensor([[*whole[:length], *[MASK] * (num - 1)]])
        with torch.inference_mode():
            want = drafter.models[0].model(ids).logits[0, length - 1 :].softmax(-1)
        torch.testing.assert_close(q, want, rtol=0.0, atol=1e-12)


def test_a_hybrid_drafts_in_one_forward() -> None:
    """Its states are never advanced by mask tokens. (Its recurrences compute in float32.)"""
    target = as_lm(tiny_llama(vocab_size=V))
    drafter = model_drafter(hybrid_lm(hybrid("qwen3_5_text"), "draft"), mask_id=3)
    check_state(target, drafter, _sequences()[:2], 3, atol=1e-4)


def _sequences() -> list[tuple[Sequence[int], Sequence[int]]]:
    generator = torch.Generator().manual_seed(3)
    lengths = ((1, 12), (5, 12), (9, 12), (2, 12))
    return [tuple(torch.randint(V, (n,), generator=generator).tolist() for n in pair) for pair in lengths]  # type: ignore[misc]


def test_entries_of_mask_tokens_taken_for_committed_ones_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the contract, which the drafter keeps otherwise (test_contract.py)."""
    propose = ModelSession.propose

    def keep(self: ModelSession, rows: Rows, *others: Any) -> Draft:
        draft = propose(self, rows, *others)
        self._cached[: len(rows)] += (rows.num_wanted - 1).clamp_min(0)
        return draft

    target, drafter = _pair()
    sequences = [([i % 60 for i in given], [i % 60 for i in rest]) for given, rest in _sequences()]
    monkeypatch.setattr(ModelSession, "propose", keep)
    with pytest.raises(AssertionError, match="q is off by"):
        check_state(target, drafter, sequences, 3)


def _folder(path: Path, **keys: int) -> Path:
    model = random_llama()
    for key, value in keys.items():
        setattr(model.config, key, value)
    return save(path, model, word_tokenizer())


def test_it_is_recognised_by_its_configuration(tmp_path: Path) -> None:
    target = save(tmp_path / "target", random_llama(), word_tokenizer())
    for i, (keys, mask_id) in enumerate([({"pard_token": 90}, 90), ({"ptd_token_id": 4}, 4), ({}, None)]):
        drafter = outrider.load(target, f"{_folder(tmp_path / str(i), **keys)}:greedy").drafter
        assert drafter.is_one_hot
        assert bool(drafter.favoured_k) == (drafter.lm is None) == (mask_id is not None)
    decoder = outrider.load(target, tmp_path / "0", acceptance="gumbel")
    (one,), (plain,) = (each.generate("w1 w2 w3", max_new_tokens=20, seed=1) for each in (decoder, decoder.plain()))
    assert one.text == plain.text and one.stats.num_draft_tokens > 0
    with pytest.raises(UnsupportedModel, match="states pard_token = 97, but has embeddings for 97 tokens"):
        outrider.load(target, _folder(tmp_path / "wrong", pard_token=97))
