"""Rotary frequencies that Transformers chooses in each forward, by the highest position in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CHOSEN = ("dynamic", "longrope")


@contextmanager
def constant_frequencies(model: nn.Module) -> Iterator[None]:
    """Leave frequencies as they are: code that reads positions on the host can be neither traced nor recorded. Nothing
    else changes, since a context ends where other frequencies begin (models/loading.py)."""
    kinds = [
        (attributes, attributes["rope_type"]) for attributes in map(vars, model.modules()) if "rope_type" in attributes
    ]
    try:
        for attributes, kind in kinds:
            attributes["rope_type"] = _constant(kind)
        yield
    finally:
        for attributes, kind in kinds:
            attributes["rope_type"] = kind


def _constant(kind: Any) -> Any:
    """Of all layers, or for each type of a layer."""
    if isinstance(kind, dict):
        return {name: _constant(one) for name, one in kind.items()}
    return "default" if kind in _CHOSEN else kind
