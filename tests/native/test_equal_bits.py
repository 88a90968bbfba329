"""The result of a token depends on the tokens before it alone, to the bit. So a text is the same bytes with and without
a draft, alone and among others.

| may differ between two runs | test |
|---|---|
| tokens in a forward: K, and K that changes in a text; threads | test_tokens_at_once, test_any_forwards |
| pieces of a prompt; tokens that go through the layers together | test_prompts_in_pieces, test_any_forwards |
| parts of the softmax (256 places), sliding windows | all, with 300 tokens |
| other rows: number, lengths, texts, padding; tokens with the same expert | test_other_rows, test_any_forwards |
| the slot, and the size of the cache | test_prompts_in_pieces |
| a prefix from another slot, a row that moves; rejected tokens; anchors of states | test_any_forwards |
| form and arithmetic of weights, type of the cache | all |
| joins, leaves, cancellations, drafts, rules, options | tests/decoding/test_joining.py |
| a published file, and a server | benchmarks/same_bytes.py, benchmarks/soak.py |
| rows of a product, and the order of its sums | tests/cpu_kernels |
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import outrider
from native_cases import CASES, VOCAB, random_model
from native_weights import model_in
from outrider.native.engine import NativeForward
from outrider.runtime.cache import STRIDE, SlotCache
from pairs import embedded
from real_files import FILES, NAMES, PROMPTS

_PROMPT, _MORE = 190, 130  # tokens: the second beyond the first part of attention, and beyond a block of tokens
_IN_BLOCKS = {"in_proj_qkv": "Q4_1", "in_proj_z": "Q8_0", "_proj": "Q4_0", "embed_tokens": "Q8_0"}
_WHOLE_BLOCKS = CASES["qwen3_5_text"]["a state for each"] | {"linear_num_key_heads": 2, "linear_value_head_dim": 24}
_MIXED = {"gate_proj": "Q4_1", "proj": "Q4_0", "down_proj": "Q6_K", "embed_tokens": "Q8_0"}


_IN_LATENT = {"latent_proj": "Q8_0", "mixer.experts.up_proj": "Q4_0", "mixer.experts.down_proj": "Q5_1"}
_LATENT = CASES["nemotron_h"]["wide latent experts in groups"] | {"moe_latent_size": 64, "moe_intermediate_size": 32}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}


def _of(family: str, name: str) -> Callable[[], PreTrainedModel]:
    return lambda: random_model(family, CASES[family][name])


_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama, float32": _of("llama", "llama with biases, tied"),
    "gemma2, float32": _of("gemma2", "low caps"),
    "olmo2, float32": _of("olmo2", "plain"),
    "phi3, float32": _of("phi3", "a window"),
    "gpt2, float32": _of("gpt2", "plain"),
    "qwen3_5_text, float32": _of("qwen3_5_text", "wide values"),
    "qwen3_5_text, blocks and 8 bits": lambda: model_in(_IN_BLOCKS, 1, "qwen3_5_text", _WHOLE_BLOCKS),
    "lfm2, float32": _of("lfm2", "biases, untied"),
    "qwen2_moe, float32": _of("qwen2_moe", "plain"),
    "gpt_oss, float32": _of("gpt_oss", "plain"),
    "gemma4, float32": _of("gemma4_text", "plain"),
    "llama, bfloat16": lambda: model_in("bfloat16"),
    "llama, int8": lambda: model_in("int8"),
    "qwen3_moe, blocks and 8 bits": lambda: model_in(_MIXED | {"gate_up_proj": "Q4_K"}, 1, "qwen3_moe", **_EXPERTS),
    "nemotron_h, blocks and 8 bits": lambda: model_in(_IN_LATENT, 1, "nemotron_h", _LATENT),
    "llama, blocks": lambda: model_in(_MIXED, 0),
    "llama, blocks and 8 bits": lambda: model_in(_MIXED, 1),
    "llama, blocks and 15 bits": lambda: model_in(_MIXED, 2),
}
_TYPES = (torch.float32, torch.bfloat16)  # of caches
# Each model with one of them; and each case of each family, all but the first slow.
_RUNS = [(name, _TYPES[i % 2]) for i, name in enumerate(("llama, float32", *_MODELS))]
_CASES = [
    pytest.param(_of(family, name), _TYPES[i % 2], id=f"{family}, {name}", marks=[pytest.mark.slow] if j else [])
    for i, (family, cases) in enumerate(CASES.items())
    for j, name in enumerate(cases)
] + [pytest.param(_MODELS[name], dtype, id=name) for name, dtype in _RUNS if "float32" not in name]
_SHARED = 40  # first tokens of all texts
_LENGTHS = (300, 90, 60, 120)


@dataclass(frozen=True)
class _Run:
    """A native forward, and a text."""

    native: NativeForward
    ids: Tensor  # [PROMPT + MORE]
    dtype: torch.dtype  # of the cache

    def cache(self, num_rows: int = 1, capacity: int = _PROMPT + _MORE) -> SlotCache:
        shapes = tuple(replace(shape, dtype=self.dtype) for shape in self.native.layer_shapes)
        return SlotCache.empty(shapes, num_rows, capacity)

    def feed(self, cache: SlotCache, *bounds: int) -> Tensor:
        """Logits of the tokens between the bounds, fed in pieces. [T, V]"""
        found = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            places = torch.arange(begin, end)[None]
            found.append(self.native(self.ids[None, begin:end], places, cache, cache.capacity).logits[0])
        return torch.cat(found)


@pytest.fixture(scope="module", params=_RUNS, ids=lambda one: f"{one[0]}, {one[1]}")
def run(request: pytest.FixtureRequest) -> _Run:
    name, dtype = request.param
    ids = torch.randint(VOCAB, (_PROMPT + _MORE,), generator=torch.Generator().manual_seed(0))
    return _Run(NativeForward(_MODELS[name]()), ids, dtype)


@pytest.fixture(scope="module")
def alone(run: _Run) -> tuple[Tensor, SlotCache]:
    """Logits of all tokens, fed one by one, and their cache."""
    cache = run.cache()
    return run.feed(cache, *range(_PROMPT + _MORE + 1)), cache


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_tokens", "num_threads"), [(2, 1), (5, 2), (8, 3), (_MORE, 2)])
def test_tokens_at_once(
    num_tokens: int, num_threads: int, run: _Run, alone: tuple[Tensor, SlotCache], threads: Callable[[int], None]
) -> None:
    want, of_singles = alone
    cache, end = run.cache(), _PROMPT + _MORE
    threads(num_threads)
    got = run.feed(cache, 0, *range(_PROMPT, end, num_tokens), end)
    assert torch.equal(got, want)
    assert all(map(torch.equal, cache.storage, of_singles.storage))


def test_prompts_in_pieces(run: _Run, alone: tuple[Tensor, SlotCache]) -> None:
    """In a cache of any size, and in a slot of one, where nothing is written to the others."""
    want, _ = alone
    for pieces in ((_PROMPT,), (1, 100, _PROMPT), (127, 129, _PROMPT), (_PROMPT + _MORE,)):
        assert torch.equal(run.feed(run.cache(), 0, *pieces), want[: pieces[-1]])
    assert torch.equal(run.feed(run.cache(capacity=1000), 0, _PROMPT, _PROMPT + 5), want[: _PROMPT + 5])
    cache = run.cache(3)
    assert torch.equal(run.feed(cache.rows(1, 2), 0, _PROMPT), want[:_PROMPT])
    assert not any(store[::2].any() for store in cache.storage)


def test_other_rows(run: _Run, alone: tuple[Tensor, SlotCache]) -> None:
    """Of other lengths and texts, and padding; last and first."""
    want, _ = alone
    others = torch.randint(VOCAB, (3, _PROMPT + 5), generator=torch.Generator().manual_seed(1))
    for at in (0, 2):
        ids, cache = others.clone(), run.cache(3)
        ids[at] = run.ids[: _PROMPT + 5]
        lengths = torch.tensor([0, 40, _PROMPT - 3])
        lengths[at] = _PROMPT
        places = torch.arange(_PROMPT).expand(3, _PROMPT)
        got = run.native(ids[:, :_PROMPT], torch.where(places < lengths[:, None], places, -1), cache, _PROMPT).logits
        assert torch.equal(got[at], want[:_PROMPT])
        places = lengths[:, None] + torch.arange(5)
        got = run.native(ids[:, _PROMPT:], places, cache, _PROMPT + 5, num_logits=4).logits
        assert torch.equal(got[at], want[_PROMPT + 1 : _PROMPT + 5])


@pytest.mark.parametrize(("make", "dtype"), _CASES)
def test_any_forwards(make: Callable[[], PreTrainedModel], dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Texts in slots of a cache, which move, with forwards of any width and pieces of prompts; a prefix from another
    slot; tokens that are rejected behind those that stay. Anchors of states follow."""
    native, rng, generator = NativeForward(make()), random.Random(0), torch.Generator().manual_seed(0)
    texts = [torch.randint(1, VOCAB, (length,), generator=generator) for length in _LENGTHS]
    for ids in texts[1:]:
        ids[:_SHARED] = texts[0][:_SHARED]
    runs = [_Run(native, ids, dtype) for ids in texts]
    wants = [run.feed(run.cache(), *range(len(run.ids) + 1)) for run in runs]
    cache = runs[0].cache(len(texts) + 2)
    slots, done = [0, 3, 1, 5], [_SHARED, _SHARED, 0, 0]
    runs[0].feed(cache.first(1), 0, _SHARED)
    assert cache.take_over(0, _SHARED) == _SHARED
    cache.copy(0, slots[1], _SHARED)
    num_forwards = 0
    while any(number < length for number, length in zip(done, _LENGTHS, strict=True)):
        num_forwards += 1
        if rng.random() < 0.1:
            moved = rng.randrange(len(texts))
            slot = rng.choice([one for one in range(len(texts) + 2) if one not in slots])
            cache.copy(slots[moved], slot, done[moved])
            slots[moved] = slot
        is_prompt, width = rng.random() < 0.2, rng.choice((1, 2, 5, 8, 44))
        if num_forwards == 1:  # more than go through the layers together, so that a row does in two parts
            is_prompt, width = False, 44
        fed, places = torch.zeros(2, len(texts) + 2, width, dtype=torch.long)
        places -= 1
        kept = []
        for ids, slot, begin in zip(texts, slots, done, strict=True):
            piece = ids[begin : begin + (width if num_forwards == 1 else rng.randint(0, width))]
            kept.append(len(piece) if is_prompt else rng.randint(0, min(len(piece), 30)))
            fed[slot, : len(piece)] = piece
            fed[slot, kept[-1] : len(piece)] %= VOCAB - 1
            fed[slot, kept[-1] : len(piece)] += 1
            places[slot, : len(piece)] = torch.arange(begin, begin + len(piece))
        threads(rng.randint(1, 3))
        got = native(fed, places, cache, cache.capacity, keeps_finite=not is_prompt).logits
        for want, slot, begin, number in zip(wants, slots, done, kept, strict=True):
            assert torch.equal(got[slot, :number], want[begin : begin + number]), (num_forwards, slot)
        begins, is_fed = torch.tensor(done), (places >= 0).any(1)[slots]
        done = [begin + number for begin, number in zip(done, kept, strict=True)]
        if cache.has_anchors:
            anchors, has_states = cache.anchors[slots], cache.is_recurrent
            assert bool((anchors <= torch.tensor(done)).all())
            assert not has_states or bool(((begins - anchors < STRIDE) | ~is_fed).all())
    assert num_forwards > 30


# Texts

_GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}


def test_a_greedy_text_with_a_draft() -> None:
    """Of the embedded pair, alone and together."""
    decoder = embedded()
    assert decoder.target.execution.name == "native"
    prompts = ["Once upon a time", "The old man"]
    plain = [decoder.plain().generate([prompt], **_GREEDY)[0] for prompt in prompts]
    alone = [decoder.generate([prompt], num_draft_tokens=4, **_GREEDY)[0] for prompt in prompts]
    for drafted in (alone, decoder.generate(prompts, num_draft_tokens=7, **_GREEDY)):
        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        assert [one.text for one in drafted] == [one.text for one in plain]
        assert all(one.stats.num_accepted_draft_tokens for one in drafted)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_greedy_text_of_a_published_file(name: str) -> None:
    """With drafts from the text itself."""
    plain, drafted = outrider.load(FILES[name]), outrider.load(FILES[name], "suffix")
    prompts = [*PROMPTS[:3], "1, 2, 3, 1, 2, 3, 1, 2,"]
    texts = [one.generate(prompts, **_GREEDY) for one in (plain, drafted)]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
    assert [one.text for one in texts[0]] == [one.text for one in texts[1]]
    assert any(one.stats.num_accepted_draft_tokens for one in texts[1])
