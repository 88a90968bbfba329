"""The slot cache: after every round it holds what one fresh forward of the committed text would have put there. And
random models of many kinds give through it what one full forward gives. Their weights are large, so that attention
matters and logits are far from ties; everything is in float64. Where there is a sliding window it is shorter than
the text."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from outrider.decoding.batch import Row
from outrider.decoding.engine import Engine
from outrider.decoding.schedule import ConstantSchedule, Schedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.model import ModelSession, WindowSession, model_drafter
from outrider.errors import UnsupportedModel
from outrider.models.loading import Checkpoint, build_lm
from outrider.records import Request
from outrider.runtime import lm as lm_module
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.modules import cache_of
from outrider.sampling.rules import BLOCK, RULES, Rule
from toys import InTurn, as_lm, llama_pair, perturbed, random_model, request, run, tiny_llama

PROMPTS = [(5, 6, 7, 5, 6, 7, 5), (1,), (2, 3) * 12, tuple(range(40))]
NUM_TOKENS = [20, 15, 8, 30]


def _assert_holds(lm: LM, cache: SlotCache, row: int, ids: Sequence[int]) -> None:
    """The first places of a row hold the keys and values of these tokens, to 1e-12."""
    if not ids:
        return
    with torch.inference_mode():
        fresh = cache_of(lm.model(torch.tensor([list(ids)]), use_cache=True))
        assert len(fresh.layers) == len(cache.argument.layers) > 0
        for ours, theirs in zip(cache.argument.layers, fresh.layers, strict=True):
            for store, states in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                held = store[row, : len(ids)].transpose(0, 1)  # [H, T, D]
                torch.testing.assert_close(held, states[0], rtol=0.0, atol=1e-12)


def _engine(target: LM, drafter: Drafter, rule: Rule, schedule: Schedule, num_slots: int = 4) -> Engine:
    return Engine(target, drafter, rule, num_slots=num_slots, capacity=128, schedule=schedule, prefill_chunk=None)


def _open_rows(engine: Engine, requests: list[Request]) -> Iterator[list[Row]]:
    """After each round the rows that generate."""
    for one in requests:
        engine.submit(one)
    while engine.step() is not None:
        yield engine._batch.running


def _assert_draft_holds(engine: Engine, lm: LM, row: Row) -> int:
    """As many committed tokens as it counts; gives their number."""
    session = engine._runner.session
    assert isinstance(session, ModelSession)
    num_cached = min(int(session._cached[row.slot]), row.length - 1)
    _assert_holds(lm, session._cache, row.slot, row.token_ids[:num_cached])
    return num_cached


def _requests() -> list[Request]:
    return [request(ids, seed=i, max_new_tokens=NUM_TOKENS[i]) for i, ids in enumerate(PROMPTS)]


@pytest.mark.parametrize(("rule", "k", "num_slots", "is_pausing"), [("block", 4, 2, False), ("gumbel", 1, 4, True)])
def test_both_caches_hold_the_committed_text_after_every_round(
    rule: str, k: int, num_slots: int, is_pausing: bool
) -> None:
    """Four ragged rows that end at different times, all at once and in two slots. The target's cache holds all
    committed tokens but the last, the draft's as many of them as it counts."""
    target, drafter = llama_pair()
    schedule = InTurn(0, 0, k, k) if is_pausing else ConstantSchedule(k)
    engine = _engine(target, drafter, RULES[rule], schedule, num_slots)
    num_behind = set()
    for rows in _open_rows(engine, _requests()):
        for row in rows:
            _assert_holds(target, engine._runner.cache, row.slot, row.token_ids[:-1])
            num_behind.add(row.length - 1 - _assert_draft_holds(engine, drafter.lm, row))
    # After a rejection nothing is owed but the last token, after a full acceptance one more.
    assert num_behind >= {0, 1}
    assert is_pausing or num_behind == {0, 1}


def test_a_draft_of_shorter_context_keeps_its_window() -> None:
    """Its cache holds the window of each row that was just drafted for, from position 0 on, while windows begin anew
    and prompts are longer than the context."""
    target, drafter = llama_pair(draft_context_len=16)
    engine = _engine(target, drafter, RULES["block"], ConstantSchedule(4))
    session = engine._runner.session
    assert isinstance(session, WindowSession) and isinstance(session._inner, ModelSession)
    starts = set()
    for rows in _open_rows(engine, _requests()):
        for row in rows:
            start = session._starts[row.slot]
            starts.add(start)
            num_cached = min(int(session._inner._cached[row.slot]), row.length - 1 - start)
            assert 0 <= num_cached <= 16
            ids = row.token_ids[start : start + num_cached]
            _assert_holds(drafter.models[0], session._inner._cache, row.slot, ids)
    assert starts == {0, 8, 16, 24, 32, 40, 48, 56}


