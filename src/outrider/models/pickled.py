"""Pickled weights: a file that may run code of its author, so it is refused unless it is asked for.

Where it is allowed, PyTorch's restricted unpickler reads it (``weights_only``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.errors import UnsupportedModel
from outrider.models.memory import INDEX, WHOLE
from outrider.models.registry import ModelSpec

OLD = "pytorch_model.bin"
_OLD_INDEX = "pytorch_model.bin.index.json"
_ADAPTER, _OLD_ADAPTER = "adapter_model.safetensors", "adapter_model.bin"


def check_unpickled(spec: ModelSpec, config: Any) -> None:
    """Raises UnsupportedModel: the weights of a model, or of its adapter, would be read from a pickled file."""
    stated = getattr(config, "transformers_weights", None)  # goes before the usual names
    if stated is not None and not str(stated).endswith((".safetensors", ".safetensors.index.json")):
        raise _pickled(spec.location, str(stated))
    if spec.gguf is None and stated is None:
        _check(spec.location, (WHOLE, INDEX), (OLD, _OLD_INDEX))
    if spec.adapter is not None:
        _check(spec.adapter, (_ADAPTER,), (_OLD_ADAPTER,))


def check_old_file(location: str) -> None:
    """Raises UnsupportedModel: a folder or hub repository has pickled weights."""
    _check(location, (), (OLD,))


def _check(location: str, plain: Sequence[str], old: Sequence[str]) -> None:
    from transformers.utils import has_file

    if not any(has_file(location, name) for name in plain):
        for name in old:
            if has_file(location, name):
                raise _pickled(location, name)


def _pickled(location: str, file: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the weights of {location} are in {file}, a pickle, which may run code: take them in safetensors; or, if you "
        "trust their author, --allow-pickle (in Python allow_pickle=True)"
    )
