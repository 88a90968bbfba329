"""Notes about checkpoints on this disk: what was learned when a model was first loaded and run by the native engine.

The next start reads them and the weights, and needs neither Transformers' code nor a probe: a file with notes was found
to give the logits of the model's own code, by the same software.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from outrider.kernels.narrow_weight import ExpertLayout, NarrowWeight
from outrider.models.cpu_weights import without_weights
from outrider.models.memory import check_fits, weight_files
from outrider.models.quantize import num_digits_of, plain_config
from outrider.models.reading import generation_config_of, held_file, read_config, reading
from outrider.models.registry import ModelSpec, Placement
from outrider.models.weights import num_bytes
from outrider.native.families import plan_of
from outrider.native.plan import Plan
from outrider.runtime.stand_in import StandIn, StatedConfig
from outrider.runtime.weight_tensors import move_weights
from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_MOST_BYTES = 2**24  # on disk: some hundred models
_KINDS = (".safetensors", ".gguf", ".json")
_CODE = ("native", "kernels", "runtime", "models")  # packages on which the notes depend


@dataclass(frozen=True, slots=True)
class Notes:
    """Description of a model.

    Attributes:
        plan: the native engine's.
        fields: the fields of Transformers' configuration.
        aliases: other names of these fields.
        shapes: the shape of each parameter.
        tied: parameters that are the same as another, with the other's name.
        in_blocks: parameters that stay in the file's blocks.
        experts: layouts of the matrices of experts that stay as they are.
        narrow: parameters that stay in a type; the others are in float32.
        num_bytes: the size of all parameters.
        embedding: the name of the module that embeds tokens.
        end: ``eos_token_id`` of Transformers' generation configuration.
        tokenizer: the name of the tokenizer's class in Transformers; None without a tokenizer.
    """

    plan: Plan
    fields: dict[str, Any]
    aliases: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    tied: dict[str, str]
    in_blocks: list[str]
    experts: dict[str, ExpertLayout]
    narrow: dict[str, torch.dtype]
    num_bytes: int
    embedding: str
    end: int | list[int] | None
    tokenizer: str | None

    def stand_in(self, build: Callable[[], nn.Module]) -> StandIn:
        """Stand-in for the model, whose parameters have no numbers yet.

        Args:
            build: makes the model, without its weights.
        """
        config, end = StatedConfig(self.fields, self.aliases), SimpleNamespace(eos_token_id=self.end)
        return StandIn(self.shapes, self.tied, self.embedding, self.plan, config, end, build)


def notes_about(model: Any, tokenizer: Any | None) -> Notes | None:
    """Notes about a model of Transformers and its tokenizer; None if its parameters are stored in other ways. Raises
    NotPlanned."""
    config = model.config
    if config.get_text_config(decoder=True) is not config:
        return None
    parameters: dict[str, Tensor] = model.state_dict(keep_vars=True)
    first: dict[Tensor, str] = {}
    tied, in_blocks, experts, narrow = {}, [], {}, {}
    for name, weight in parameters.items():
        if weight in first:
            tied[name] = first[weight]
            continue
        first[weight] = name
        if isinstance(weight, NarrowWeight):
            if weight.order is not None or weight.scale is not None:
                return None
            if weight.experts is not None:
                experts[name] = weight.experts
            if weight.blocks is None:
                narrow[name] = weight.stored.dtype
            else:
                in_blocks.append(name)
        elif type(weight) not in (nn.Parameter, Tensor) or weight.dtype != torch.float32:
            return None
    return Notes(
        plan=plan_of(config),
        fields=config.to_dict(),
        aliases=dict(config.attribute_map),
        shapes={name: tuple(weight.shape) for weight, name in first.items()},
        tied=tied,
        in_blocks=in_blocks,
        experts=experts,
        narrow=narrow,
        num_bytes=num_bytes(model),
        embedding=first[model.get_input_embeddings().weight].removesuffix(".weight"),
        end=getattr(model.generation_config, "eos_token_id", None),
        tokenizer=None if tokenizer is None else type(tokenizer).__name__,
    )


def notes_name(spec: ModelSpec, placed: Placement) -> str | None:
    """Name of the notes about these weights; None if the weights are not files on this disk.

    Args:
        placed: how they are loaded.
    """
    if spec.path is None or not spec.path.is_dir():
        return None
    files = sorted(file for file in spec.path.iterdir() if file.suffix in _KINDS or file.name == spec.gguf)
    facts = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    how = spec.gguf, placed.quantization, placed.dtype, placed.store
    return hashlib.sha256(repr((facts, how, _software())).encode()).hexdigest()


def has_notes(name: str) -> bool:
    """Whether the native engine was found to give the model's logits."""
    return _folder().read(name) is not None


