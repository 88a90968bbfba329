"""Published files of models: tokens and ends are llama.cpp's, logits those of Transformers.

Transformers reads the file with code of its own; llama.cpp's answers are golden (golden/make_llama.py).
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
def test_logits_are_those_of_transformers_and_of_llama(name: str, decoder: Decoder) -> None:
    """With weights widened, and in the file's blocks, whose sums have another order, without rounding; with it they are
    near those of llama.cpp."""
    golden, file = _GOLDEN[name], FILES[name]
    reference: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    for ours in (outrider.load(file, store="plain"), outrider.load(f"{file}:a32")):
        for ids in golden["page"][:5]:
            with torch.inference_mode():
                want = reference(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(_logits(ours, ids), want, rtol=0.0, atol=1e-4 * float(want.std()))
    pairs = zip(golden["prompts"], golden["top"], strict=True)
    found = [_divergence(top, _logits(decoder, ids)[-1].log_softmax(-1)) for ids, top in pairs]
    assert sum(found) / len(found) < _LLAMA_MEAN and max(found) < _LLAMA_MOST


@pytest.mark.oracle
def test_llama_gives_what_is_golden(name: str) -> None:
    pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36, which takes 12 minutes")
    from golden.make_llama import stated_of

    found, golden = stated_of(FILES[name]), _GOLDEN[name]
    assert [found[key] for key in ("page", "prompts", "ends")] == [golden[key] for key in ("page", "prompts", "ends")]
    for now, then in zip(found["top"], golden["top"], strict=True):
        log_probs = torch.full((1 + max(map(int, [*now, *then])),), -20.0)
        log_probs[[*map(int, now)]] = torch.tensor([*now.values()])
        assert _divergence(then, log_probs) < _LLAMA_MOST
