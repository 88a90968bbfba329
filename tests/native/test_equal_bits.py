"""The result of a token depends on the tokens before it alone, to the bit: a text is the same bytes with and without a
draft, alone and among others. (Joins, leaves and drafts: tests/decoding/test_joining.py; rows of a product:
tests/cpu_kernels.)"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from native_cases import CASES, VOCAB, native_forward, random_model
from native_weights import OF_SEVERAL, model_in
from outrider.native.engine import NativeForward
from outrider.runtime.cache import STRIDE, SlotCache


def _of(family: str, name: str) -> Callable[[], PreTrainedModel]:
    return lambda: random_model(family, CASES[family][name])


_MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{
        f"{family}, blocks and 8 bits": lambda family=family: model_in(
            OF_SEVERAL[family][0], 1, family, OF_SEVERAL[family][1]
        )
        for family in OF_SEVERAL
    },
    "llama, bfloat16": lambda: model_in("bfloat16"),
    "llama, int8": lambda: model_in("int8"),
    "llama, blocks": lambda: model_in(OF_SEVERAL["llama"][0], 0),
    "llama, blocks and 15 bits": lambda: model_in(OF_SEVERAL["llama"][0], 2),
}
_TYPES = (torch.float32, torch.bfloat16)  # of caches
_OFTEN = ("wide values", "low caps", "a window", "biases, untied")
# Each case of each family, most of all but the first slow, and other forms of weights.
_CASES = [
    pytest.param(
        *(_of(family, name), _TYPES[i % 2]),
        id=f"{family}, {name}",
        marks=[pytest.mark.slow] if j and name not in _OFTEN else [],
    )
    for i, (family, cases) in enumerate(CASES.items())
    for j, name in enumerate(cases)
] + [pytest.param(make, _TYPES[i % 2], id=name) for i, (name, make) in enumerate(_MODELS.items())]
_SHARED = 40  # first tokens of all texts
_LENGTHS = (300, 90, 60, 120)


@dataclass(frozen=True)
class _Run:
    """A native forward, and a text."""

    native: NativeForward
    ids: Tensor  # [T]
    dtype: torch.dtype  # of the cache

    def cache(self, num_rows: int = 1, capacity: int = 320) -> SlotCache:
        shapes = tuple(replace(shape, dtype=self.dtype) for shape in self.native.layer_shapes)
        return SlotCache.empty(shapes, num_rows, capacity)

    def feed(self, cache: SlotCache, *bounds: int) -> Tensor:
        """Logits of the tokens between the bounds, fed in pieces. [T, V]"""
        found = []
        for begin, end in zip(bounds, bounds[1:], strict=False):
            places = torch.arange(begin, end)[None]
            found.append(self.native(self.ids[None, begin:end], places, cache, cache.capacity).logits[0])
        return torch.cat(found)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("make", "dtype"), _CASES)
def test_equal_bits(make: Callable[[], PreTrainedModel], dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Texts in slots, which move, with forwards of any width and pieces of prompts; prefixes of other slots."""
    native, rng, generator = native_forward(make()), random.Random(0), torch.Generator().manual_seed(0)
    texts = [torch.randint(1, VOCAB, (length,), generator=generator) for length in _LENGTHS]
    for ids in texts[1:]:
        ids[:_SHARED] = texts[0][:_SHARED]
    runs = [_Run(native, ids, dtype) for ids in texts]
    wants = [run.feed(run.cache(), *range(len(run.ids) + 1)) for run in runs]
    cache = runs[0].cache(len(texts) + 2, 1000)
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
        if num_forwards in (1, 9):  # more than go through the layers together, so that a row does in two parts
            is_prompt, width = num_forwards == 9, (44, 150)[num_forwards == 9]
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
    assert num_forwards > 20
