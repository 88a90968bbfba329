"""Which of the known models draft for a target. Nothing is loaded or downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from outrider.models.kinds import INDEX, PICKLED, WHOLE
from outrider.models.memory import sizes_of
from outrider.models.registry import ModelSpec

_LARGEST_SHARE = 0.4  # of the target's parameters; a larger draft costs more than it saves


def drafts_of(target: ModelSpec, known: Mapping[str, ModelSpec]) -> list[ModelSpec]:
    """Drafts among the known models: heads of the target, then much smaller models of its family, chat models for a
    chat model; the smallest first."""
    hub = (target.hub or "").lower()
    target = next((other for other in known.values() if hub and hub == (other.hub or "").lower()), target)
    sizes = sizes_of(target)
    heads = [spec for spec in known.values() if spec.head_of is not None and spec.head_of == target.name]
    if sizes is None or target.family is None:
        return heads
    smaller = []
    for spec in known.values():
        if (spec.family, spec.is_chat) != (target.family, target.is_chat):
            continue
        own = sizes_of(spec)
        if own is not None and own.num_params <= _LARGEST_SHARE * sizes.num_params:
            smaller.append((own.num_params, spec))
    return heads + [spec for _, spec in sorted(smaller, key=lambda pair: pair[0])]


def is_local(spec: ModelSpec) -> bool:
    """Whether a model's files are on this machine: in a folder, an installed package or the cache of the hub."""
    if spec.path is not None:
        return spec.path.exists()
    if spec.package is not None:
        return importlib.util.find_spec(spec.package) is not None
    from huggingface_hub import try_to_load_from_cache

    files = (WHOLE, INDEX, PICKLED) if spec.gguf is None else (spec.gguf,)  # a configuration alone may be here, too
    return any(isinstance(try_to_load_from_cache(str(spec.hub), file), str) for file in files)
