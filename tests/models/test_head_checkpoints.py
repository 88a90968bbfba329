"""Heads are loaded from all layouts, compute what their formats say, and are refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
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
    only_mtp,
    write_assistant_pair,
    write_gguf_head,
    write_mtp_case,
    write_pair,
)
from golden.make_eagle3 import VARIANTS
from heads import LAYERS, mtp_pair, write_eagle3, write_mtp
from hybrids import hybrid
from native_cases import VOCAB, random_model
from outrider import load
from outrider.api import load_drafter
from outrider.decoder import Decoder
from outrider.drafters import chains
from outrider.drafters.head_states import BlockSession, feed_blocks
from outrider.drafters.heads import head_drafter
from outrider.errors import ModelCorrupt, ModelError, OptionError, UnsupportedModel
from outrider.models.executions import beside
from outrider.models.heads.loading import is_head, load_head, load_mtp_of
from outrider.models.loading import Checkpoint, build_lm
from outrider.models.registry import ModelSpec, Placement, resolve
from outrider.runtime.lm import LM
from outrider.runtime.stand_in import StandIn
from outrider.runtime.vocabulary import spread
from pairs import random_llama, save
from toys import as_lm, tiny_llama

GOLDEN = Path(__file__).parents[1] / "golden" / "eagle3.safetensors"


def _spec(folder: Path) -> ModelSpec:
    return ModelSpec(name="head", path=folder)


@torch.inference_mode()
def _logits(head: LM, features: Tensor, ids: Tensor, anchor: int, num_steps: int) -> Tensor:
    """Logits of drafts along given tokens, from the features of the tokens before ``anchor``. [num_steps, V]"""
    cache = head.new_cache(1, 64)
    positions = torch.arange(anchor)[None]
    chains.keep_states(head, cache, features[:, :anchor], positions)
    found, tokens, states = [], ids[:, 1 : anchor + 1], chains.stored_states(cache, positions)
    for step in range(num_steps):
        logits, states = chains.feed_entries(head, 64, 1, cache, tokens, states, positions)
        found.append(spread(logits[0, -1], head.token_ids, head.vocab_size))
        states, tokens = states[:, -1:], ids[:, anchor + step + 1, None]
        positions = positions[:, -1:] + 1
    return torch.stack(found)


@pytest.mark.parametrize("variant", VARIANTS)
def test_eagle3_computes_what_speculators_computes(variant: str, tmp_path: Path) -> None:
    golden = load_file(GOLDEN)
    target = as_lm(tiny_llama(num_layers=4))
    write_eagle3(tmp_path, target.model, token_ids=list(range(1, 60, 2)), **VARIANTS[variant])
    path = tmp_path / "model.safetensors"
    save_file({name: golden[f"head.{name}"] for name in load_file(path)}, path)
    head = load_head(_spec(tmp_path), target)
    for anchor in (1, 5, 17):
        found = _logits(head, golden["features"].double(), golden["ids"], anchor, 4)[:, 1::2]
        expected = golden[f"{variant}.logits"][:, anchor - 1]
        assert torch.allclose(found, expected.double(), rtol=0, atol=1e-5), anchor
        assert expected.std() > 0.1


@pytest.mark.parametrize("layout", ["specforge", "safeailab"])
def test_all_layouts_of_eagle3_are_the_same_head(layout: str, tmp_path: Path) -> None:
    target = as_lm(tiny_llama(num_layers=6))
    features = torch.randn(1, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(12)[None]
    heads = []
    for name in ("speculators", layout):
        write_eagle3(tmp_path / name, target.model, layout=name, token_ids=[3, 5, 8])
        assert is_head(_spec(tmp_path / name))
        heads.append(load_head(_spec(tmp_path / name), target, allow_pickle=layout == "safeailab"))
    first, second = (_logits(head, features, ids, 6, 3) for head in heads)
    assert torch.equal(first, second)
    assert (first[0, [3, 5, 8]] > -100).all() and (first[0] > -100).sum() == 3
    assert heads[1].model.features == ((2, 3, 3) if layout == "safeailab" else LAYERS)


def test_an_mtp_layer_in_eight_bits_is_widened(tmp_path: Path) -> None:
    target, _ = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    write_mtp(tmp_path, target.model, layout="qwen")
    path, file = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, meant = load_file(path), dict[str, Tensor]()
    for name in [name for name, value in tensors.items() if name.startswith("mtp.") and value.ndim == 2]:
        scales = 0.01 + torch.rand([-(-one // 16) for one in tensors[name].shape])
        tensors[name], tensors[f"{name}_scale_inv"] = tensors[name].to(torch.float8_e4m3fn), scales
        rows, columns = (torch.arange(one) // 16 for one in tensors[name].shape)
        meant[name.removeprefix("mtp.")] = tensors[name].float() * scales[rows[:, None], columns]
    save_file(tensors, path, metadata={"format": "pt"})
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"weight_block_size": [16, 16]}}))
    target.model.config._name_or_path = str(tmp_path)
    head = load_mtp_of(target)
    for name, value in meant.items():
        assert torch.equal(head.model.state_dict()[name], value.to(target.dtype)), name


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({}, {"layers.0.attention_conv.base_kernel": torch.ones(3)}, "1 weights that do not belong"),
        ({}, {"layers.0.self_attn.o_proj.weight": None}, "lacks 1 weights of the head, layers.0.self_attn.o_proj"),
        ({}, {"fc.weight": None}, "in a layout that is not known"),
        ({}, {"mask_hidden": torch.zeros(1, 1, 96)}, "is a P-EAGLE head, which is not run here: take an EAGLE-3"),
        ({}, {"lm_head.weight": torch.zeros(50, 32)}, "logits for 50 tokens, and no d2t"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, {}, r"it reads layers \(1, 2, 9\) of 4"),
        ({}, {"d2t": torch.full((60,), 1000)}, "its d2t does not name tokens"),
        ({"layer_types": ["chunked_attention"]}, {}, "of the types chunked_attention, with the window None"),
    ],
)
def test_heads_that_do_not_fit_are_refused_in_one_line(
    changes: dict[str, Any], tensors: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    target = as_lm(tiny_llama(num_layers=4))
    write_eagle3(tmp_path, target.model)
    path, file = tmp_path / "model.safetensors", tmp_path / "config.json"
    kept = {name: one for name, one in {**load_file(path), **tensors}.items() if one is not None}
    save_file(kept, path)
    stated = json.loads(file.read_text())
    own = stated["transformer_layer_config"] if changes.keys() & {"model_type", "layer_types"} else stated
    own.update(changes)
    file.write_text(json.dumps(stated))
    with pytest.raises((ModelCorrupt, UnsupportedModel), match=message) as caught:
        load_head(_spec(tmp_path), target)
    assert "\n" not in str(caught.value)


def test_auto_is_the_first_draft_that_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MTP layers of the checkpoint; a known draft on this machine; look-ups."""
    write_mtp(save(tmp_path, random_llama()), random_llama(), layout="qwen")
    with caplog.at_level("INFO", "outrider.draft"):
        assert load(tmp_path, "auto").drafter.name == f"{tmp_path}:mtp"
        assert load("fable", "auto").drafter.name == "fable-draft"
        assert load(tiny_llama(), "auto").drafter.name == "suffix"
    for name in ("mtp", "fable-draft", "suffix"):
        assert f"draft: {name}" in caplog.text
    with pytest.raises(OptionError, match="takes no options"):
        load("fable", "auto:greedy")


