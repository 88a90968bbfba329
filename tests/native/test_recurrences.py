"""Recurrent and convolutional layers in the native engine: a twin in float64; states that are never cropped; and what
the loop generates with them.

Source of the delta rule: ``torch_recurrent_gated_delta_rule`` of Transformers (models/qwen3_5), and Yang et al.
2412.06464, equation 10. Mamba-2 is compared with Transformers' code in test_families.py.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5

import gguf_models
import outrider
from native_cases import CASES, CONTEXT, VOCAB, native_lm, random_model
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.drafters.model import model_drafter
from outrider.errors import OptionError
from outrider.native.engine import NativeForward
from outrider.runtime.cache import STRIDE, SlotCache
from outrider.runtime.cache_shapes import WINDOW
from outrider.runtime.lm import LM
from outrider.sampling.rules import BLOCK
from toys import perturbed, request, run, tokens

FAMILIES = ["qwen3_5_text", "granitemoehybrid", "lfm2"]
_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_logits.json").read_text())
LENGTH = 230  # some rounds of the ring


def model_of(family: str) -> PreTrainedModel:
    return random_model(family, CASES[family]["plain"])


def drawn(*shape: int) -> Tensor:
    return torch.randint(1, VOCAB, shape, generator=torch.Generator().manual_seed(0))


# The twin


def delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """Token by token, in the type of the arguments."""
    shared = value.shape[2] // key.shape[2]
    unit_query, unit_key = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(shared, 2) for x in (query, key)
    )
    state = value.new_zeros(len(value), value.shape[2], key.shape[3], value.shape[3])
    found = []
    for t in range(value.shape[1]):
        state = state * g[:, t].exp()[..., None, None]
        added = beta[:, t, :, None] * (value[:, t] - torch.einsum("bhk,bhkv->bhv", unit_key[:, t], state))
        state = state + unit_key[:, t, :, :, None] * added[:, :, None]
        found.append(torch.einsum("bhk,bhkv->bhv", unit_query[:, t] * key.shape[3] ** -0.5, state))
    return torch.stack(found, 1), None


@pytest.mark.parametrize("name", CASES["qwen3_5_text"])
@torch.inference_mode()
def test_the_twin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of tiny outputs magnify rounding, so that Transformers' own float32 is further from the twin."""
    model, ids = random_model("qwen3_5_text", CASES["qwen3_5_text"][name]), drawn(2, 90)
    native = NativeForward(model)
    got = native(ids, torch.arange(90).expand(2, 90), SlotCache.empty(native.layer_shapes, 2, 90), 90).logits
    usual = model(input_ids=ids, use_cache=False).logits
    num_calls = 0

    def twin(*given: Tensor, **more: Any) -> tuple[Tensor, None]:
        nonlocal num_calls
        num_calls += 1
        return delta_rule(*given, **more)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", twin)
    exact = copy.deepcopy(model).double()(input_ids=ids, use_cache=False).logits
    assert num_calls == sum(shape.num_heads == 0 for shape in native.layer_shapes)
    error, usual_error = ((one - exact).square().mean().sqrt() / exact.std() for one in (got, usual))
    assert error < 1e-4 and error < 2 * usual_error


# States


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


@pytest.mark.parametrize(("family", "most"), [("qwen3_5_text", WINDOW - 3 - STRIDE), ("lfm2", WINDOW - 2)])
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


# The loop

PROMPTS = [(5, 9, 11, 3, 44), (1,), (7, 8) * 40, tuple(range(20, 41))]


@pytest.mark.parametrize("family", FAMILIES)
def test_texts(family: str) -> None:
    """Greedy, they are those of the model's own code. The draft has states, too. (Other schedules, and sampled
    texts: tests/decoding/test_joining.py.)"""
    model = model_of(family)
    target, eager = native_lm(model), LM(model, name="eager", vocab_size=VOCAB, context_len=CONTEXT)
    draft = model_drafter(native_lm(perturbed(model, 0.05), "draft"))
    greedy = [request(prompt, temperature=0.0, max_new_tokens=24 + 9 * i) for i, prompt in enumerate(PROMPTS)]
    outputs = run(target, draft, greedy, BLOCK, 4)
    assert [one.token_ids for one in outputs] == tokens(eager, NO_DRAFTER, greedy, BLOCK, 0)
    stats = [one.stats for one in outputs]
    assert 0 < sum(one.num_accepted_draft_tokens for one in stats) < sum(one.num_draft_tokens for one in stats)


def _texts(engine: Engine, requests: Sequence[Any]) -> list[tuple[int, ...]]:
    first, *_ = [engine.submit(one) for one in requests]
    texts: list[tuple[int, ...]] = [()] * len(requests)
    for round_ in iter(engine.step, None):
        for row in round_.rows:
            texts[row.row - first] += row.token_ids
    return texts


def test_a_text_that_goes_on_reuses_the_states() -> None:
    """As a conversation does, and as rows do that share a prompt."""
    target = native_lm(model_of("qwen3_5_text"))
    draft = model_drafter(native_lm(perturbed(target.model, 0.05), "draft"))
    engine = Engine(target, draft, BLOCK, num_slots=3, capacity=300, schedule=ConstantSchedule(3))
    text, cached = list(PROMPTS[2]), []
    for _ in range(3):
        one = request(text, temperature=0.0, max_new_tokens=20)
        engine.submit(one)
        rows = [row for round_ in iter(engine.step, None) for row in round_.rows]
        found = tuple(i for row in rows for i in row.token_ids)
        assert [found] == tokens(target, NO_DRAFTER, [one], BLOCK, 0)
        cached.append(sum(row.num_cached_tokens for row in rows))
        text += [*found, 3, 4, 5]
    assert cached == [0, 99, 122]
    shared = [request([*PROMPTS[2], 9], seed=i, max_new_tokens=9) for i in range(3)]
    assert _texts(engine, shared) == tokens(target, draft, shared, BLOCK, 3)


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "falcon-h1", "nemotron_h_moe, latent, groups"])
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """The logits that llama.cpp gives for the same file (tests/golden/make_gguf_logits.py)."""
    case, golden = gguf_models.CASES[name], torch.tensor(_GOLDEN[name])
    file = gguf_models.write_case(tmp_path / "tiny.gguf", case, gguf_models.random_case(case))
    target = outrider.load(file).target
    assert target.execution.name == "native"
    ids = torch.tensor([gguf_models.IDS])
    cache = target.new_cache(1, ids.shape[1])
    logits = target.forward(ids, torch.arange(ids.shape[1])[None], cache, cache.capacity)[0]
    found = logits[list(gguf_models.PLACES)]
    torch.testing.assert_close(found, golden, rtol=0.0, atol=1e-4 * float(golden.std()))
