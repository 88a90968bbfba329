"""Cache of compiled programs on disk, and programs loaded from it.

The disk has one file per compiled graph, and for each call the name of its graph. A known call needs neither tracing
nor Inductor: its program is loaded in some milliseconds.
"""

from __future__ import annotations

import io
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.system.files import cache_folder
from outrider.system.private import PrivateFolder

_MOST_BYTES = 4 * 2**30  # on disk
_LOADING = threading.Lock()
_NAME_BYTES = 64


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """Result of compiling a call.

    Attributes:
        name: hash of its graph.
        package: the compiled graph, as Inductor packs it.
        constants: tensors that the trace found beside the weights, by name, in the format of ``torch.save``.
    """

    name: str
    package: bytes
    constants: bytes


def find(key: str) -> CompiledProgram | None:
    """Program cached for a call; None if there is none that is undamaged and trusted."""
    kept = _folder().read(f"{key}.call")
    if kept is None:
        return None
    name, constants = kept[:_NAME_BYTES].decode(), kept[_NAME_BYTES:]
    package = package_of(name)
    return None if package is None else CompiledProgram(name, package, constants)


def keep(key: str, program: CompiledProgram) -> None:
    """Cache the program of a call."""
    _folder().keep(f"{key}.call", program.name.encode() + program.constants)


def package_of(name: str) -> bytes | None:
    """Compiled graph from the cache, if it is there."""
    return _folder().read(f"{name}.pt2")


def keep_package(name: str, package: bytes) -> None:
    _folder().keep(f"{name}.pt2", package)


def _folder() -> PrivateFolder:
    return PrivateFolder(cache_folder("programs"), _MOST_BYTES)


@contextmanager
def _unpacked_in(folder: str) -> Iterator[None]:
    """Let the loader unpack into this folder. By default it uses the system's temporary folder, where a process that
    is killed leaves the files. A library that is loaded needs no file."""
    with _LOADING:
        usual = os.environ.get("TMPDIR")
        os.environ["TMPDIR"] = folder
        try:
            yield
        finally:
            del os.environ["TMPDIR"]
            if usual is not None:
                os.environ["TMPDIR"] = usual


class LoadedProgram:
    """Compiled graph that points to the weights of a model."""

    def __init__(self, program: CompiledProgram, weights: Mapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory() as folder, _unpacked_in(folder):
            path = Path(folder) / "program.pt2"
            path.write_bytes(program.package)
            # Inductor's own loader would import Inductor, which takes seconds.
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        others = torch.load(io.BytesIO(program.constants), weights_only=True)
        names = self._loader.get_constant_fqns()
        strange = sorted(set(names) - weights.keys() - others.keys())
        if strange:
            raise TypeError(f"the program needs {strange[0]}, which is not a weight of the model")
        # The program does not own them.
        self._constants = {name: (weights[name] if name in weights else others[name]).detach() for name in names}
        self._loader.load_constants(self._constants, False, True, True)

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._loader.run([*tensors, *stores]))