def test_options_that_a_draft_does_not_take_are_refused(tmp_path: Path) -> None:
    decoder = load(tiny_llama(num_layers=4))
    write_eagle3(tmp_path, decoder.target.model)
    for draft, changes, message in (
        ("suffix:min-prob=0.3", {}, "'suffix' takes no options"),
        (str(tmp_path), {"placement": Placement(quantization="int8")}, "a head has the device and the type"),
        (str(tmp_path), {"tokenizer": object()}, "has its own, or none"),
    ):
        with pytest.raises(OptionError, match=message):
            load_drafter(decoder, draft, **changes)
    name = f"{tmp_path}:min-prob=0.3:greedy"
    assert load_drafter(decoder, name).name == name == load_drafter(decoder, f"{tmp_path}:greedy:min-prob=0.3").name


_NUM, _STEPS = 11, 3
_EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "no embedding, few tokens": {"has_embedding": False, "token_ids": [*range(1, 90, 3)]},
    "normed residual": {"norm_before_residual": True, "num_layers": 2},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True, "layout": "specforge"},
    "normed features": {"norm_before_fc": True, "layout": "safeailab"},
    "a short context": {"context_len": 4, "num_layers": 2},
    "a window": {"window": 4, "num_layers": 2},
}


def _target(family: str, **fields: Any) -> LM:
    model = random_model(family, {"num_hidden_layers": 4, "hidden_size": 48} | fields)
    return build_lm(Checkpoint("target", model, tokenizer=None, execution="native"), VOCAB)


