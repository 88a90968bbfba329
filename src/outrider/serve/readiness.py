"""Whether the server accepts requests. For the event loop only."""

from __future__ import annotations

from typing import Literal

from outrider.serve.http_errors import unavailable

LEAST_RETRY_AFTER_S = 1

State = Literal["loading", "ready", "draining", "failed"]


class Readiness:
    """The state of the server, one for all of its models."""

    def __init__(self) -> None:
        self.state: State = "loading"

    def check(self) -> None:
        """Raises Refusal: not ready."""
        if self.state == "loading":
            raise unavailable("the models are loading", LEAST_RETRY_AFTER_S)
        if self.state != "ready":
            raise unavailable("the server is shutting down", LEAST_RETRY_AFTER_S)
