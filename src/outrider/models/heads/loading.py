"""Recognises heads, and loads them for a target."""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch

from outrider.errors import ModelCorrupt, OutriderError, UnsupportedModel
from outrider.models.heads.base import head_lm
from outrider.models.heads.block import load_block
from outrider.models.heads.chains import load_eagle3, load_mtp
from outrider.models.heads.checkpoint import find_tensors, read_config, read_tensors
from outrider.models.kinds import head_named
from outrider.models.registry import ModelSpec
from outrider.runtime.lm import LM

MTP = "mtp"
"""Draft with the MTP layers of the target's own checkpoint."""


def is_head(spec: ModelSpec) -> bool:
    """Whether a checkpoint is a head rather than a model, by its configuration.

    Raises:
        ModelNotFound, ModelCorrupt
    """
    if spec.gguf is not None or (spec.path is not None and not (spec.path / "config.json").is_file()):
        return False
    return head_named(read_config(spec.location)) is not None


def load_head(spec: ModelSpec, target: LM, *, allow_pickle: bool = False) -> LM:
    """Load a head for a target, in the target's type and on its device.

    Raises:
        UnsupportedModel: a head of another kind, this target has none, or the weights are pickled.
        ModelCorrupt: it does not fit the target, or is incomplete.
        ModelNotFound
    """
    check_target(target)
    stated = read_config(spec.location)
    files = find_tensors(spec.location, allow_pickle=allow_pickle)
    kind = kind_of_head(files.keys())
    if kind is None:
        thing = head_named(stated) or "a head"
        raise UnsupportedModel(f"{spec.name} is {thing}, in a layout that is not known here")
    with _building(spec.name):
        load = load_eagle3 if kind == "eagle3" else load_block
        return head_lm(load(read_tensors(spec.location, files), stated, spec.name, target), spec.name, target)


def load_mtp_of(target: LM, *, allow_pickle: bool = False) -> LM:
    """Load the MTP layer of a target's checkpoint.

    Raises:
        UnsupportedModel: it has none.
        ModelCorrupt, ModelNotFound
    """
    check_target(target)
    model: Any = target.model
    location = str(getattr(model.config, "name_or_path", "") or "")
    if not location:
        raise UnsupportedModel(
            f"{target.name} is a model in memory that was not loaded from files: it has no MTP layers"
        )
    with _building(f"the MTP layer of {target.name}"):
        return head_lm(load_mtp(location, target, allow_pickle=allow_pickle), f"{target.name}:{MTP}", target)


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Translate errors of Transformers' and torch's classes, of many types, for configurations that make no sense."""
    try:
        yield
    except (OutriderError, torch.OutOfMemoryError, AssertionError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ModelCorrupt(f"no head can be built of {name} ({type(error).__name__}: {reason})") from None


def kind_of_head(found: Set[str]) -> str | None:
    """Kind of a head by the names of its tensors: those in configurations are less reliable."""
    if "fc.weight" in found and found & {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}:
        return "eagle3"
    if found >= {"fc.weight", "hidden_norm.weight"}:
        return "block"
    return None


def check_target(target: LM) -> None:
    """Check that heads can read the states of a target. Raises UnsupportedModel."""
    model: Any = target.model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        raise UnsupportedModel(f"{target.name} is spread over several devices: heads need it on one")
    if target.num_shares > 1:
        raise UnsupportedModel(f"{target.name} is shared by {target.num_shares} processes: heads need it in one")
    if not all(hasattr(decoder, part) for part in ("layers", "norm", "rotary_emb")):
        raise UnsupportedModel(f"{target.name} ({model.config.model_type}) has no layers that a head could read")
