"""The name under which a module takes its cache and returns it.

Transformers 5.24 renamed ``past_key_values``, and the ``cache_params`` of models without attention, to ``cache``. A
module that takes any keywords would drop another name silently, so its signature decides.
"""

from __future__ import annotations

import inspect
from typing import Any

CACHE_NAMES = ("cache", "cache_params", "past_key_values")


def cache_argument(module: Any) -> str:
    """Name of the argument of a module's ``forward`` that takes the cache."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[-1])


def cache_of(output: Any) -> Any:
    """The cache in a model's output, or None."""
    fields = vars(output)  # old names are properties, too, and warn
    return next((fields[name] for name in CACHE_NAMES if fields.get(name) is not None), None)
