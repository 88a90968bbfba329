"""Makers of programs that compile nothing."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from outrider.runtime.execution import Call
from outrider.runtime.maker import Maker, Order
from outrider.runtime.making import Job
from outrider.runtime.programs import Made


class Recalled:
    """In the place of a program: the step itself. It counts its runs."""

    def __init__(self, call: Call) -> None:
        self._call, self.num_runs = call, 0

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.num_runs += 1
        return self._call.on(tensors, stores)


class OnCall(Maker):
    """Delivers when it is told to, and at once what somebody waits for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.orders: list[Order] = []

    def order(self, call: Call, *, is_urgent: bool) -> Order:
        order = Order.of(call, is_urgent)
        self.orders.append(order)
        self._on_order(order)
        if is_urgent:
            self.deliver()
        return order

    def hurry(self, program: Any) -> None:
        self.deliver()

    def deliver(self) -> None:
        for order in self.orders:
            if not order.program.done():
                assert order.call is not None
                order.program.set_result(Recalled(order.call))

    @property
    def num_runs(self) -> int:
        return sum(order.program.result().num_runs for order in self.orders if order.program.done())  # type: ignore[attr-defined]


class Refuses:
    """In the place of a process: it compiles nothing."""

    def __init__(self, is_beside: bool) -> None:
        pass

    def make(self, job: Job) -> Made | str:
        return "RuntimeError: no compiler at all"

    def hurry(self) -> None:
        pass

    def close(self) -> None:
        pass
