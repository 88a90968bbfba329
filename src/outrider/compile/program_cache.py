"""Compiled programs: on disk, and ready to run.

On disk there is a file for each graph that was compiled, and for each call the name of its graph. A call that is known
needs neither tracing nor Inductor: its program is loaded in some milliseconds.
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
    """What comes of a call.

    Attributes:
        name: a hash of its graph.
        package: the compiled graph, as Inductor packs it.
        constants: tensors that the trace has found beside the weights, by name, as ``torch.save`` writes them.
    """

    name: str
    package: bytes
    constants: bytes


def find(key: str) -> CompiledProgram | None:
    """What was made of a call before, if it is there, in order and nobody else's."""
    kept = _folder().read(f"{key}.call")
    if kept is None:
        return None
    name, constants = kept[:_NAME_BYTES].decode(), kept[_NAME_BYTES:]
    package = package_of(name)
    return None if package is None else CompiledProgram(name, package, constants)


def keep(key: str, made: CompiledProgram) -> None:
    """Note what was made of a call."""
    _folder().keep(f"{key}.call", made.name.encode() + made.constants)


def package_of(name: str) -> bytes | None:
    """A compiled graph."""
    return _folder().read(f"{name}.pt2")


def keep_package(name: str, package: bytes) -> None:
    _folder().keep(f"{name}.pt2", package)


def _folder() -> PrivateFolder:
    return PrivateFolder(cache_folder("programs"), _MOST_BYTES)


@contextmanager
def _unpacked_in(folder: str) -> Iterator[None]:
    """The loader unpacks into the system's temporary folder, and a process that a signal ends leaves that there. Once
    it is loaded, a library needs no file."""
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
    """A compiled graph with the weights of a model, which it points to."""

    def __init__(self, made: CompiledProgram, weights: Mapping[str, Tensor]) -> None:
        with tempfile.TemporaryDirectory() as folder, _unpacked_in(folder):
            path = Path(folder) / "program.pt2"
            path.write_bytes(made.package)
            # Inductor's own way to load it would import Inductor, which takes seconds.
            self._loader: Any = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1)
        others = torch.load(io.BytesIO(made.constants), weights_only=True)
        names = self._loader.get_constant_fqns()
        strange = sorted(set(names) - weights.keys() - others.keys())
        if strange:
            raise TypeError(f"the program wants {strange[0]}, which is no weight of the model")
        # They must live as long as it does.
        self._constants = {name: (weights[name] if name in weights else others[name]).detach() for name in names}
        self._loader.load_constants(self._constants, False, True, True)

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(self._loader.run([*tensors, *stores]))
