"""The name under which a module takes its cache and returns it.

Transformers 5.24 renamed ``past_key_values``, and the ``cache_params`` of models without attention, to ``cache``. A
module that takes any keywords would drop another name silently, so its signature decides.
"""

from __future__ import annotations

import inspect
from typing import Any

CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def cache_argument(module: Any) -> str:
    """Name of the argument of a module's ``forward`` that takes the cache. One that passes all keywords to another
    model is given the name that this release of Transformers uses."""
    from transformers import GenerationMixin

    own, usual = (
        [name for name in CACHE_NAMES if name in inspect.signature(function).parameters]
        for function in (module.forward, GenerationMixin.prepare_inputs_for_generation)
    )
    return (own or usual)[0]


def cache_of(output: Any) -> Any:
    """The cache in a model's output, or None."""
    fields = vars(output)  # old names are properties, too, and warn
    return next((fields[name] for name in CACHE_NAMES if fields.get(name) is not None), None)
