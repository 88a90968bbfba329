"""Name and version of each document that commands write."""

from __future__ import annotations

_VERSIONS: dict[str, int] = {}  # of those that are not in their first


def title_of(name: str) -> str:
    """Like outrider/compare/1. The number changes when a key is removed, or changes its type or meaning."""
    return f"outrider/{name}/{_VERSIONS.get(name, 1)}"
