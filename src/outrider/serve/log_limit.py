"""Rate limit of the log: clients must not be able to fill a disk with it."""

from __future__ import annotations

import logging
import time

_EVERY_S = 60.0
_MOST_IN_TIME = 5


class RateLimitFilter(logging.Filter):
    """Passes a few warnings and errors per minute of each message; the next line reports how many were dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}  # start of the minute, and the count in it

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind, now_s = (record.name, str(record.msg)), time.monotonic()
        begun_s, num_lines = self._kinds.get(kind, (now_s, 0))
        num_left_out = 0
        if now_s - begun_s >= _EVERY_S:
            num_left_out = max(num_lines - _MOST_IN_TIME, 0)
            begun_s, num_lines = now_s, 0
        self._kinds[kind] = begun_s, num_lines + 1
        if num_lines >= _MOST_IN_TIME:
            return False
        if num_left_out:
            record.msg = f"{record.getMessage()} (and {num_left_out} more like it)"
            record.args = ()
        return True
