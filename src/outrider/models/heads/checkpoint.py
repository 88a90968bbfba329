"""Files of a head's checkpoint: its configuration, and its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ModelCorrupt, ModelNotFound
from outrider.models.memory import INDEX, WHOLE
from outrider.models.pickled import OLD, check_old_file


def read_config(location: str) -> dict[str, Any]:
    """The config.json of a folder or hub repository, as it is written.

    Raises:
        ModelNotFound, ModelCorrupt
    """
    path = _file(location, "config.json")
    if path is None:
        raise ModelNotFound(f"{location} has no config.json")
    with _reading(path):
        stated: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stated, dict):
        raise ModelCorrupt(f"{path} holds no object")
    return stated


def find_tensors(location: str, *, allow_pickle: bool = False) -> dict[str, str]:
    """The tensors of a folder or hub repository, and the file of each. Of safetensors only headers are read.

    Raises:
        ModelNotFound: there are no weights.
        UnsupportedModel: they are pickled.
        ModelCorrupt
    """
    from safetensors import safe_open

    if (whole := _file(location, WHOLE)) is not None:
        with _reading(whole), safe_open(whole, "pt") as opened:
            return dict.fromkeys(opened.keys(), WHOLE)
    if (index := _file(location, INDEX)) is not None:
        with _reading(index):
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    if not allow_pickle:
        check_old_file(location)
    elif (old := _file(location, OLD)) is not None:
        return dict.fromkeys(_unpickled(old), OLD)
    raise ModelNotFound(f"{location} has no weights: neither {WHOLE}, {INDEX} nor {OLD}")


def read_tensors(location: str, files: Mapping[str, str], prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors whose names begin with ``prefix``, from their files alone.

    Args:
        files: from ``find_tensors``.

    Raises:
        ModelCorrupt
    """
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    wanted = {name: file for name, file in files.items() if name.startswith(prefix)}
    for file in sorted(set(wanted.values())):
        path, names = _file(location, file), [name for name in wanted if wanted[name] == file]
        if path is None:
            raise ModelCorrupt(f"{location} lacks {file}, which its index names")
        if file == OLD:
            tensors = _unpickled(path)
            found |= {name: tensors[name] for name in names}
            continue
        with _reading(path), safe_open(path, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in names}
    return found


def _unpickled(path: Path) -> dict[str, Tensor]:
    import torch

    with _reading(path):
        return dict(torch.load(path, map_location="cpu", weights_only=True))


def _file(location: str, name: str) -> Path | None:
    """A file of a folder or hub repository; None if there is none."""
    from transformers.utils import cached_file

    try:
        path = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
    except Exception as error:  # of networks and hubs, many types
        reason = " ".join(str(error).split())[:300]
        raise ModelNotFound(f"{name} of {location!r} cannot be fetched ({reason})") from None
    return None if path is None else Path(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split())[:300]
        raise ModelCorrupt(f"{path} cannot be read ({type(error).__name__}: {reason})") from None
