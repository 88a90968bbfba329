"""Pickled weights are refused by name; where they are allowed, they are the same weights, and no code in them runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import outrider
from heads import mtp_pair, write_eagle3, write_mtp
from hybrids import hybrid
from outrider.errors import ModelCorrupt, UnsupportedModel
from outrider.models.heads.loading import load_head, load_mtp_of
from outrider.models.registry import resolve
from pairs import random_llama, save

MODEL, PICKLED = "model.safetensors", "pytorch_model.bin"
IDS = torch.tensor([[1, 2, 3, 5, 8]])


def pickle(folder: Path, *, more: Any = None) -> Path:
    """Put a pickled file in the place of one in safetensors."""
    tensors = load_file(folder / MODEL)
    (folder / MODEL).unlink()
    torch.save(tensors if more is None else {**tensors, "more": more}, folder / PICKLED)
    return folder


def refusal(location: Path, file: str = "pytorch_model.bin") -> str:
    return (
        f"the weights of {location} are in {file}, a pickle, which may run code: take them in safetensors; or, if you "
        "trust their author, --allow-pickle (in Python allow_pickle=True)"
    )


def refused(load: Callable[[], Any]) -> str:
    with pytest.raises(UnsupportedModel) as error:
        load()
    return str(error.value)


class Trap:
    """An object that writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def test_targets_and_drafts(tmp_path: Path) -> None:
    """Also in the shards of an index. A folder that has both is read as safetensors."""
    plain = save(tmp_path / "plain", random_llama())
    folder = pickle(save(tmp_path / "pickled", random_llama()))
    assert refused(lambda: outrider.load(folder)) == refusal(folder)
    assert refused(lambda: outrider.load(plain, folder)) == refusal(folder)
    with torch.no_grad():
        want = random_llama()(IDS).logits
        for allowed in (outrider.load(folder, allow_pickle=True), outrider.load(plain, folder, allow_pickle=True)):
            for lm in (allowed.target, *allowed.drafter.models):
                torch.testing.assert_close(lm.model(IDS).logits, want.to(lm.dtype), rtol=1e-4, atol=1e-4)
    (folder / PICKLED).rename(folder / "pytorch_model-1.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(random_llama().state_dict(), "pytorch_model-1.bin")}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert refused(lambda: outrider.load(folder)) == refusal(folder, "pytorch_model.bin.index.json")
    assert outrider.load(folder, allow_pickle=True).target.name == str(folder)
    (plain / "pytorch_model.bin").write_bytes(b"not a pickle")
    assert outrider.load(plain).target.name == str(plain)
    # Nor can a configuration name one in place of the weights that are there. (Transformers takes no other such name.)
    torch.save(load_file(plain / MODEL), plain / "adapter_model.bin")
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config | {"transformers_weights": "adapter_model.bin"}))
    assert refused(lambda: outrider.load(plain)) == refusal(plain, "adapter_model.bin")


def test_mtp_layers(tmp_path: Path) -> None:
    target, drafter = mtp_pair(hybrid("qwen3_5_text"), "qwen")
    write_mtp(tmp_path, target.model, layout="qwen")
    target.model.config._name_or_path = str(pickle(tmp_path))
    assert refused(lambda: load_mtp_of(target)) == refusal(tmp_path)
    found, want = load_mtp_of(target, allow_pickle=True).model.state_dict(), drafter.models[0].model.state_dict()
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("is_head", [False, True])
def test_allowed_pickles_run_no_code(tmp_path: Path, is_head: bool) -> None:
    """With the control: PyTorch's plain unpickler would."""
    folder, trap = save(tmp_path / "model", random_llama(num_layers=6)), tmp_path / "trap"
    target = outrider.load(folder)
    if is_head:
        write_eagle3(tmp_path / "head", target.target.model, layout="specforge")
        folder = tmp_path / "head"
    pickle(folder, more=Trap(trap))
    with pytest.raises(ModelCorrupt):
        if is_head:
            load_head(resolve(str(folder)), target.target, allow_pickle=True)
        else:
            outrider.load(folder, allow_pickle=True)
    assert not trap.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)["more"].close()
    assert trap.exists()
