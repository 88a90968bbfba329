"""Heads are loaded from all layouts, compute what their formats say, and are refused where they do not fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from golden.blocks import EAGLE3 as VARIANTS
from heads import LAYERS, mtp_pair, write_eagle3, write_mtp
from hybrids import hybrid
from outrider import load
from outrider.api import load_drafter
from outrider.drafters.heads import feed_entries, keep_states, stored_states
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
    keep_states(head, cache, features[:, :anchor], positions)
    found, tokens, states = [], ids[:, 1 : anchor + 1], stored_states(cache, positions)
    for step in range(num_steps):
        logits, states = feed_entries(head, 64, 1, cache, tokens, states, positions)
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


def test_a_head_sees_as_many_tokens_as_its_context(tmp_path: Path) -> None:
    """Of a target with a longer one, whatever its window; one layer, so that earlier tokens have no other way."""
    target = as_lm(tiny_llama(num_layers=4))
    write_eagle3(tmp_path, target.model, context_len=5, window=7)
    head = load_head(_spec(tmp_path), target)
    features = torch.randn(1, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(12)[None]
    seen = _logits(head, features, ids, 9, 2)
    for place in (2, 3, 4, 8):
        changed = features.clone()
        changed[0, place] += 1
        assert bool((_logits(head, changed, ids, 9, 2) == seen).all()) == (place < 4), place


def test_all_layouts_of_eagle3_are_the_same_head(tmp_path: Path) -> None:
    """An equal embedding is shared. Old files of speculators that leave a key out mean another value."""
    target = as_lm(tiny_llama(num_layers=6))
    features = torch.randn(1, 12, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    heads = {}
    for layout in ("speculators", "specforge", "safeailab"):
        folder = tmp_path / layout
        write_eagle3(folder, target.model, layout=layout, token_ids=[3, 5, 8])
        assert is_head(_spec(folder))
        heads[layout] = load_head(_spec(folder), target, allow_pickle=True)
    first, *others = (_logits(head, features, torch.arange(12)[None], 6, 3) for head in heads.values())
    assert all(torch.equal(first, other) for other in others)
    assert (first[0, [3, 5, 8]] > -100).all() and (first[0] > -100).sum() == 3
    assert heads["specforge"].model.features == LAYERS and heads["safeailab"].model.features == (2, 3, 3)
    embedding = target.model.get_input_embeddings().weight
    for layout, has_embedding in (("speculators", True), ("specforge", False)):
        folder = tmp_path / layout
        write_eagle3(folder, target.model, layout=layout, has_embedding=has_embedding)
        stated = json.loads((folder / "config.json").read_text())
        stated.pop("norm_before_residual", None)
        (folder / "config.json").write_text(json.dumps(stated))
        module = load_head(_spec(folder), target).model
        assert module.norm_before_residual == (layout == "speculators")
        assert (module.embed_tokens.weight is embedding) != has_embedding


def test_mtp_computes_what_transformers_computes(tmp_path: Path) -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(layers, "MtpModel", None), "forward_layer"):
        pytest.skip("this version of Transformers runs no MTP layer alone")
    from transformers.cache_utils import MtpCache

    target, drafter = mtp_pair(hybrid("deepseek_v3"), "deepseek")
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
    """As in FP8 checkpoints of Qwen: e4m3, and a scale for each block of a matrix. The target is widened, too."""
    size = 16, 16
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
    ("tensors", "message"),
    [
        ({"layers.0.attention_conv.base_kernel": torch.ones(3)}, "1 weights that do not belong"),
        ({"layers.0.self_attn.o_proj.weight": None}, "lacks 1 weights of the head, layers.0.self_attn.o_proj.weight"),
        ({"mask_hidden": torch.zeros(1, 1, 96)}, "is a P-EAGLE head, which is not run here: take an EAGLE-3"),
        ({"fc.weight": torch.zeros(32, 144)}, "is for another target: it reads 144 numbers"),
        ({"d2t": torch.full((60,), -50)}, "its d2t does not name tokens"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tensors: dict[str, Tensor | None], message: str, tmp_path: Path) -> None:
    target, path = as_lm(tiny_llama(num_layers=4)), tmp_path / "model.safetensors"
    write_eagle3(tmp_path, target.model)
    save_file({name: one for name, one in {**load_file(path), **tensors}.items() if one is not None}, path)
    with pytest.raises((ModelCorrupt, UnsupportedModel), match=message) as caught:
        load_head(_spec(tmp_path), target)
    assert "\n" not in str(caught.value)
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelCorrupt, match="cannot be read"):
        load_head(_spec(tmp_path), target)


def test_auto_is_the_first_draft_that_there_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """MTP layers of the checkpoint; a known draft on this machine; look-ups."""
    write_mtp(save(tmp_path, random_llama()), random_llama(), layout="qwen")
    with caplog.at_level("INFO", "outrider.draft"):
        assert load(tmp_path, "auto").drafter.name == f"{tmp_path}:mtp"
        assert load("fable", "auto").drafter.name == "fable-draft"
        assert load(tiny_llama(), "auto").drafter.name == "suffix"
        without = {name: one for name, one in load_file(tmp_path / "model.safetensors").items() if "mtp" not in name}
        save_file(without, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert load(tmp_path, "auto").drafter.name == "suffix"
    told = [record.message for record in caplog.records if record.name == "outrider.draft"]
    assert [one.replace(",", "").split()[1] for one in told] == ["mtp", "fable-draft", "suffix", "suffix"]
    int8 = Placement(quantization="int8")
    assert load("fable", "auto", draft_placement=int8).drafter.name.startswith("fable-draft")
    with pytest.raises(OptionError, match="takes no options"):
        load("fable", "auto:greedy")
    with pytest.raises(UnsupportedModel, match="was not loaded from files"):
        load(tiny_llama(), "mtp")
    decoder = load(tiny_llama(num_layers=4))
    write_eagle3(tmp_path / "head", decoder.target.model)
    with pytest.raises(OptionError, match="a head has the device and the type"):
        load_drafter(decoder, str(tmp_path / "head"), placement=int8)
