"""Heads are loaded from all layouts, compute what their formats say, and are refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from golden.make_eagle3 import VARIANTS
from heads import LAYERS, mtp_pair, write_eagle3, write_mtp
from hybrids import hybrid
from outrider import load
from outrider.api import load_drafter
from outrider.drafters import chains
from outrider.errors import ModelCorrupt, OptionError, UnsupportedModel
from outrider.models.heads.loading import is_head, load_head, load_mtp_of
from outrider.models.registry import ModelSpec, Placement
from outrider.runtime.lm import LM
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


def test_mtp_computes_what_transformers_computes(tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of Transformers runs no MTP layer alone")
    from transformers.cache_utils import MtpCache

    target, drafter = mtp_pair(hybrid("glm4_moe"), "deepseek")
    model: Any = target.model
    write_mtp(tmp_path, model, layout="deepseek")
    model.config.num_mtp_layers, model.config.dtype = 1, model.dtype
    model.config._name_or_path = str(tmp_path)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\..*"]  # there it knows published sizes only
    reference = layers.MtpModel.from_pretrained(model).to(model.dtype).eval()
    ids = torch.randint(97, (1, 14), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        states = model(ids, output_hidden_states=True).hidden_states[-1]  # after the final norm
        outputs = reference.forward_layer(
            0, states[:, :-1], torch.arange(1, 14)[None], MtpCache(config=reference.config), input_ids=ids[:, 1:]
        )
        expected = model.lm_head(outputs)[0]
    features: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(lambda _, args, output: features.append(output))
    with torch.inference_mode():
        model(ids)
    hook.remove()
    for anchor in (1, 6, 12):
        found = _logits(drafter.models[0], features[0], ids, anchor, 1)[0]
        assert torch.allclose(found, expected[anchor - 1], rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_an_mtp_layer_in_eight_bits_is_widened(tmp_path: Path) -> None:
    size = (16, 16)
    target, _ = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    write_mtp(tmp_path, target.model, layout="qwen")
    path, file = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, meant = load_file(path), dict[str, Tensor]()
    for name in [name for name, value in tensors.items() if name.startswith("mtp.") and value.ndim == 2]:
        weight = tensors[name]
        scales = 0.01 + torch.rand([-(-one // step) for one, step in zip(weight.shape, size, strict=True)])
        tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        rows, columns = (torch.arange(one) // step for one, step in zip(weight.shape, size, strict=True))
        meant[name.removeprefix("mtp.")] = tensors[name].float() * scales[rows[:, None], columns]
    save_file(tensors, path, metadata={"format": "pt"})
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "quantization_config": {"weight_block_size": list(size)}})
    )
    target.model.config._name_or_path = str(tmp_path)
    head = load_mtp_of(target)
    for name, value in meant.items():
        assert torch.equal(head.model.state_dict()[name], value.to(target.dtype)), name


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({}, {"layers.0.attention_conv.base_kernel": torch.ones(3)}, "1 weights that do not belong"),
        (
            {},
            {"layers.0.self_attn.o_proj.weight": None},
            "lacks 1 weights of the head, layers.0.self_attn.o_proj.weight",
        ),
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
    said = [
        " ".join(record.message.replace(",", "").split()[:2])
        for record in caplog.records
        if record.name == "outrider.draft"
    ]
    assert said == ["draft: mtp", "draft: fable-draft", "draft: suffix"]
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
