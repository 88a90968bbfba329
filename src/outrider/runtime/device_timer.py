"""Timing of device work without synchronizing."""

from __future__ import annotations

import time
from typing import Any

import torch


class Clock:
    """Marks in the work of a device, and the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events, self._must_wait = device.type == "cuda", device.type == "mps"

    def mark(self) -> Any:
        """Mark the end of all work that was submitted so far."""
        if self._has_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            return event
        if self._must_wait:
            torch.mps.synchronize()
        return time.perf_counter()

    def wait(self, mark: Any) -> None:
        """Wait until the work before a mark is done."""
        if self._has_events:
            mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks that were waited for."""
        if self._has_events:
            return float(begin.elapsed_time(end)) / 1e3
        return float(end - begin)
