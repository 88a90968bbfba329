"""A process for each program."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any

import torch

from peer_arms.base import Arm, Output, Runs


class Worker:
    """A process that holds the arms of one program, and runs one of them when it is told to."""

    def __init__(
        self, make: Callable[..., AbstractContextManager[Runs]], arguments: tuple[Any, ...], num_threads: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, arguments, num_threads))
        self._name = make.__name__
        self._process.start()
        other.close()
        self.arms: list[Arm] = self._received()

    def run(
        self, index: int, ids: Sequence[int], temperature: float, seed: int, num_tokens: int
    ) -> tuple[Output, float]:
        """What the arm of this index gave, and in how many seconds."""
        self._connection.send((index, ids, temperature, seed, num_tokens))
        output, seconds = self._received()
        return output, seconds

    def _received(self) -> Any:
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            raise SystemExit(f"{self._name} ended with exit code {self._process.exitcode}") from None

    def stop(self) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    make: Callable[..., AbstractContextManager[Runs]],
    arguments: tuple[Any, ...],
    num_threads: int,
) -> None:
    torch.set_num_threads(num_threads)
    with make(*arguments) as runs:
        connection.send([arm for arm, _ in runs])
        while True:
            try:
                index, *given = connection.recv()
            except EOFError:
                return
            start = time.perf_counter()
            output = runs[index][1](*given)
            connection.send((output, time.perf_counter() - start))