def read_notes(name: str) -> Notes | None:
    """Notes about a model; None if there are none, or none from which it can be opened."""
    data = _folder().read(name)  # which nobody else can have written
    if data is None:
        return None
    try:
        notes: Notes = pickle.loads(data)
    except Exception:  # of a class that another release of a library has elsewhere
        return None
    return notes


def write_notes(name: str, model: Any, tokenizer: Any | None) -> None:
    """Note that the native engine gives this model's logits, if the cache can be written."""
    with suppress(TypeError, AttributeError, pickle.PicklingError):  # of strange values in a configuration
        _folder().keep(name, pickle.dumps(notes_about(model, tokenizer)))


def reopen(spec: ModelSpec, placed: Placement, notes: Notes) -> StandIn | None:
    """Stand-in for a model on the CPU; None if its weights have other names. Raises ModelCorrupt, UnsupportedModel,
    DeviceError."""
    check_fits(spec.name, notes.num_bytes, torch.device("cpu"))
    model = notes.stand_in(lambda: _without_weights(spec))
    with reading(spec, "model"):
        weights = _weights(spec, placed, notes, model)
        if weights is None:
            return None
        model.fill(weights)
    # Those of a GGUF file that stay as they are stored are there.
    narrow = [one for one in model.parameters() if isinstance(one, NarrowWeight) and spec.gguf is not None]
    move_weights(model, [one for one in narrow if one.stored.dtype != torch.float32])
    return model


def _without_weights(spec: ModelSpec) -> Any:
    """Transformers' model, without its weights."""
    model = without_weights(plain_config(read_config(spec)))
    model.generation_config = generation_config_of(spec) or model.generation_config
    if (file := held_file(spec)) is not None:
        model.config.name_or_path = str(file.path)  # where its MTP layers are
    return model


def _weights(spec: ModelSpec, placed: Placement, notes: Notes, model: StandIn) -> Mapping[str, Tensor] | None:
    if spec.gguf is not None:
        from outrider.models.gguf.checkpoint import gguf_weights

        num_digits = num_digits_of(placed.quantization)
        large = {name: notes.experts.get(name) for name in (*notes.in_blocks, *notes.narrow)}
        tensors = gguf_weights(spec, model, large, num_digits, model.config).read_all()
    else:
        assert spec.path is not None
        if notes.in_blocks:  # made from the numbers of the file
            return None
        tensors = {name: one for file in weight_files(spec.path) for name, one in load_file(file).items()}
        if not notes.shapes.keys() <= tensors.keys() <= notes.shapes.keys() | notes.tied.keys():
            return None
    weights = {name: tensors[name] for name in notes.in_blocks}
    for name in notes.shapes.keys() - weights.keys():
        tensor, dtype = tensors[name], notes.narrow.get(name)
        if dtype is None:
            tensor = tensor.float()
        elif not isinstance(tensor, NarrowWeight):
            layout = notes.experts.get(name)
            rows = tensor if layout is None else layout.rows(tensor)
            tensor = NarrowWeight(rows.to(dtype), torch.float32, experts=layout)
        weights[name] = tensor
    return weights


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
