"""Recurrent and convolutional layers in the native engine: states that are never cropped. (Their numbers are compared
in test_families.py, texts in tests/decoding/test_joining.py.)"""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from native_cases import CASES, CONTEXT, drawn, native_lm, random_model
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.native.engine import NativeForward
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW
from outrider.sampling.rules import BLOCK
from toys import perturbed, request, run, tokens


def model_of(family: str) -> PreTrainedModel:
    return random_model(family, CASES[family]["a state for each" if family == "qwen3_5_text" else "plain"])


def steps(native: Any, ids: Tensor) -> Tensor:
    """Logits of the tokens fed one by one, each of which stays. [T, V]"""
    cache = SlotCache.empty(native.layer_shapes, 1, CONTEXT)
    fed = ((ids[t].view(1, 1), torch.tensor([[t]])) for t in range(len(ids)))
    return torch.cat([native(one, place, cache, CONTEXT).logits[0] for one, place in fed])


@torch.inference_mode()
def test_a_long_text_that_may_be_rejected() -> None:
    """Of more tokens than the ring keeps, the first cannot be taken back; of a prompt, none."""
    native, ids, places = NativeForward(model_of("qwen3_5_text")), drawn(1, 200), torch.arange(200)[None]
    want = steps(native, ids[0])
    for is_prompt in (False, True):
        cache = SlotCache.empty(native.layer_shapes, 1, CONTEXT)
        got = native(ids[:, :199], places[:, :199], cache, CONTEXT, keeps_finite=not is_prompt)
        assert torch.equal(got.logits[0], want[:199])
        first = 199 if is_prompt else 199 - WINDOW + 3
        assert cache.anchors.tolist() == [first]
        before = [store.clone() for store in cache.storage]
        with pytest.raises(IndexError, match="a position is out of range"):
            native(ids[:, first - 1 :], places[:, first - 1 :], cache, CONTEXT)
        with pytest.raises(IndexError):  # a place is left out
            native(ids[:, :2], torch.tensor([[first, first + 2]]), cache, CONTEXT)
        assert all(map(torch.equal, before, cache.storage))
        assert torch.equal(native(ids[:, first:], places[:, first:], cache, CONTEXT).logits[0], want[first:])


@torch.inference_mode()
def test_slots() -> None:
    """Copied, begun anew over what was there, and erased where their states are not finite."""
    lm, ids = native_lm(model_of("qwen3_5_text")), drawn(3, 60)
    want = torch.stack([steps(lm.native, row) for row in ids])
    cache = lm.new_cache(3, 100)
    ends, positions = torch.tensor([41, 0, 30]), torch.arange(60).expand(3, -1)
    lm.prefill(ids, torch.zeros_like(ends), ends, cache, latest=0, num_columns=41)
    assert cache.anchors.tolist() == ends.tolist()
    assert [cache.take_over(0, n) for n in (40, 41, 50)] == [0, 41, 50]
    cache.copy(0, 1, 41)
    for slot in (0, 1):
        logits = lm.forward(ids[:1, 41:], positions[:1, 41:], cache.rows(slot, slot + 1), 100)
        assert torch.equal(logits[0], want[0, 41:])
    for store in cache.storage[cache.num_token_stores : -1]:
        store[2] = torch.nan
    cache.erase(2)
    cache.copy(0, 0, 0)
    assert cache.anchors.tolist() == [0, 60, 0]
    cache.copy(2, 1, 0)
    starts = torch.zeros(3, dtype=torch.long)
    lm.prefill(ids, starts, starts + 20, cache, latest=0, num_columns=20)
    assert torch.equal(lm.forward(ids[:, 20:], positions[:, 20:], cache, 100), want[:, 20:])


@pytest.mark.parametrize(("family", "most"), [("qwen3_5_text", WINDOW - 3 - STRIDE), ("lfm2", WINDOW - 3)])
def test_how_many_tokens_may_be_drafted(family: str, most: int) -> None:
    """The inputs of all of them must be there together with those that the state lacks."""
    lm = native_lm(model_of(family))
    requests = [request((5, 9) * 40, temperature=0.0, max_new_tokens=130)]
    draft = model_drafter(native_lm(perturbed(lm.model, 0.001), "draft"))
    outputs = run(lm, draft, requests, BLOCK, most)
    assert [one.token_ids for one in outputs] == tokens(lm, NO_DRAFTER, requests, BLOCK, 0)
    assert max(row.num_drafted for one in outputs for row in one.rounds) == most
    with pytest.raises(OptionError, match=f"at most {most}"):
        tokens(lm, ngram_drafter(), requests, BLOCK, most + 1)
