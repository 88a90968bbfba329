"""Files of a head's checkpoint: its configuration, and its tensors by name."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.errors import ModelCorrupt, ModelNotFound
from outrider.models.kinds import PICKLED, check_no_pickle

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


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


@dataclass(frozen=True, slots=True)
class StoredTensors:
    """Tensors of a checkpoint.

    Attributes:
        location: a folder or hub id.
        by_file: names of the tensors in each file.
        loaded: all tensors, of a file that can only be read whole; else none.
    """

    location: str
    by_file: Mapping[str, Sequence[str]]
    loaded: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for names in self.by_file.values() for name in names}

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """Tensors whose names begin with ``prefix``. Only their files are read.

        Raises:
            ModelCorrupt
        """
        from safetensors import safe_open

        found = {name: value for name, value in self.loaded.items() if name.startswith(prefix)}
        for file, names in self.by_file.items():
            wanted = [name for name in names if name.startswith(prefix) and name not in self.loaded]
            if not wanted:
                continue
            path = _file(self.location, file)
            if path is None:
                raise ModelCorrupt(f"{self.location} lacks {file}, which its index names")
            with _reading(path), safe_open(path, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in wanted}
        return found


def open_tensors(location: str, *, allow_pickle: bool = False) -> StoredTensors:
    """Find the tensors of a folder or hub repository. Of safetensors only headers are read; a pickled file is read
    whole, once.

    Raises:
        ModelNotFound: there are no weights.
        UnsupportedModel: they are pickled.
        ModelCorrupt
    """
    import torch
    from safetensors import safe_open

    if (whole := _file(location, _WHOLE)) is not None:
        with _reading(whole), safe_open(whole, "pt") as opened:
            return StoredTensors(location, {_WHOLE: list(opened.keys())})
    if (index := _file(location, _INDEX)) is not None:
        with _reading(index):
            home: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {file: [name for name in home if home[name] == file] for file in sorted(set(home.values()))}
            return StoredTensors(location, files)
    if not allow_pickle:
        check_no_pickle(location)
    elif (old := _file(location, PICKLED)) is not None:
        with _reading(old):
            loaded = torch.load(old, map_location="cpu", weights_only=True)
            return StoredTensors(location, {PICKLED: list(loaded)}, loaded)
    raise ModelNotFound(f"{location} has no weights: neither {_WHOLE}, {_INDEX} nor {PICKLED}")


def _file(location: str, name: str) -> Path | None:
    """A file of a folder or hub repository; None if there is none."""
    if Path(location).is_dir():
        path = Path(location) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(location, name))
    except Exception as error:  # of networks and hubs, many types
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            return None
        reason = " ".join(str(error).split())[:300]
        raise ModelNotFound(f"{name} of {location!r} cannot be fetched ({reason})") from None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # damaged files raise errors of many types
        reason = " ".join(str(error).split())[:300]
        raise ModelCorrupt(f"{path} cannot be read ({type(error).__name__}: {reason})") from None
