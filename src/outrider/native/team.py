"""Number of threads of a forward, which leaves processors to other processes.

The threads of a forward wait for each other some hundred times. If another process takes the processor of one of them,
all of them wait, and a forward takes many times as long as with one thread less. Its result does not depend on their
number, so this is free to change. Forwards that are late twice in a row cost the team a thread; it returns after some
forwards in time, later each time that this fails. Late is slower than the last ones by more than noise, or than with a
thread less, which is tried at the beginning.
"""

from __future__ import annotations

from collections.abc import Hashable

_LATE = 1.6  # times the best of the last forwards
_FORGETTING = 1.01  # of the best, by each forward
_TRIED = range(3, 5)  # forwards with a thread less
_SOONEST, _LATEST = 64, 2048  # forwards in time


class Team:
    """Threads of the forwards of one model."""

    def __init__(self) -> None:
        self._num_spared = 0
        self._best_s: dict[Hashable, float] = {}
        self._num_forwards = 0
        self._num_late = self._num_in_time = 0
        self._patience = _SOONEST

    def size(self, num_threads: int) -> int:
        """Number of threads of the next forward.

        Args:
            num_threads: the threads that the process may use.
        """
        return max(1, num_threads - self._num_spared - (self._num_forwards in _TRIED))

    def learn(self, kind: Hashable, size: int, num_threads: int, seconds: float) -> None:
        """Learn from a forward.

        Args:
            kind: forwards of one kind take the same time.
        """
        best = min(seconds, _FORGETTING * self._best_s.get((kind, size), seconds))
        self._best_s[kind, size] = best
        self._num_forwards += 1
        if self._num_forwards - 1 in _TRIED:
            return
        if seconds > min(_LATE * best, self._best_s.get((kind, size - 1), seconds)):
            self._num_late, self._num_in_time = self._num_late + 1, 0
            if self._num_late >= 2 and size > 1:
                self._patience = min(2 * self._patience, _LATEST) if self._num_spared == 0 else self._patience
                self._num_spared, self._num_late = num_threads - size + 1, 0
            return
        self._num_late, self._num_in_time = 0, self._num_in_time + 1
        if self._num_in_time >= self._patience:
            if self._num_spared == 0:
                self._patience = _SOONEST
            self._num_spared, self._num_in_time = max(0, self._num_spared - 1), 0
