"""Heads in GGUF files draft what llama.cpp drafts with the same files, and what the same heads draft from folders."""

import json
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
    NUM_STEPS,
    PREFIX,
    write_assistant_pair,
    write_gguf_head,
    write_mtp_case,
    write_pair,
)
from outrider.api import load_drafter
from outrider.decoder import Decoder
from outrider.drafters import chains
from outrider.drafters.head_states import BlockSession, feed_blocks
from outrider.drafters.heads import head_drafter
from outrider.errors import ModelCorrupt, ModelError, UnsupportedModel
from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models import cpu_weights
from outrider.models.heads.loading import load_head
from outrider.models.registry import resolve
from outrider.runtime.lm import LM
from outrider.runtime.stand_in import StandIn
from outrider.runtime.vocabulary import spread

_GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gguf_heads.json").read_text())
_SHARE = 1e-4  # of the spread of logits


def _features(decoder: Decoder, layers: tuple[int, ...]) -> Tensor:
    """Inputs of layers for all tokens before the drafts but the last. [1, T, F]"""
    model: Any = decoder.target.model
    found: dict[int, Tensor] = {}
    for i in layers:  # as outputs of the layers before: after the last one, Transformers tells normed states
        layer = model.get_decoder().layers[i - 1]
        layer.register_forward_hook(lambda _, given, output, i=i: found.update({i: output}))
    model(torch.tensor([IDS[: PREFIX - 1]]))
    return torch.cat([found[i] for i in layers], dim=-1)


@torch.inference_mode()
def _drafts(decoder: Decoder, head: LM) -> list[Tensor]:
    """What ``make_gguf_heads`` tells of a head."""
    module: Any = head.model
    features, last = _features(decoder, module.features), torch.tensor([IDS[PREFIX - 2 : PREFIX]])
    if module.block_size:
        session = head_drafter(head).open(1, 64, torch.device("cpu"), 4)
        assert isinstance(session, BlockSession)
        session._keep(session._cache, features, torch.arange(PREFIX - 1)[None])
        counts = torch.tensor([[PREFIX], [1]])
        logits, outputs = feed_blocks(head, 64, module.most_drafted, session._cache, last, *counts)
        found, before = [], last[0, -1:]
        for i in range(module.most_drafted):  # along the most probable tokens, if the token before corrects them
            here = logits[:, i]
            if module.candidate_selector is not None:
                here = module.candidate_selector(here, outputs[:, i], before)
            found.append(spread(here, module.token_ids, head.vocab_size)[0])
            before = found[-1].argmax(keepdim=True)
        return found
    cache, positions = head.new_cache(1, 64), torch.arange(PREFIX - 1)[None]
    chains.keep_states(head, cache, features, positions)
    tokens, states, found = torch.tensor([IDS[1:PREFIX]]), chains.stored_states(cache, positions), []
    for step in range(NUM_STEPS):
        logits, states = chains.feed_entries(head, 64, 1, cache, tokens, states, positions)
        found.append(spread(logits[0, -1], head.token_ids, head.vocab_size))
        tokens, states, positions = torch.tensor([[IDS[PREFIX + step]]]), states[:, -1:], positions[:, -1:] + 1
    return found


def _golden(name: str, head: LM) -> list[Tensor]:
    rows, module = torch.tensor(_GOLDEN[name]), head.model
    if (selector := getattr(module, "candidate_selector", None)) is None:
        return [*rows[getattr(module, "num_before", 0) :]]
    found, before, num = [], 0, selector.num_candidates
    for row in rows[1:]:  # candidates, and their scores after each of the candidates of the slot before
        scores = row[num:].view(num, num)[before]
        found.append(torch.full((head.vocab_size,), -1e9).scatter(0, row[:num].long(), scores))
        before = int(scores.argmax())
    return found


def _assert_close(found: list[Tensor], expected: list[Tensor], share: float = _SHARE) -> None:
    assert len(found) == len(expected) > 2
    for mine, its in zip(found, expected, strict=True):
        is_drafted = its > -1000
        assert torch.equal(mine > -1000, is_drafted)
        spread = float(its[is_drafted].std())
        assert spread > 0.1
        torch.testing.assert_close(mine[is_drafted], its[is_drafted], rtol=0.0, atol=share * spread)


