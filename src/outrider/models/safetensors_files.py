"""Tensors of safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor


class SafetensorsFiles(Mapping[str, Tensor]):
    """Tensors of safetensors files, in memory that the system reads when it is used."""

    def __init__(self, files: Iterable[Path]) -> None:
        self._files: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt")
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
