"""Heads in GGUF files draft what llama.cpp drafts with the same files, and what the same heads draft from folders."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from contract import lead
from gguf_heads import (
    ASSISTANT,
    HEADS,
    IDS,
    MTP,
    PREFIX,
    write_assistant_pair,
    write_gguf_head,
    write_mtp_case,
    write_pair,
)
from outrider.api import load_drafter
from outrider.drafters.base import Drafter
from outrider.drafters.heads import head_drafter
from outrider.errors import ModelCorrupt, ModelError, UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.native.planned_model import PlannedModel
from outrider.runtime.lm import LM

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_heads.json").read_text())


def _q(target: LM, head: LM | Drafter, tokens: Sequence[int]) -> Tensor:
    """q of drafts along tokens after the prefix. [K, V]"""
    drafter = head_drafter(head) if isinstance(head, LM) else head
    _, ids, q = lead(target, drafter, [(IDS[:PREFIX], tokens)], len(tokens), temperature=1.0).drafts[0, PREFIX]
    assert ids == [*tokens] and q is not None
    return q.float()


def _golden(name: str, module: Any = None) -> tuple[list[int], Tensor]:
    rows = torch.tensor(_GOLDEN[name])
    if (selector := getattr(module, "candidate_selector", None)) is None:
        rows = rows[getattr(module, "num_before", 0) :]
        return IDS[PREFIX:][: len(rows)], rows.softmax(dim=-1)
    found, tokens, before, num = [], [], 0, selector.num_candidates
    for row in rows[1:]:  # candidates, and their scores after each of the candidates of the slot before
        scores = row[num:].view(num, num)[before]
        found.append(torch.full((48,), -1e9).scatter(0, row[:num].long(), scores).softmax(dim=-1))
        before = int(scores.argmax())
        tokens.append(int(row[before]))
    return tokens, torch.stack(found)


def _assert_close(found: Tensor, expected: Tensor, atol: float = 2e-4) -> None:
    assert expected.amax() > 0.1
    torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("name", HEADS)
def test_gguf_head_drafts_what_llama_cpp_drafts(name: str, tmp_path: Path) -> None:
    """And what the head of the folder, from which the file was made, drafts; natively and in PyTorch."""
    target, file, _ = write_pair(name, tmp_path)
    decoder = outrider.load(target)
    drafter = load_drafter(decoder, file)
    (head,) = drafter.models
    assert drafter.name == str(file) and head.backend.is_batch_invariant == (name != "DFlash 2")
    plain, folder = (load_head(resolve(str(one)), decoder.target) for one in (file, tmp_path / "head"))
    tokens, golden = _golden(name, head.model)
    for one in (head, plain):
        _assert_close(_q(decoder.target, one, tokens), golden)
    _assert_close(_q(decoder.target, plain, tokens), _q(decoder.target, folder, tokens), 1e-5)


@pytest.mark.parametrize("name", MTP)
def test_an_mtp_layer_drafts_what_llama_drafts(name: str, tmp_path: Path) -> None:
    """From the target's own file, whose name has no suffix; and beside a target that runs in its own code."""
    file = write_mtp_case(name, tmp_path).rename(tmp_path / "sha256-0a1b")
    decoder, again = outrider.load(file), outrider.load(file, execution="eager")
    assert isinstance(decoder.target.weights, PlannedModel) and not isinstance(again.target.weights, PlannedModel)
    (head,) = load_drafter(decoder, "mtp").models
    tokens, golden = _golden(name)
    _assert_close(_q(decoder.target, head, tokens), golden)
    other = load_drafter(again, "mtp").models[0].model.state_dict()
    assert all(torch.equal(other[key], value) for key, value in head.model.state_dict().items())


