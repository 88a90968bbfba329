"""A second start reads notes about a checkpoint, and runs the same model without Transformers' code."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from gguf_models import CASES as GGUF_CASES
from gguf_models import write_case
from native_cases import CASES, VOCAB, random_model
from outrider.decoder import Decoder
from outrider.models import cpu_weights
from outrider.models.notes import notes_about
from outrider.models.weights import weights_checksum
from outrider.native.engine import NativeForward
from outrider.runtime.cache import SlotCache
from outrider.runtime.stand_in import StandIn
from pairs import random_llama, save

_IDS = torch.randint(VOCAB, (2, 30), generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def _native_logits(native: NativeForward) -> Tensor:
    num_rows, length = _IDS.shape
    cache = SlotCache.empty(native.layer_shapes, num_rows, length)
    return native(_IDS, torch.arange(length).expand(num_rows, length), cache, length).logits


def _text(decoder: Decoder) -> tuple[int, ...]:
    return tuple(decoder.generate([[5, 6, 7]], temperature=0, max_new_tokens=12, ignore_eos=True)[0].token_ids)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "gguf"])
def test_the_second_start_has_a_stand_in(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "bfloat16":  # so that matrices stay in their type
        monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
        monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    file = tmp_path / "a"
    if name == "gguf":
        write_case(file, next(case for key, case in GGUF_CASES.items() if key.startswith("gemma3")))
    else:
        save(file, random_llama(tie_word_embeddings=name == "bfloat16").to(getattr(torch, name)))
    first, second = outrider.load(file), outrider.load(file)
    ours, theirs = second.target, first.target
    assert not isinstance(theirs.weights, StandIn) and isinstance(ours.weights, StandIn)
    assert _text(first) == _text(second)
    assert weights_checksum(ours.weights) == weights_checksum(theirs.weights)
    assert (ours.context_len, ours.vocab_size, first.eos_ids) == (theirs.context_len, theirs.vocab_size, second.eos_ids)
    assert second.tokenizer.get_vocab() == first.tokenizer.get_vocab()
    models: list[Any] = [ours.model, theirs.model]
    built, whole = ({**model.config.to_dict(), "_name_or_path": ""} for model in models)
    assert type(models[0]) is type(models[1]) and built == whole
    with torch.inference_mode():
        assert torch.equal(*(model(_IDS % 40).logits for model in models))
    assert not isinstance(outrider.load(file, execution="eager").target.weights, StandIn)
    if name == "float32":  # another file has other notes
        shutil.rmtree(file)
        save(file, random_llama(seed=1))
        assert not isinstance(outrider.load(file).target.weights, StandIn)


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, cases in CASES.items() for name in cases])
def test_notes_hold_what_the_engine_needs(family: str, name: str) -> None:
    """The stand-in for a model gives its logits, to the bit, whatever its configuration states."""
    model = random_model(family, CASES[family][name])
    notes = pickle.loads(pickle.dumps(notes_about(model, None)))
    stand_in = notes.stand_in(lambda: model)
    stand_in.fill({name: model.state_dict()[name] for name in notes.shapes})
    assert torch.equal(_native_logits(NativeForward(stand_in)), _native_logits(NativeForward(model)))
