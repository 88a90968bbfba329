"""Files of a head's checkpoint: its configuration, and its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ModelCorrupt, ModelNotFound

_WHOLE, _INDEX, _OLD = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


def read_config(location: str) -> dict[str, Any]:
    """The config.json of a folder or hub repository, as it is written.

    Raises:
        ModelNotFound, ModelCorrupt
    """
    path = _file(location, "config.json")
    if path is None:
        raise ModelNotFound(f"{location} has no config.json")
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelCorrupt(f"{path} cannot be read: {error}") from None
    if not isinstance(stated, dict):
        raise ModelCorrupt(f"{path} holds no object")
    return stated


def tensor_names(location: str) -> list[str]:
    """Names of all tensors of a checkpoint. Only headers are read.

    Raises:
        ModelNotFound, ModelCorrupt
    """
    return [name for file, names in _by_file(location) for name in names]


def read_tensors(location: str, prefix: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """Tensors whose names begin with ``prefix``. Only their files are read.

    Raises:
        ModelNotFound: there are no weights.
        ModelCorrupt
    """
    import torch
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for file, names in _by_file(location):
        wanted = [name for name in names if name.startswith(prefix)]
        if not wanted:
            continue
        path = _file(location, file)
        if path is None:
            raise ModelCorrupt(f"{location} lacks {file}, which its index names")
        with _reading(path):
            if file == _OLD:
                tensors = torch.load(path, map_location="cpu", weights_only=True)
                found |= {name: tensors[name] for name in wanted}
            else:
                with safe_open(path, "pt") as opened:
                    found |= {name: opened.get_tensor(name) for name in wanted}
    return found


def _by_file(location: str) -> list[tuple[str, list[str]]]:
    """Files of weights with the names of their tensors."""
    import torch
    from safetensors import safe_open

    if (whole := _file(location, _WHOLE)) is not None:
        with _reading(whole), safe_open(whole, "pt") as opened:
            return [(_WHOLE, list(opened.keys()))]
    if (index := _file(location, _INDEX)) is not None:
        with _reading(index):
            home: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return [(file, [name for name in home if home[name] == file]) for file in sorted(set(home.values()))]
    if (old := _file(location, _OLD)) is not None:
        with _reading(old):
            return [(_OLD, list(torch.load(old, map_location="cpu", weights_only=True)))]
    raise ModelNotFound(f"{location} has no weights: neither {_WHOLE}, {_INDEX} nor {_OLD}")


def _file(location: str, name: str) -> Path | None:
    """A file of a folder or hub repository; None if there is none."""
    if Path(location).is_dir():
        path = Path(location) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(location, name))
    except EntryNotFoundError:
        return None
    except Exception as error:  # of networks and hubs, many types
        reason = " ".join(str(error).split())[:300]
        raise ModelNotFound(f"{name} of {location!r} cannot be fetched ({reason})") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split())[:300]
        raise ModelCorrupt(f"{path} cannot be read ({type(error).__name__}: {reason})") from None
