"""Notes about checkpoints on this disk: what was learned when a model was first loaded and run by the native engine.

The next start reads them and the weights, and needs neither Transformers' code nor a probe: a file with notes was found
to give the logits of the model's own code, by the same software.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from outrider.kernels.narrow_weight import NarrowWeight
from outrider.models.placement import Placement
from outrider.models.quantize import num_bytes
from outrider.models.registry import ModelSpec
from outrider.native.families import plan_of
from outrider.native.plan import read_plan
from outrider.runtime.stand_in import StandIn, StatedConfig
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_MOST_BYTES = 2**24  # on disk: some hundred models
_KINDS = (".safetensors", ".gguf", ".json")
_CODE = ("native", "kernels", "runtime", "models")  # packages on which the notes depend
BLOCKS, NARROW = "blocks", "narrow "  # how a parameter is stored: in the file's blocks, or as a NarrowWeight of a type


@dataclass(frozen=True, slots=True)
class Notes:
    """Description of a model, in JSON's types.

    Attributes:
        plan: the native engine's (native/plan.py), as a dictionary.
        fields: the fields of Transformers' configuration.
        aliases: other names of these fields.
        shapes: the shape of each parameter.
        tied: parameters that are the same as another, with the other's name.
        stored: the type of each parameter that is not tied to another: BLOCKS, NARROW and a type, or "float32".
        num_bytes: the size of all parameters.
        embedding: the name of the module that embeds tokens.
        end: ``eos_token_id`` of Transformers' generation configuration.
        tokenizer: the name of the tokenizer's class in Transformers; None without a tokenizer.
    """

    plan: dict[str, Any]
    fields: dict[str, Any]
    aliases: dict[str, str]
    shapes: dict[str, list[int]]
    tied: dict[str, str]
    stored: dict[str, str]
    num_bytes: int
    embedding: str
    end: int | list[int] | None
    tokenizer: str | None

    @classmethod
    def about(cls, model: Any, tokenizer: Any | None) -> Notes | None:
        """Notes about a model of Transformers and its tokenizer; None if its parameters are stored in other ways.

        Raises:
            NotPlanned
        """
        config = model.config
        parameters = dict(model.named_parameters(remove_duplicate=False))
        if config.get_text_config(decoder=True) is not config or model.state_dict().keys() - parameters.keys():
            return None
        first: dict[nn.Parameter, str] = {}
        shapes, tied, stored = {}, {}, {}
        for name, weight in parameters.items():
            if weight in first:
                tied[name] = first[weight]
                continue
            kind = _kind_of(weight)
            if kind is None:
                return None
            first[weight], shapes[name], stored[name] = name, list(weight.shape), kind
        embedding = first[model.get_input_embeddings().weight].removesuffix(".weight")
        end = getattr(model.generation_config, "eos_token_id", None)
        kind = None if tokenizer is None else type(tokenizer).__name__
        aliases = dict(config.attribute_map)
        plan = asdict(plan_of(config))
        return cls(plan, config.to_dict(), aliases, shapes, tied, stored, num_bytes(model), embedding, end, kind)

    def stand_in(self, build: Callable[[], nn.Module]) -> StandIn:
        """Stand-in for the model, whose parameters have no numbers yet.

        Args:
            build: makes the model, without its weights.
        """
        config, end = StatedConfig(self.fields, self.aliases), SimpleNamespace(eos_token_id=self.end)
        shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        return StandIn(shapes, self.tied, self.embedding, read_plan(self.plan), config, end, build)


def _kind_of(weight: nn.Parameter) -> str | None:
    if isinstance(weight, NarrowWeight):
        if weight.blocks is not None:
            return BLOCKS if weight.order is None else None
        return None if weight.scale is not None else NARROW + str(weight.stored.dtype).removeprefix("torch.")
    return "float32" if type(weight) is nn.Parameter and weight.dtype == torch.float32 else None


def notes_name(spec: ModelSpec, placed: Placement) -> str | None:
    """Name of the notes about these weights; None if the weights are not files on this disk.

    Args:
        placed: how they are loaded.
    """
    if spec.path is None or not spec.path.is_dir() or spec.adapter is not None:
        return None
    files = sorted(file for file in spec.path.iterdir() if file.suffix in _KINDS)
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    how = spec.gguf, placed.quantization, placed.dtype, placed.store
    return hashlib.sha256(repr((facts, how, _software())).encode()).hexdigest()


def has_notes(name: str) -> bool:
    """Whether the native engine was found to give the model's logits."""
    return _folder().read(name) is not None


def read_notes(name: str) -> Notes | None:
    """Notes about a model; None if there are none, or none from which it can be opened."""
    with suppress(ValueError, TypeError):
        fields = json.loads(_folder().read(name) or b"null")
        return None if fields is None else Notes(**fields)
    return None


def write_notes(name: str, model: Any, tokenizer: Any | None) -> None:
    """Note that the native engine gives this model's logits, if the cache can be written."""
    notes = Notes.about(model, tokenizer)
    with suppress(TypeError, ValueError):  # of a configuration that JSON cannot hold
        _folder().keep(name, json.dumps(None if notes is None else asdict(notes)).encode())


def _folder() -> PrivateFolder:
    return PrivateFolder(cache_folder("notes"), _MOST_BYTES)


@lru_cache
def _software() -> str:
    """Hash of our own code, and releases of others'."""
    digest = hashlib.sha256(f"{version('torch')} {version('transformers')}".encode())
    for package in _CODE:
        for file in sorted((Path(__file__).parents[1] / package).rglob("*")):
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.read_bytes())
    return digest.hexdigest()
