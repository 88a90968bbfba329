"""Rotary frequencies that Transformers recomputes in each forward from the highest position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_CHOSEN = ("dynamic", "longrope")


@contextmanager
def constant_frequencies(model: nn.Module) -> Iterator[None]:
    """Keep frequencies constant: code that reads positions on the host cannot be captured. Results do
    not change, since the context ends where other frequencies begin (models/loading.py)."""
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
    """Rope type with constant frequencies, or a dictionary of them by layer type."""
    if isinstance(kind, dict):
        return {name: _constant(one) for name, one in kind.items()}
    return "default" if kind in _CHOSEN else kind
