"""Published files of models: tokens and ends are llama.cpp's, logits and greedy texts those of Transformers.

Transformers reads the file with code of its own; llama.cpp's answers are golden (golden/make_real.py).
"""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import outrider
from golden.vocabularies import PAGE
from outrider.certify.divergence import explain
from outrider.decoder import Decoder
from outrider.options import Sampling
from real_files import FILES, NAMES, PROMPTS

_GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden" / "real.json").read_text())
_LLAMA_MEAN, _LLAMA_MOST = 0.01, 0.05  # KL divergence in nats from llama.cpp, which rounds activations to 8 bits

pytestmark = pytest.mark.parametrize("name", NAMES, scope="module")


@pytest.fixture(scope="module")
def decoder(name: str) -> Iterator[Decoder]:
    """As users load it: large matrices in the file's blocks, activations of 8 bits."""
    yield outrider.load(FILES[name])
    gc.collect()


@pytest.fixture(scope="module")
def unrounded(name: str) -> Iterator[Decoder]:
    """The same with activations in float32, as Transformers has them."""
    yield outrider.load(f"{FILES[name]}:a32")
    gc.collect()


@pytest.fixture(scope="module")
def reference(name: str) -> Iterator[Any]:
    """Transformers' reading of the file, which is not ours."""
    file = FILES[name]
    yield AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    gc.collect()


@torch.inference_mode()
def _own_logits(decoder: Decoder, ids: list[int]) -> Tensor:
    """Logits after each token, by the execution that users get. [T, V]"""
    lm = decoder.target
    assert lm.execution.name == "native"
    cache = lm.new_cache(1, len(ids))
    return lm.forward(torch.tensor([ids]), torch.arange(len(ids))[None], cache, lm.view_len(len(ids), cache))[0]


def _divergence(top: dict[str, float], log_probs: Tensor) -> float:
    """KL divergence of a distribution from the one whose most probable tokens are given; all others count as one.

    Args:
        top: log-probabilities by id.
        log_probs: [V]
    """
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
def test_distributions_are_near_those_of_llama(name: str, decoder: Decoder) -> None:
    golden = _GOLDEN[name]
    found = [
        _divergence(top, _own_logits(decoder, ids)[-1].log_softmax(-1))
        for ids, top in zip(golden["prompts"], golden["top"], strict=True)
    ]
    assert sum(found) / len(found) < _LLAMA_MEAN and max(found) < _LLAMA_MOST


@pytest.mark.slow
def test_logits_and_greedy_texts_are_those_of_transformers(name: str, unrounded: Decoder, reference: Any) -> None:
    """Where a text parts, two tokens are so near to each other that rounding decides."""
    decoder, greedy = unrounded, Sampling(temperature=0.0, max_new_tokens=32)
    for ids in _GOLDEN[name]["page"][:5]:
        with torch.inference_mode():
            logits = reference(torch.tensor([ids])).logits[0]
        torch.testing.assert_close(_own_logits(decoder, ids), logits, rtol=0.0, atol=1e-4 * float(logits.std()))
    ends = {"eos_token_id": [*decoder.eos_ids], "pad_token_id": min(decoder.eos_ids)}
    num_equal = 0
    for number, text in enumerate(PROMPTS):
        ids = decoder.encode(text)
        [ours] = decoder.generate([ids], greedy)
        prompt = torch.tensor([ids])
        mask = torch.ones_like(prompt)
        texts = reference.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=32, **ends)
        want = texts[0, len(ids) :].tolist()
        found = explain(decoder.target, number, ids, want, ours.token_ids, greedy, num_draft_tokens=4)
        assert found is None or found.verdict == "numerics", (text, found)
        num_equal += found is None
    assert num_equal >= 0.8 * len(PROMPTS)
