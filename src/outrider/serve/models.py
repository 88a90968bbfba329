"""The models of a server by their names, for requests. For the event loop, except ``of``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from outrider.serve.http_errors import Refusal
from outrider.serve.metrics import Metrics
from outrider.serve.prepare import Preparer
from outrider.serve.quota import Quota, place
from outrider.serve.readiness import Readiness
from outrider.serve.served_model import ServedModel


class Models:
    """Finds the model of a request, by its field ``model``; the first is the default.

    Attributes:
        names: all of them.
        first_names: one of each.
        metrics: of all models.
    """

    def __init__(self, models: Sequence[ServedModel], readiness: Readiness) -> None:
        self.names = [name for model in models for name in model.names]
        self.first_names = [model.names[0] for model in models]
        self.metrics = Metrics([model.metrics for model in models])
        self._models, self._readiness = models, readiness
        self._preparers: Mapping[str, Preparer] = {}
        self._created = int(time.time())

    def open(self, preparers: Sequence[Preparer]) -> None:
        """Take what prepares the requests of each model, once they are loaded."""
        self._preparers = {name: one for one in preparers for name in one.model.names}

    @property
    def is_ready(self) -> bool:
        return self._readiness.state == "ready"

    def of(self, name: Any) -> Preparer:
        """Find a model. May be called from any thread.

        Args:
            name: None for the first.

        Raises:
            Refusal: not ready, or there is none of this name.
        """
        self._readiness.check()
        if not isinstance(name, str | None):
            raise Refusal("model must be a string", param="model")
        found = self._preparers.get(self.names[0] if name is None else name)
        if found is None:
            message = f"unknown model {name!r:.100}: this server has {', '.join(self.names)}"
            raise Refusal(message, status=404, type_="NotFoundError", param="model", code="model_not_found")
        return found

    def place(self, client: str) -> AbstractContextManager[Callable[[Quota], None]]:
        """Reserve a place in the queues for one row while a request is prepared: see ``quota.place``.

        Raises:
            Refusal: not ready, or all queues are full.
        """
        refusals: list[Refusal] = []
        for model in self._models:
            try:
                model.check_room(1, client)
            except Refusal as refusal:
                refusals.append(refusal)
        if len(refusals) == len(self._models):
            raise refusals[0]
        return place([model.room for model in self._models], client)

    def cards(self) -> list[dict[str, Any]]:
        """All models, for ``/v1/models``. Raises Refusal."""
        self._readiness.check()
        return [self.card(name) for name in self.names]

    def card(self, name: str) -> dict[str, Any]:
        """Raises Refusal."""
        model = self.of(name).model
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "outrider",
            "root": model.decoder.target.name,
            "parent": None,
            "max_model_len": model.capacity,
        }