@pytest.mark.parametrize("name", HEADS)
def test_it_drafts_what_llama_drafts(name: str, tmp_path: Path) -> None:
    """And what the head of the folder, from which the file was made, drafts; natively and in PyTorch."""
    target, file, _ = write_pair(name, tmp_path)
    decoder = outrider.load(target)
    drafter = load_drafter(decoder, file)
    (head,) = drafter.models
    assert drafter.name == str(file) and (head.native is None) == (name == "DFlash 2")
    plain, folder = (load_head(resolve(str(one)), decoder.target) for one in (file, tmp_path / "head"))
    for one in (head, plain):
        _assert_close(_drafts(decoder, one), _golden(name, one))
    _assert_close(_drafts(decoder, plain), _drafts(decoder, folder), 1e-5)


@pytest.mark.parametrize("name", MTP)
def test_an_mtp_layer_drafts_what_llama_drafts(name: str, tmp_path: Path) -> None:
    """From the target's own file, whose name has no suffix; and beside a target that is opened from notes."""
    file = write_mtp_case(name, tmp_path).rename(tmp_path / "sha256-0a1b")
    decoder, again = (outrider.load(file) for _ in range(2))
    assert isinstance(again.target.weights, StandIn) and not isinstance(decoder.target.weights, StandIn)
    (head,) = load_drafter(decoder, "mtp").models
    _assert_close(_drafts(decoder, head), _golden(name, head))
    other = load_drafter(again, "mtp").models[0].model.state_dict()
    assert all(torch.equal(other[key], value) for key, value in head.model.state_dict().items())


def test_an_assistant_drafts_what_llama_drafts(tmp_path: Path) -> None:
    """And the same weights as from the folder. Its window is not reached: llama.cpp's has two tokens fewer than that of
    Transformers."""
    target, file = write_assistant_pair(tmp_path)
    decoder = outrider.load(target)
    drafter = load_drafter(decoder, file)
    (head,) = drafter.models
    folder = load_head(resolve(str(tmp_path / "head")), decoder.target)
    own, expected = head.model.state_dict(), folder.model.state_dict()
    assert own.keys() == expected.keys() and all(torch.equal(own[key], expected[key]) for key in own)
    led = lead(decoder.target, drafter, [(IDS[:PREFIX], IDS[PREFIX : PREFIX + NUM_STEPS])], NUM_STEPS, temperature=1.0)
    _, _, q = led.drafts[0, PREFIX]
    golden = torch.tensor(_GOLDEN[ASSISTANT]).softmax(dim=-1)
    assert q is not None and q.shape == golden.shape and golden.amax() > 0.2
    torch.testing.assert_close(q.float(), golden, rtol=0.0, atol=2e-3)  # its GELU is a table of float16
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
def test_llama_drafts_what_is_golden(name: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs pip install llama-cpp-python==0.3.36, which takes 12 minutes")
    from golden.make_gguf_heads import drafts_of

    found, golden = torch.tensor(drafts_of(name, tmp_path)), torch.tensor(_GOLDEN[name])
    torch.testing.assert_close(found, golden, rtol=1e-3, atol=1e-3)


def test_matrices_stay_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a target whose weights are as they are stored; else they are widened: to the same numbers."""
    target, _, _ = write_pair("EAGLE-3", tmp_path)
    file, _ = write_gguf_head(tmp_path / "q8.gguf", tmp_path / "head", form_of=lambda _: "Q8_0")
    wide = load_drafter(outrider.load(target, store="plain"), file).models[0].model.state_dict()
    monkeypatch.setattr(cpu_weights, "_LEAST_NUMBERS", 1)
    monkeypatch.setattr(cpu_weights, "_LEAST_IN_ALL", 1)
    decoder = outrider.load(target)
    (head,) = load_drafter(decoder, file).models
    own = {key: value for key, value in head.model.state_dict().items() if isinstance(value, NarrowWeight)}
    in_blocks = {key for key, value in own.items() if value.blocks is not None}
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"} <= in_blocks
    assert head.native is not None
    for key in wide:
        assert torch.equal(own[key].wide() if key in own else head.model.state_dict()[key], wide[key]), key
    plain = load_head(resolve(str(tmp_path / "head")), decoder.target)
    found, expected = (_drafts(decoder, one)[0] for one in (head, plain))  # the next ones depend on its token
    assert (found - expected).abs().mean() < 0.1 * expected.std()


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
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
