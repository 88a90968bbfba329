"""Programs with weights in the blocks of GGUF files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ggml_blocks import block_bytes
from outrider.compile.compiled_lm import compiled_lm
from outrider.compile.pickling import weights_of
from outrider.compile.worker import _digest
from outrider.kernels import narrow_weight
from outrider.kernels.blocks import BLOCK_FORMS
from outrider.kernels.narrow_weight import NarrowWeight
from toys import as_lm, tiny_llama


def _products(lm: Any, few: Tensor, many: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
    """By the kernel, with a widened matrix, and of rows alone."""
    layer = lm.model.model.layers[0]
    of_few = [functional.linear(few, one.weight) for one in (layer.self_attn.q_proj, layer.self_attn.k_proj)]
    of_product = functional.linear(of_few[0], layer.self_attn.k_proj.weight)  # nothing is between them
    many_products = functional.linear(many, layer.self_attn.q_proj.weight)
    return *of_few, of_product, many_products, lm.model.model.embed_tokens(ids)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [False, True])
def test_they_are_read_by_the_kernel(rounds: bool) -> None:
    model = tiny_llama(hidden_size=256, intermediate_size=32, num_layers=1).float()
    attention = model.model.layers[0].self_attn
    for seed, (layer, number) in enumerate(
        ((model.model.embed_tokens, 8), (attention.q_proj, 12), (attention.k_proj, 12))
    ):
        form = replace(BLOCK_FORMS[number], rounds=rounds)
        stored = torch.from_numpy(block_bytes(tuple(layer.weight.shape), form.name, seed))
        layer.weight = nn.Parameter(NarrowWeight.of_blocks(stored, form), requires_grad=False)
    lm = as_lm(model)
    generator = torch.Generator().manual_seed(0)
    few, many = (torch.randn(number, 256, generator=generator) for number in (5, 200))
    ids = torch.tensor([3, 0, 3])
    got = compiled_lm(lm).run(_products, (), few, many, ids)
    for one, want in zip(got, _products(lm, few, many, ids), strict=True):
        torch.testing.assert_close(one, want, rtol=0.0, atol=1e-4 * float(want.abs().amax()))


def test_programs_follow_the_code_of_such_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the exported graph, from which a program's name is made, nothing else shows it."""
    exported = torch.export.export(nn.Linear(3, 3), (torch.zeros(1, 3),))
    before = _digest(exported, {}, {})
    assert _digest(exported, {}, {}) == before
    changed = tmp_path / "narrow_weight.py"
    changed.write_text(Path(str(narrow_weight.__file__)).read_text() + "# changed")
    monkeypatch.setattr(narrow_weight, "__file__", str(changed))
    assert _digest(exported, {}, {}) != before


def test_programs_follow_the_form_of_such_weights() -> None:
    """Q4_0 and Q4_K have equal bytes for as many numbers."""
    names = set()
    for number in (2, 12):
        model = nn.Embedding(32, 256)
        stored = torch.from_numpy(block_bytes((32, 256), BLOCK_FORMS[number].name, 0))
        weight = NarrowWeight.of_blocks(stored, BLOCK_FORMS[number])
        model.weight = nn.Parameter(weight, requires_grad=False)
        exported = torch.export.export(model, (torch.zeros(1, 3, dtype=torch.long),))
        names.add(_digest(exported, weights_of(model), {}))
    assert len(names) == 2
