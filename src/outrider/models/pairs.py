"""Which of the known models belong together as target and draft, and which pairs fit into a memory. Nothing is loaded
or downloaded: sizes come from files on this disk, or from the registry."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.errors import OptionError
from outrider.models.kinds import INDEX, PICKLED, WHOLE
from outrider.models.memory import sizes_of
from outrider.models.registry import ModelSpec

_LARGEST_SHARE = 0.4  # of the target's parameters; a larger draft costs more than it saves
_USED = 0.9  # of the memory: the rest is for activations and the device's own
_LOOK_UP = ModelSpec("suffix")
_UNITS = {letter: (1024**power, 1000**power) for power, letter in enumerate("KMGT", start=1)}
_BITS = {"int8": 8.1, "nf4": 4.5}  # for each quantized weight, with its scales


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft.

    Attributes:
        form: the target's: its dtype, a quantization, or GGUF. The draft is in the dtype, or a GGUF file as it is.
        num_bytes: weights and caches of both.
        share: the draft's parameters over the target's, which is about the cost of a draft step; None for look-ups.
    """

    target: ModelSpec
    draft: ModelSpec
    form: str
    num_bytes: int
    share: float | None


def drafts_of(target: ModelSpec, known: Mapping[str, ModelSpec]) -> list[ModelSpec]:
    """Drafts among the known models: heads of the target, then much smaller models of its family, chat models for a
    chat model; the smallest first."""
    target = as_known(target, known)
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


def as_known(spec: ModelSpec, known: Mapping[str, ModelSpec]) -> ModelSpec:
    """The known model with the hub id of this one; else itself."""
    hub = (spec.hub or "").lower()
    return next((other for other in known.values() if hub and hub == (other.hub or "").lower()), spec)


def fitting_pairs(
    target: ModelSpec, known: Mapping[str, ModelSpec], memory: int, *, dtype: str, context: int, batch_size: int
) -> list[Pair]:
    """Pairs of a target that fit together, in the form with the most bits in which one does; or the target with
    look-ups, which need no memory, if it fits alone.

    Args:
        memory: bytes of the device.
        dtype: of models that are no GGUF files, and of their caches.
        context: tokens of a sequence.
    """
    drafts = drafts_of(target, known)
    sizes = sizes_of(as_known(target, known))
    if sizes is None or target.head_of is not None:
        return []
    length = min(context, sizes.context_len)
    forms = {dtype if sizes.num_bytes is None else "GGUF": sizes.weights_bytes(dtype)}
    for form, bits in _BITS.items():
        if (quantized := sizes.quantized_bytes(dtype, bits)) is not None:
            forms[form] = quantized
    for form, weights in forms.items():
        pairs = []
        for draft in drafts:
            own = sizes_of(draft)
            if own is None:
                continue
            caches = sum(one.cache_bytes(dtype, length, batch_size) for one in (sizes, own))
            together = weights + own.weights_bytes(dtype) + caches
            if together <= _USED * memory:
                pairs.append(Pair(target, draft, form, together, own.num_params / sizes.num_params))
        if pairs:
            return pairs
    cache = sizes.cache_bytes(dtype, length, batch_size)
    alone = {form: weights + cache for form, weights in forms.items() if weights + cache <= _USED * memory}
    return [Pair(target, _LOOK_UP, form, num_bytes, None) for form, num_bytes in alone.items()][:1]


def memory_of(text: str) -> int:
    """Bytes of a size like "24GiB", "24G" or "800MB". Raises OptionError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT])(I?B)?\s*", text.upper())
    if found is None or not (num_bytes := int(float(found[1]) * _UNITS[found[2]][found[3] == "B"])):
        raise OptionError("--memory", text, "a size like 24GiB or 800MB")
    return num_bytes
