"""Computes the logits of block heads with the packages that define their layouts, and writes blocks.safetensors.

    PYTHONPATH=tests:tests/support python tests/golden/make_blocks.py SPECULATORS DFLASH

The arguments are folders of unpacked sources: speculators 0.9.0 (its wheel) and dflash 0.1.0 (z-lab's; its sdist).
None of them need be installed.
"""

import importlib.abc
import importlib.machinery
import json
import sys
import tempfile
import types
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

import golden.blocks as blocks

_NOTHING = -1e4  # logit of tokens that cannot be drawn


class _Stub(types.ModuleType):
    """A package that is imported and not needed."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    names = ("openai", "hs_connectors", "aiohttp", "mooncake")

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        is_named = name.split(".")[0] in self.names
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_named else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _import_from(folders: Sequence[str]) -> None:
    """Make the packages importable."""
    sys.path[:0] = folders
    sys.meta_path.append(_Finder())
    known = metadata.version
    metadata.version = lambda name: "0.9.0" if name == "speculators" else known(name)


def _features(model: PreTrainedModel, layers: Sequence[int]) -> Tensor:
    """Hidden states of the text, as of Transformers. [1, L, F]"""
    states = model(input_ids=torch.tensor([blocks.TEXT]), output_hidden_states=True).hidden_states
    return torch.cat([states[i] for i in layers], dim=-1)


def _speculators(folder: Path, model: PreTrainedModel) -> Tensor:
    from speculators import SpeculatorModelConfig
    from speculators.model import SpeculatorModel

    model.save_pretrained(folder / "target")
    stated = json.loads((folder / "config.json").read_text())
    stated["speculators_config"] = {
        "algorithm": stated["speculators_model_type"],
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": blocks.BLOCK_SIZE - 1}],
        "verifier": {"name_or_path": str(folder / "target"), "architectures": ["LlamaForCausalLM"]},
    }
    (folder / "config.json").write_text(json.dumps(stated))
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = SpeculatorModel.from_pretrained(folder, config=config)
    head.load_verifier_weights()
    head = head.double().eval()
    ids, length = torch.tensor([blocks.TEXT]), len(blocks.TEXT)
    features = _features(model, config.aux_hidden_state_layer_ids)
    hidden, logits, _, _, places = head._backbone_forward(
        features,
        ids,
        torch.ones(1, length),
        torch.zeros(1, length, model.config.hidden_size).double(),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=length - blocks.BLOCK_SIZE,
    )
    size = blocks.BLOCK_SIZE
    rows = [places.view(-1, size)[:, 0].tolist().index(anchor) for anchor in blocks.ANCHORS]
    hidden, logits = hidden.view(-1, size, hidden.shape[-1])[rows], logits.view(-1, size, logits.shape[-1])[rows]
    first = 0 if config.sample_from_anchor else 1
    text = torch.tensor([blocks.TEXT[anchor : anchor + size] for anchor in blocks.ANCHORS])
    before = torch.cat((text[:, :1], text[:, :-1]), dim=1) if first else text
    if config.speculators_model_type == "dflash2":
        candidates, scores = head.candidate_selector.select(logits, hidden, before)
        logits = torch.full_like(logits, _NOTHING).scatter(-1, candidates, scores)
    return logits[:, first:]


def _zlab(folder: Path, model: PreTrainedModel) -> Tensor:
    from dflash.model import (
        DFlash2DraftModel,
        DFlashDraftModel,
        _draft_value,
        _raw_input_embeddings,
        extract_context_feature,
    )

    is_second = "DFlash2" in (folder / "config.json").read_text()
    kind = DFlash2DraftModel if is_second else DFlashDraftModel
    head = kind.from_pretrained(folder, dtype=torch.float64).eval()
    states = model(input_ids=torch.tensor([blocks.TEXT]), output_hidden_states=True).hidden_states
    features = extract_context_feature(states, head.target_layer_ids)
    found = []
    for anchor in blocks.ANCHORS:
        ids = torch.tensor([[blocks.TEXT[anchor], *[head.mask_token_id] * (head.block_size - 1)]])
        embedded = _raw_input_embeddings(model, ids, float(_draft_value(head.config, "input_embedding_scale", 1.0)))
        hidden = head(
            position_ids=torch.arange(anchor + head.block_size)[None],
            noise_embedding=embedded,
            target_hidden=features[:, :anchor],
        )[:, 1:]
        logits = head.compute_logits(hidden, model.lm_head)
        if is_second:  # it draws, so that each slot is computed for itself, after the token of the text
            for i in range(logits.shape[1]):
                before = torch.tensor([blocks.TEXT[anchor + i]])
                _, candidates, q = head.candidate_selector.select(
                    hidden[:, i : i + 1], logits[:, i : i + 1], before, 1.0
                )
                logits[:, i] = torch.full_like(logits[:, i], _NOTHING).scatter(
                    -1, candidates[:, 0], q[:, 0].double().log()
                )
        found.append(logits)
    return torch.cat(found)


@torch.inference_mode()
def main() -> None:
    _import_from(sys.argv[1:])
    makers = {"speculators": _speculators, "zlab": _zlab}
    model, found = blocks.target(), {}
    for name, case in blocks.CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            blocks.write(Path(folder), name, model)
            values = makers[case["layout"]](Path(folder), model)
        found[f"{name}: logits"] = values.float().contiguous()
        print(f"{name}: {tuple(values.shape)}, up to {values.abs().max():.3g}")
    save_file(found, blocks.FILE)


if __name__ == "__main__":
    main()
