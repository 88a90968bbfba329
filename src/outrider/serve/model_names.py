"""The names of the model for clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.serve.http_errors import Refusal
from outrider.serve.served_model import ServedModel


def check_name(name: Any, names: Sequence[str]) -> None:
    """
    Args:
        name: the model that a request asks for; None for any.
        names: all names of the model.

    Raises:
        Refusal: the model has another name.
    """
    if not isinstance(name, str | None):
        raise Refusal("model must be a string", param="model")
    if name not in (None, *names):
        message = f"unknown model {name!r:.100}: this server has {', '.join(names)}"
        raise Refusal(message, status=404, type_="NotFoundError", param="model", code="model_not_found")


def model_card(model: ServedModel, name: str, created: int) -> dict[str, Any]:
    """The model under one of its names, for ``/v1/models``."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "outrider",
        "root": model.decoder.target.name,
        "parent": None,
        "max_model_len": model.capacity,
    }
