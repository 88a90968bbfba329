"""Adapters of one base, and drafts of several targets: what they have in common is in memory once."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import outrider
from outrider.decoder import Decoder
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.checksums import weights_checksum
from outrider.models.shared_weights import share_weights
from outrider.runtime.tensor_parts import stored_tensors
from pairs import random_llama, save, word_tokenizer
from peft_adapters import WIDE, adapted

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
ATTENTION = peft.LoraConfig(**{**WIDE, "target_modules": ["q_proj", "v_proj"]})
IDS = [1, 2, 3, 5, 8, 13]


def addresses(model: nn.Module) -> dict[str, list[int]]:
    return {
        name: [one.data_ptr() for one in stored_tensors(weight)]
        for name, weight in model.named_parameters(remove_duplicate=False)
    }


def num_bytes(models: Iterable[nn.Module]) -> int:
    """What the weights of several models take together."""
    stored = [part for model in models for weight in model.parameters() for part in stored_tensors(weight)]
    return sum({part.data_ptr(): part.nbytes for part in stored}.values())


def changed(decoder: Decoder, base: Decoder) -> list[str]:
    theirs = addresses(base.target.model)
    return [name for name, places in addresses(decoder.target.model).items() if places != theirs[name]]


def base_and_adapters(path: Path, model: Callable[[], Any] = random_llama) -> list[Decoder]:
    """A base with two adapters of it, each with the same draft."""
    decoders: list[Decoder] = []
    for seed, folder in enumerate(("one", "other")):
        adapted(path, ATTENTION, model(), folder=folder, seed=seed)
    save(path / "draft", random_llama(hidden_size=16), word_tokenizer())
    for name in ("base", "one", "other"):
        decoders.append(outrider.load(path / name, path / "draft", device="cpu", shares_with=decoders))
    return decoders


def test_adapters_cost_what_they_change(tmp_path: Path) -> None:
    """And say the same as without sharing; so does the base, after they have been loaded."""
    base, *others = decoders = base_and_adapters(tmp_path)
    assert len({decoder.target.vocab_size for decoder in decoders}) == 1
    for decoder in others:
        names = changed(decoder, base)
        assert len(names) == 4 and all("q_proj" in name or "v_proj" in name for name in names)
        assert addresses(decoder.drafter.models[0].model) == addresses(base.drafter.models[0].model)
    num_changed = sum(w.numel() for name, w in base.target.model.named_parameters() if name in names)
    alone = num_bytes([base.target.model, base.drafter.models[0].model])
    together = num_bytes(lm.model for one in decoders for lm in (one.target, *one.drafter.models))
    assert together == alone + 2 * 4 * num_changed
    for name, decoder in zip(("base", "one", "other"), decoders, strict=True):
        own = outrider.load(tmp_path / name, device="cpu").target.model
        assert weights_checksum(decoder.target.model) == weights_checksum(own)
        assert torch.equal(decoder.target.model(torch.tensor([IDS])).logits, own(torch.tensor([IDS])).logits)


def test_an_adapter_leaves_matrices_as_the_base_stores_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where the arithmetic is in float32; what it changes is float32."""
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    base, *others = base_and_adapters(tmp_path, lambda: random_llama().bfloat16())
    for decoder in others:
        weights = dict(decoder.target.model.named_parameters())
        stored = {name: weight.stored.dtype for name, weight in weights.items() if isinstance(weight, NarrowWeight)}
        names = changed(decoder, base)
        assert len(names) == 4 and {stored.pop(name) for name in names} == {torch.float32}
        assert set(stored.values()) == {torch.bfloat16}
        wide = outrider.load(decoder.target.name, device="cpu", store="plain").target.model
        for name, weight in wide.named_parameters():
            assert torch.equal(weights[name].to(torch.float32), weight), name
        ids = torch.tensor([IDS])
        torch.testing.assert_close(decoder.target.model(ids).logits, wide(ids).logits, rtol=1e-4, atol=1e-5)


def test_only_if_the_base_stores_them_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of a base in float32 may have numbers of bfloat16 by chance."""
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)

    def model() -> Any:
        found = random_llama()
        weight = found.model.layers[0].mlp.up_proj.weight
        weight.data.copy_(weight.data.bfloat16())
        return found

    base, *others = base_and_adapters(tmp_path, model)
    assert [len(changed(decoder, base)) for decoder in others] == [4, 4]


class Matrix(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


def test_equal_means_the_same_bytes_in_the_same_form() -> None:
    numbers = torch.tensor([[0.0, 1.0], [2.0, torch.nan]])
    minus = numbers.clone()
    minus[0, 0] = -0.0
    different = [minus, numbers.double(), numbers[:, :1], numbers.bfloat16(), NarrowWeight(numbers, torch.float32)]
    for other in different:
        assert share_weights("one", Matrix(numbers.clone()), [Matrix(other.clone())]) == []
    assert len(share_weights("one", Matrix(numbers.clone()), [Matrix(minus), Matrix(numbers)])) == 1
    stored = [NarrowWeight(numbers.bfloat16(), torch.float32) for _ in range(2)]
    assert len(share_weights("one", Matrix(stored[0]), [Matrix(stored[1])])) == 1


def test_blocks_whose_rows_are_rounded_are_other_weights() -> None:
    """The same bytes, multiplied in another way."""
    exact, rounded = (replace(BLOCK_FORMS[8], num_digits=number) for number in (0, 1))
    stored = torch.arange(2 * exact.num_bytes, dtype=torch.uint8).view(2, -1)
    one, other, same = (NarrowWeight(stored, torch.float32, blocks=form) for form in (exact, rounded, exact))
    assert share_weights("one", Matrix(one), [Matrix(other)]) == []
    assert len(share_weights("one", Matrix(one), [Matrix(same)])) == 1


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    save(tmp_path, random_llama(tie_word_embeddings=True), word_tokenizer())
    one = outrider.load(tmp_path, device="cpu")
    other = outrider.load(tmp_path, device="cpu", shares_with=[one])
    assert changed(other, one) == []
    assert other.target.model.lm_head.weight is other.target.model.get_input_embeddings().weight