def test_an_assistant_drafts_what_llama_drafts(tmp_path: Path) -> None:
    """And as from the folder. Its window, in llama.cpp two tokens shorter than in Transformers, is not reached."""
    target, file = write_assistant_pair(tmp_path)
    decoder = outrider.load(target)
    drafter = load_drafter(decoder, file)
    (head,) = drafter.models
    folder = load_head(resolve(str(tmp_path / "head")), decoder.target)
    own, expected = head.model.state_dict(), folder.model.state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in own)
    tokens, golden = _golden(ASSISTANT)
    _assert_close(_q(decoder.target, drafter, tokens), golden, 2e-3)  # its GELU is a table of float16
    for keys, told in (
        ({"attention__shared_kv_layers": 2}, "attention.shared_kv_layers = 2"),
        ({"embedding_length_out": 48}, r"nextn.pre_projection.weight has the shape \[40, 96\]"),
        ({"attention__clamp_kqv": 8.0}, "attention.clamp_kqv = 8.0"),
    ):
        _, changed = write_assistant_pair(tmp_path, **keys)
        with pytest.raises(ModelError, match=told):
            load_drafter(decoder, changed)


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*HEADS, *MTP, ASSISTANT])
def test_golden_drafts_are_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36, which takes 12 minutes")
    from golden.make_gguf_heads import drafts_of

    found, golden = torch.tensor(drafts_of(name, tmp_path)), torch.tensor(_GOLDEN[name])
    torch.testing.assert_close(found, golden, rtol=1e-3, atol=1e-3)


def test_matrices_stay_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a target whose weights are as they are stored; else they are widened: to the same numbers."""
    target, _, _ = write_pair("EAGLE-3", tmp_path)
    file, _ = write_gguf_head(tmp_path / "q8.gguf", tmp_path / "head", form="Q8_0")
    wide = load_drafter(outrider.load(target, store="plain"), file).models[0].model.state_dict()
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    decoder = outrider.load(target)
    (head,) = load_drafter(decoder, file).models
    own = {key: value for key, value in head.model.state_dict().items() if isinstance(value, NarrowWeight)}
    in_blocks = {key for key, value in own.items() if value.blocks is not None}
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"} <= in_blocks
    assert head.backend.is_batch_invariant
    for key in wide:
        assert torch.equal(own[key].wide() if key in own else head.model.state_dict()[key], wide[key]), key
    plain = load_head(resolve(str(tmp_path / "head")), decoder.target)
    found, expected = (_q(decoder.target, one, IDS[PREFIX : PREFIX + 2]) for one in (head, plain))
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_gguf_heads_refuse_unknown_keys(tmp_path: Path) -> None:
    """Sizes are compared before anything is made that is as long as the keys state."""
    target, _, _ = write_pair("DFlash 2", tmp_path)
    decoder = outrider.load(target)
    with pytest.raises(UnsupportedModel, match="has no MTP layers: choose another draft"):
        load_drafter(decoder, "mtp")

    def refusal(kind: type[ModelError], **changes: Any) -> str:
        file, _ = write_gguf_head(tmp_path / "changed.gguf", tmp_path / "head", **changes)
        with pytest.raises(kind) as caught:
            load_drafter(decoder, file)
        return str(caught.value)

    sizes = dict.fromkeys(("attention.key_length", "attention.value_length", "rope.dimension_count"), 2**24 - 2)
    assert "weight has the shape" in refusal(ModelCorrupt, keys=sizes)
    ones = torch.ones(1).numpy()
    assert "states dflash.attention.value_scale" in refusal(UnsupportedModel, keys={"attention.value_scale": 2.0})
    assert "selector_hidden.weight has the shape" in refusal(ModelCorrupt, keys={"selector_rank": 7})
    assert "fc.weight has the shape" in refusal(ModelCorrupt, keys={"target_layers": [1, 2]})
    assert "too few tensors" in refusal(ModelCorrupt, keys={"block_count": 2**24})
    assert "states no dflash.target_layers" in refusal(ModelCorrupt, keys={"target_layers": None})
    assert "is a DSpark head, which is not run" in refusal(UnsupportedModel, added={"markov_w1.weight": ones})
    with pytest.raises(UnsupportedModel, match="is a DFlash draft, which works only together with its base model"):
        outrider.load(tmp_path / "head.gguf")
