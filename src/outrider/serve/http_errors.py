"""Errors in OpenAI's format.

Source: the error objects of OpenAI's API reference; clients retry 429 and 5xx, and obey ``Retry-After``.
"""

from __future__ import annotations

import logging
from typing import Any

from outrider.errors import ConstraintNotRead, DeviceError, OptionError, OutriderError, UsageError

_LOG = logging.getLogger("outrider.serve")
_MOST_CHARACTERS = 400  # per message or name, which may quote the request
_RETRY_S = 10  # when the machine is overloaded


class Refusal(Exception):
    """A refused request, or the refused rest of one: an HTTP status, the field at fault (``param``), and when to retry,
    if that may help."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type_: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.type, self.param, self.code, self.retry_after_s = status, type_, param, code, retry_after_s

    def to_json(self) -> dict[str, Any]:
        param = None if self.param is None else _quoted(self.param)
        return {"error": {"message": _quoted(str(self)), "type": self.type, "param": param, "code": self.code}}


def _quoted(text: str) -> str:
    """A text that may quote the request: shortened, and without lone surrogates, which UTF-8 cannot have."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 4]} ..."


def unavailable(message: str, retry_after_s: int) -> Refusal:
    """Temporary refusal (503)."""
    return Refusal(message, status=503, type_="server_error", code="unavailable", retry_after_s=retry_after_s)


def too_many(message: str, retry_after_s: int) -> Refusal:
    """Temporary refusal for one client (429)."""
    kind = {"type_": "rate_limit_error", "code": "rate_limit_exceeded"}
    return Refusal(message, status=429, retry_after_s=retry_after_s, **kind)


def internal_error() -> Refusal:
    """Refusal for an error of ours. Its details are for the log: clients should not see them."""
    return Refusal("internal server error", status=500, type_="server_error")


def refusal_of(error: Exception) -> Refusal:
    """Error reported to a client. An error of ours is logged, with its traceback."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, OptionError):
        return Refusal(str(error), param=error.name)
    if isinstance(error, ConstraintNotRead | DeviceError):
        return unavailable(str(error), _RETRY_S)
    if isinstance(error, UsageError):
        return Refusal(str(error), param="prompt")
    if isinstance(error, RecursionError):
        return Refusal("the request is nested too deeply")
    if isinstance(error, OutriderError):
        return Refusal(str(error), status=500, type_="server_error")
    _LOG.error("a request has failed", exc_info=error)
    return internal_error()