def test_slots_are_views_copies_and_zeros() -> None:
    """No second cache is made of a slot."""
    cache = as_lm(tiny_llama()).new_cache(3, 10)
    for store in cache.storage:
        store.copy_(torch.arange(store.numel()).reshape(store.shape))
    view = cache.rows(1, 3)
    assert view.capacity == cache.capacity
    for part, whole in zip(view.storage, cache.storage, strict=True):
        assert part.data_ptr() == whole[1].data_ptr() and part.is_contiguous()
    before = [store.clone() for store in cache.storage]
    cache.copy(0, 2, 4)
    for store, old in zip(cache.storage, before, strict=True):
        assert torch.equal(store[2, :4], old[0, :4]) and torch.equal(store[2, 4:], old[2, 4:])
        assert torch.equal(store[:2], old[:2])
    cache.erase(1)
    assert all(store[1].abs().sum() == 0 < store[0].abs().sum() for store in cache.storage)


# The forward itself.


def _random_ids(num_rows: int, length: int) -> Tensor:
    return torch.randint(60, (num_rows, length), generator=torch.Generator().manual_seed(0))


def test_a_cache_is_freed_when_it_is_let_go() -> None:
    """At once, not when the garbage collector comes by: on a GPU it is gigabytes, for each request."""
    target = LM(tiny_llama(), name="target", vocab_size=60, context_len=64)
    cache = target.new_cache(1, 64)
    target.forward(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), cache, 2)
    keys = weakref.ref(cache.argument.layers[0].keys)
    gc.disable()
    try:
        del cache
        assert keys() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("chunk", [5, 512])
def test_prefill_in_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From ragged starts to ragged ends, whatever the chunk; a row with nothing to do stays as it is."""
    monkeypatch.setattr(lm_module, "PREFILL_TOKENS", chunk)
    lm = as_lm(tiny_llama())
    ids, cache = _random_ids(4, 70), lm.new_cache(4, 70)
    middles, ends = torch.tensor([3, 0, 12, 70]), torch.tensor([20, 0, 66, 70])
    lm.prefill(ids, torch.zeros(4, dtype=torch.long), middles, cache, latest=0, num_columns=70)
    lm.prefill(ids, middles, ends, cache, latest=70, num_columns=54)
    for row, end in enumerate(ends.tolist()):
        _assert_holds(lm, cache, row, ids[row, :end].tolist())


V = 60
PROMPT = (2, 3, 4) * 5
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,  # tied, random models say the same token over and over
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "layer_types": MIXED}


_LLAMA4 = {**GROUPED, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 6} | {
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]
}
_NEO = {key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "num_attention_heads")} | {
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 100,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}
ARCHITECTURES: dict[str, tuple[type, Callable[..., Any], dict[str, Any]]] = {
    "Llama": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED),
    "Mistral": (tf.MistralForCausalLM, tf.MistralConfig, GROUPED | {"sliding_window": 6}),
    "Qwen2 sliding": (tf.Qwen2ForCausalLM, tf.Qwen2Config, GROUPED | _SLIDING),
    "Qwen3": (tf.Qwen3ForCausalLM, tf.Qwen3Config, GROUPED | {"head_dim": 8}),
    "Gemma2": (tf.Gemma2ForCausalLM, tf.Gemma2Config, GEMMA),
    "Gemma3": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, GEMMA),
    "Gemma3 all sliding": (
        *(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig),
        GEMMA | {"layer_types": ["sliding_attention"] * 3},
    ),
    "GPT-2": (tf.GPT2LMHeadModel, tf.GPT2Config, SHAPE | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "GPT-NeoX": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, SHAPE),
    "OPT": (tf.OPTForCausalLM, tf.OPTConfig, SHAPE | {"ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 1}),
    "Llama 4": (tf.Llama4ForCausalLM, tf.Llama4TextConfig, _LLAMA4),
}
# Windows that LM cannot read off the configuration: one in the modelling code alone, one in the configuration alone.
ODD_WINDOWS = {
    "GPT-Neo, whose local layers have a window of their own": (tf.GPTNeoForCausalLM, tf.GPTNeoConfig, _NEO),
    "Llama, whose window is not used": (tf.LlamaForCausalLM, tf.LlamaConfig, GROUPED | {"sliding_window": 100}),
}


def _model(name: str, seed: int = 3) -> tf.PreTrainedModel:
    model_class, make_config, options = (ARCHITECTURES | ODD_WINDOWS)[name]
    return random_model(model_class, make_config(**options), seed=seed)


def test_views_end_with_the_context() -> None:
    """GPT-Neo has a table of its 100 positions, and no view that is rounded up beyond them. The text is that of Hugging
    Face's ``generate``."""
    options = {**SHAPE, "max_position_embeddings": 100, "attention_types": [[["global", "local", "global"], 1]]}
    model = random_model(tf.GPTNeoForCausalLM, tf.GPTNeoConfig(**options), seed=3)
    target, draft = as_lm(model, context_len=100), as_lm(perturbed(model, 0.05), "draft", context_len=100)
    ids = torch.tensor([PROMPT])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=100 - len(PROMPT))
    one = request(PROMPT, temperature=0.0, max_new_tokens=200)
    for drafter in (NO_DRAFTER, model_drafter(draft)):
        output = run(target, drafter, [one], BLOCK, 3)[0]
        assert output.token_ids == tuple(text[0, len(PROMPT) :].tolist())
        assert drafter.name != "draft" or output.stats.num_accepted_draft_tokens > 0