@torch.inference_mode()
def _native_results(head: LM, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and states of drafts along given tokens. [B, _STEPS, V], [B, _STEPS, H]"""
    cache = head.new_cache(len(ids), 64)
    positions = torch.arange(_NUM).repeat(len(ids), 1)
    chains.keep_states(head, cache, features, positions)
    found, tokens, states = [], ids[:, 1 : _NUM + 1], chains.stored_states(cache, positions)
    positions[0, :2] = -1  # a shorter sequence
    for step in range(_STEPS):
        logits, states = chains.feed_entries(head, 64, 1, cache, tokens, states, positions)
        states, tokens, positions = states[:, -1:], ids[:, _NUM + step + 1, None], positions[:, -1:] + 1
        found.append((logits, states))
    logits, states = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
    return logits, states


def _check(head: LM, target: LM) -> None:
    native = beside(head, target)
    assert native.native is not None and head.native is None
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (3, 20), generator=random)
    features = torch.randn(3, _NUM, len(head.model.features) * target.model.config.hidden_size, generator=random)
    found, expected = _native_results(native, ids, features), _native_results(head, ids, features)
    for mine, its in zip(found, expected, strict=True):
        known = its > -1000  # other tokens than the head's
        assert torch.equal(mine[~known], its[~known])
        assert (mine - its)[known].abs().max() < 1e-4 * its[known].std() and its[known].std() > 0.05
    alone = _native_results(native, ids[:1], features[:1])
    assert all(torch.equal(mine[:1], other) for mine, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("case", _EAGLE3)
def test_eagle3_natively(case: str, tmp_path: Path) -> None:
    target = _target("llama")
    write_eagle3(tmp_path, target.model, **_EAGLE3[case])
    _check(load_head(_spec(tmp_path), target, allow_pickle=True), target)


@pytest.mark.parametrize(("family", "layout"), [("qwen3", "qwen"), ("glm4", "deepseek")])
def test_mtp_natively(family: str, layout: str, tmp_path: Path) -> None:
    fields = {"tie_word_embeddings": False}
    write_mtp(tmp_path, _target(family, **fields).model, layout=layout)
    target = _target(family, **fields)
    target.model.config._name_or_path = str(tmp_path)
    _check(load_mtp_of(target), target)


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
        return _of_block(
            head, *feed_blocks(head, 64, module.most_drafted, session._cache, last, *torch.tensor([[PREFIX], [1]]))
        )
    cache, positions = head.new_cache(1, 64), torch.arange(PREFIX - 1)[None]
    chains.keep_states(head, cache, features, positions)
    tokens, states, found = torch.tensor([IDS[1:PREFIX]]), chains.stored_states(cache, positions), []
    for step in range(NUM_STEPS):
        logits, states = chains.feed_entries(head, 64, 1, cache, tokens, states, positions)
        found.append(spread(logits[0, -1], head.token_ids, head.vocab_size))
        tokens, states, positions = torch.tensor([[IDS[PREFIX + step]]]), states[:, -1:], positions[:, -1:] + 1
    return found


def _of_block(head: LM, logits: Tensor, outputs: Tensor) -> list[Tensor]:
    """Logits of the drafts; along the most probable tokens if the token before corrects them."""
    module: Any = head.model
    found, before = [], torch.tensor([IDS[PREFIX - 1]])
    for i in range(module.most_drafted):
        here = logits[:, i]
        if module.candidate_selector is not None:
            here = module.candidate_selector(here, outputs[:, i], before)
        found.append(spread(here, module.token_ids, head.vocab_size)[0])
        before = found[-1].argmax(keepdim=True)
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
    """From the target's own file, whose name has no suffix; from one with that layer alone, as converters write, too;
    and beside a target that is opened from notes, the second time."""
    file = write_mtp_case(name, tmp_path).rename(tmp_path / "sha256-0a1b")
    decoder, again = (outrider.load(file) for _ in range(2))
    assert isinstance(again.target.weights, StandIn) and not isinstance(decoder.target.weights, StandIn)
    (head,) = load_drafter(decoder, "mtp").models
    _assert_close(_drafts(decoder, head), _golden(name, head))
    others = load_drafter(decoder, only_mtp(file, tmp_path / "mtp.gguf")), load_drafter(again, "mtp")
    for key, value in head.model.state_dict().items():
        assert all(torch.equal(one.models[0].model.state_dict()[key], value) for one in others), key


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


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
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
    assert "a tensor blk.0.attn_sinks.weight, for" in refusal(UnsupportedModel, added={"blk.0.attn_sinks.weight": ones})
    assert "too few tensors" in refusal(ModelCorrupt, keys={"block_count": 2**24})
    assert "states no dflash.target_layers" in refusal(ModelCorrupt, keys={"target_layers": None})
    assert "is a DSpark head, which is not run" in refusal(UnsupportedModel, added={"markov_w1.weight": ones})
    with pytest.raises(UnsupportedModel, match="is a DFlash draft, which works only together with its base model"):
        outrider.load(tmp_path / "head.gguf")
