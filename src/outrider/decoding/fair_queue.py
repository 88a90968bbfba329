"""A fair queue: clients take turns, so that many requests of one client do not delay the others.

This module knows neither requests nor threads.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Container, Iterator
from itertools import count
from typing import Generic, TypeVar

_Item = TypeVar("_Item")
NO_COUNTS: Counter[str] = Counter()


class FairQueue(Generic[_Item]):
    """Clients take turns; within a client the lowest priority number goes first, then the oldest item. With one client
    and one priority: first come, first served. With ``has_priority_across_clients`` the lowest number of all clients
    goes first; clients take turns on ties."""

    def __init__(self, *, has_priority_across_clients: bool = False) -> None:
        self.has_priority_across_clients = has_priority_across_clients
        self._lines: dict[str, list[tuple[int, int, _Item]]] = {}  # a heap per client; the next client is first
        self._arrivals = count()
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[_Item]:  # in any order
        return (item for line in self._lines.values() for _, _, item in line)

    def push(self, item: _Item, client: str = "", priority: int = 0, *, is_back: bool = False) -> None:
        """Add an item. An item that is back goes before the others of its client and priority."""
        arrival = next(self._arrivals) * (-1 if is_back else 1)
        heapq.heappush(self._lines.setdefault(client, []), (priority, arrival, item))
        self._num_items += 1

    def _next_client(self, but: Container[str], counts: Counter[str]) -> str | None:
        clients = (client for client in self._lines if client not in but)
        if self.has_priority_across_clients:
            return min(clients, key=lambda one: self._lines[one][0][0], default=None)  # the first of several
        return min(clients, key=lambda one: counts[one], default=None)  # likewise

    def first(self, counts: Counter[str] = NO_COUNTS) -> _Item | None:
        """The item that ``pop`` would return; None if there is none."""
        client = self._next_client((), counts)
        return None if client is None else self._lines[client][0][2]

    def pop(self, but: Container[str] = (), counts: Counter[str] = NO_COUNTS) -> tuple[str, _Item] | None:
        """Remove and return the next item and its client; None if there is none. The clients ``but`` are skipped;
        those with smaller ``counts`` go first, and with equal ones take turns."""
        client = self._next_client(but, counts)
        if client is None:
            return None
        line = self._lines.pop(client)
        _, _, item = heapq.heappop(line)
        if line:
            self._lines[client] = line  # behind the others
        self._num_items -= 1
        return client, item

    def remove(self, is_gone: Callable[[_Item], bool]) -> None:
        lines = {client: [entry for entry in line if not is_gone(entry[2])] for client, line in self._lines.items()}
        for line in lines.values():
            heapq.heapify(line)
        self._lines = {client: line for client, line in lines.items() if line}
        self._num_items = sum(map(len, self._lines.values()))