def _distance(lm: LM, num_tokens: int = 40) -> float:
    """How far logits of ragged blocks are from one full forward."""
    ids = torch.randint(V, (3, num_tokens), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full: Tensor = lm.model(ids).logits
    cache, done, distance = lm.new_cache(3, num_tokens), torch.zeros(3, dtype=torch.long), 0.0
    for widths in torch.tensor([[5, 1, 8], [1, 0, 2], [0, 4, 1], [3, 3, 3], [7, 1, 0], [9, 9, 9], [2, 20, 2]]):
        offsets = torch.arange(int(widths.max()))
        positions = torch.where(offsets < widths[:, None], done[:, None] + offsets, -1)
        logits = lm.forward(
            ids.gather(1, positions.clamp_min(0)), positions, cache, lm.view_len(int(positions.max()) + 1, cache)
        )
        is_there = positions >= 0
        rows = full[torch.arange(3)[:, None], positions.clamp_min(0)]
        distance = max(distance, (logits - rows)[is_there].abs().max().item())
        done = done + widths
    assert done.max() == 38
    return distance


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_ragged_blocks_equal_one_full_forward(name: str) -> None:
    """Logits to 1e-10, rows each at their own pace. That this sees a difference of one place in the window is shown
    below. (Llama 4 rotates in float32.)"""
    assert _distance(as_lm(_model(name))) < (1e-5 if name == "Llama 4" else 1e-10)


@pytest.mark.parametrize("name", ["Mistral", "Gemma3", "Llama 4"])
def test_a_window_off_by_one_shows(name: str) -> None:
    """The control: one place more or less in the mask."""
    field = "chunk" if name == "Llama 4" else "window"
    for size in (5, 7):
        lm = as_lm(_model(name))
        assert getattr(lm.visibility, field) == 6
        lm.visibility = replace(lm.visibility, **{field: size})
        assert _distance(lm) > 1e-3


@pytest.mark.parametrize("name", ODD_WINDOWS)
def test_a_text_beyond_the_window_is_right_or_the_model_refused(name: str) -> None:
    """The window is longer than the probe at loading, as real ones are; 200 tokens, four at a time."""
    model = _model(name, seed=0)
    try:
        lm = build_lm(Checkpoint("odd", model, tokenizer=None), V)
    except UnsupportedModel:
        return
    ids = torch.randint(V, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        full: Tensor = model(ids).logits
    cache = lm.new_cache(1, 200)
    for begin in range(0, 200, 4):
        positions = torch.arange(begin, begin + 4)[None]
        logits = lm.forward(ids[:, begin : begin + 4], positions, cache, lm.view_len(begin + 4, cache))
        torch.testing.assert_close(logits, full[:, begin : begin + 4], rtol=0.0, atol=1e-10)
