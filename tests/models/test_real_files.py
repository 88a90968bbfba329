"""Published files of models: tokens and ends are llama.cpp's, logits near its own (golden/make_llama.py)."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from golden.vocabularies import PAGE
from outrider.decoder import Decoder
from real_files import FILES, NAMES, PROMPTS

_GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "real.json").read_text())
_LLAMA_MEAN, _LLAMA_MOST = 0.01, 0.05  # KL divergence in nats from llama.cpp, which rounds activations to 8 bits

pytestmark = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(scope="module")
def decoder(name: str) -> Iterator[Decoder]:
    """As users load it: large matrices in the file's blocks, activations of 8 bits."""
    yield outrider.load(FILES[name])
    gc.collect()


@torch.inference_mode()
def _logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """Logits after each token, by the execution that users get. [T, V]"""
    lm = decoder.target
    assert lm.execution.name == "native"
    cache = lm.new_cache(1, len(ids))
    return lm.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache, lm.view_len(len(ids), cache))[0]


def _divergence(top: dict[str, float], log_probs: Tensor) -> float:
    """KL divergence of a distribution [V] from one whose most probable tokens are given; all others count as one."""
    p = torch.tensor([*top.values()], dtype=torch.float64).exp()
    q = log_probs.double().exp()[[*map(int, top)]]
    p, q = (torch.cat([probs, (1 - probs.sum(0, keepdim=True)).clamp(min=1e-9)]) for probs in (p, q))
    return float((p * (p / q).log()).sum())


def test_tokens_and_ends_are_those_of_llama(name: str, decoder: Decoder) -> None:
    for texts, want in ((PAGE, _GOLDEN[name]["page"]), (PROMPTS, _GOLDEN[name]["prompts"])):
        for text, ids in zip(texts, want, strict=True):
            assert decoder.encode(text) == ids, text
    assert sorted(decoder.eos_ids) == _GOLDEN[name]["ends"]


@pytest.mark.slow
def test_logits_are_near_those_of_llama(name: str, decoder: Decoder) -> None:
    golden = _GOLDEN[name]
    pairs = zip(golden["prompts"], golden["top"], strict=True)
    found = [_divergence(top, _logits(decoder, ids)[-1].log_softmax(-1)) for ids, top in pairs]
    assert sum(found) / len(found) < _LLAMA_MEAN and max(found) < _LLAMA_MOST
