"""Weights rounded to groups of 4 bits while a model is loaded: int4 on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import outrider
from outrider.kernels.blocks import GROUP_FORMS, in_groups
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.quantize import rounded_to_groups, widened_groups
from outrider.models.weights import num_bytes
from pairs import random_llama, save


def test_each_number_is_near() -> None:
    """Within a scale, but for those beyond the range. The weighted error is below that of the whole range in 15
    steps."""
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    wholes, scales, zeros = rounded_to_groups(weight)
    error = (weight - widened_groups(wholes, scales, zeros)).abs()
    steps = scales.float().abs().repeat_interleave(32, -1)
    inside = (wholes > 0) & (wholes < 15)
    assert bool((error <= steps)[inside].all())  # the scale is fitted after the integers are chosen
    groups = weight.unflatten(-1, (-1, 32))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    plain = (high - low) / 15
    zero = (-low / plain).round()
    by_range = ((((groups / plain).round() + zero).clamp(0, 15) - zero) * plain).flatten(-2)
    importance = (groups.abs() + groups.square().mean(-1, keepdim=True).sqrt()).flatten(-2)
    assert (importance * error.square()).mean() < 0.9 * (importance * (weight - by_range).square()).mean()


@pytest.mark.parametrize("number", [0.0, -3.0, 1e-7, 3e-9])
def test_groups_of_one_number(number: float) -> None:
    """Exact where float16 has the scale; nothing is divided by zero."""
    weight = torch.full((2, 64), number)
    weight[:, 1::2] = 0.0
    wholes, scales, zeros = rounded_to_groups(weight)
    assert bool(scales.isfinite().all())
    torch.testing.assert_close(widened_groups(wholes, scales, zeros), weight, rtol=2e-3, atol=2.0**-20)


def test_a_loaded_model_has_these_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in groups beside embeddings in bfloat16; with ``store="plain"``, the same numbers widened."""
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    model = random_llama(hidden_size=64, intermediate_size=128).to(torch.bfloat16)
    save(tmp_path, model)
    predicted: list[int] = []
    monkeypatch.setattr("outrider.models.loading.check_fits", lambda name, needed, *_: predicted.append(needed))
    kept, plain = outrider.load(tmp_path, quantization="int4"), outrider.load(f"{tmp_path}:int4", store="plain")
    assert predicted == [num_bytes(one.target.model) for one in (kept, plain)]
    embedding = kept.target.model.get_input_embeddings().weight
    assert isinstance(embedding, NarrowWeight) and embedding.stored.dtype == torch.bfloat16
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            one, other = (of.target.model.get_submodule(name).weight for of in (kept, plain))
            groups = NarrowWeight.of_blocks(in_groups(*rounded_to_groups(layer.weight)), GROUP_FORMS[32, True])
            assert one.blocks == replace(GROUP_FORMS[32, True], num_digits=2) and torch.equal(one.stored, groups.stored)
            assert type(other) is nn.Parameter and torch.equal(one.wide(), other)
    options = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    texts = [one.generate([[5, 6, 7]], **options)[0].token_ids for one in (kept, plain)]
    assert texts[0] == texts[1]
