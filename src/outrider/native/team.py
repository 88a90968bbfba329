"""Number of threads of a forward, which leaves processors to other processes.

The threads of a forward wait for each other some hundred times. If another process takes the processor of one of them,
all of them wait, and a forward takes many times as long as with one thread less. Its result does not depend on their
number, so this is free to change. A thread less is tried at the beginning, for comparison; where the median of the
last forwards is clearly worse than that, the team has a thread less from then on. The thread is tried again after some
forwards, later each time that this fails.

A machine that many share is slow by fits and starts. Medians of few forwards tell that from a neighbour who stays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

_NUM_COMPARED, _NUM_TRIED = 5, 3  # forwards
_CLEARLY = 1.15  # times as long
_FORGETTING = 1.01  # of the shortest time, by each forward
_SOONEST, _LATEST = 64, 2048  # forwards until the thread is tried again


class Team:
    """Threads of the forwards of one model."""

    def __init__(self) -> None:
        self._num_spared = 0
        self._num_trials = self._change = 0  # forwards to come with another number of threads, and by how many
        self._shortest_s: dict[Hashable, float] = {}  # with all threads, by kind
        self._times: dict[int, deque[float]] = {}  # of the last forwards, over the shortest, by the number of threads
        self._num_forwards, self._patience = 0, _SOONEST  # since the last change or trial

    def size(self, num_threads: int) -> int:
        """Number of threads of the next forward, of those that the process may use."""
        return max(1, num_threads - self._num_spared + (self._change if self._num_trials else 0))

    def learn(self, kind: Hashable, size: int, num_threads: int, seconds: float) -> None:
        """Learn from a forward. Those of one kind take the same time."""
        if size == num_threads:
            self._shortest_s[kind] = min(seconds, _FORGETTING * self._shortest_s.get(kind, seconds))
        self._num_forwards += 1
        if kind in self._shortest_s:
            times = self._times.setdefault(size, deque(maxlen=_NUM_COMPARED))
            times.append(seconds / self._shortest_s[kind])
        if self._num_trials:
            self._num_trials -= 1
            if self._num_trials == 0 and self._change > 0:
                self._judge_trial(size)
        elif self._is_worse(size, size - 1, _CLEARLY):
            self._num_spared, self._patience = num_threads - size + 1, _SOONEST
            self._try(-1, size - 1)
        elif self._num_spared and self._num_forwards >= self._patience:
            self._try(1, size)
        elif size == num_threads and size - 1 not in self._times and self._num_forwards >= _NUM_TRIED:
            self._try(-1, size)

    def _try(self, change: int, size: int) -> None:
        self._num_forwards = 0
        if size + change > 0:
            self._times.pop(size + change, None)
            self._num_trials, self._change = _NUM_TRIED, change

    def _judge_trial(self, size: int) -> None:
        if self._is_worse(size, size - 1, 1.0):
            self._patience = min(2 * self._patience, _LATEST)
        else:
            self._num_spared, self._patience = self._num_spared - 1, _SOONEST

    def _is_worse(self, size: int, other: int, factor: float) -> bool:
        """Whether the last forwards with ``size`` threads took more than ``factor`` times as long as with ``other``."""
        mine, its = self._times.get(size, ()), self._times.get(other, ())
        return min(len(mine), len(its)) >= _NUM_TRIED and median(mine) > factor * median(its)
