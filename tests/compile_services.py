"""Makers of programs that compile nothing."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from outrider.compile.program_cache import CompiledProgram
from outrider.compile.service import CompileService, ProgramOrder
from outrider.compile.worker import CompileJob
from outrider.errors import CompileError
from outrider.runtime.execution import Call, Program


class Recalled:
    """In the place of a program: the step itself. It counts its runs."""

    def __init__(self, call: Call) -> None:
        self._call, self.num_runs = call, 0

    def run(self, tensors: Sequence[Tensor], stores: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.num_runs += 1
        return self._call.on(tensors, stores)


class _Awaited(Future[Program]):
    """Is there as soon as somebody waits for it."""

    def __init__(self, deliver: Callable[[], None]) -> None:
        super().__init__()
        self._deliver = deliver

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._deliver()
        return super().exception(0)


class OnCall(CompileService):
    """Delivers when it is told to, or when somebody waits.

    Attributes:
        num_awaited: how many times somebody waited.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.orders: list[ProgramOrder] = []
        self.num_awaited = 0

    def order(self, call: Call) -> ProgramOrder:
        order = ProgramOrder.of(call)
        order.program = _Awaited(self._be_awaited)
        self.orders.append(order)
        self._on_order(order)
        return order

    def _be_awaited(self) -> None:
        self.num_awaited += 1
        self.deliver()

    def deliver(self) -> None:
        for order in self.orders:
            if not order.program.done():
                assert order.call is not None
                order.program.set_result(Recalled(order.call))

    @property
    def num_runs(self) -> int:
        return sum(order.program.result().num_runs for order in self.orders if order.program.done())  # type: ignore[attr-defined]


class Fails(OnCall):
    """It cannot make some programs, as those who wait for one are told."""

    def __init__(self, fails: Callable[[Call], bool]) -> None:
        super().__init__()
        self._fails = fails

    def deliver(self) -> None:
        for order in self.orders:
            if not order.program.done() and order.call is not None and self._fails(order.call):
                order.program.set_exception(CompileError("no compiler"))
        super().deliver()


class Refuses:
    """In the place of a process: it compiles nothing."""

    def make(self, job: CompileJob) -> CompiledProgram | str:
        return "RuntimeError: no compiler at all"

    def close(self) -> None:
        pass
