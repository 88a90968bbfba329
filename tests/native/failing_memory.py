"""A process whose memory runs out in the kernels, at each allocation in turn (test_scarce_memory.py)."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_cases import CASES, drawn, native_logits, random_model
from outrider.errors import DeviceError
from outrider.kernels.library import few_row_matmul, library
from outrider.native.engine import NativeForward
from outrider.records import Draft
from outrider.sampling.candidates import Candidates, are_here

_CASES = [
    *(("llama", "llama with biases, tied"), ("gemma4_text", "plain"), ("qwen3_5_text", "plain")),
    ("nemotron_h", "wide latent experts in groups"),
]
_LENGTH = 260  # more than go through the layers together, and than a part of attention has
_FAIL_AFTER = ctypes.CDLL(None).fail_after


class _Failing:
    """A function of the library whose allocations fail from a number on."""

    def __init__(self, function: Any) -> None:
        self.function, self.number = function, -1

    def __call__(self, *arguments: Any) -> Any:
        _FAIL_AFTER(self.number)
        try:
            return self.function(*arguments)
        finally:
            _FAIL_AFTER(-1)


def check(failing: _Failing, error: type[Exception], run: Callable[[], Tensor], least: int) -> None:
    """Fails at each allocation, until there is one less than that."""
    want = run()
    for number in range(1000):
        failing.number = number
        try:
            got = run()
            break
        except error:
            continue
    assert number >= least and torch.equal(got, want), number


def verdict() -> Tensor:
    logits = torch.randn(1, 4, 500, generator=torch.Generator().manual_seed(0))
    rows = Candidates.of_logits(logits, torch.ones(1), None, torch.full((1,), 0.9), None)[0]
    draft = Draft(torch.tensor([[1, 2, 3]]), rows[:, :3], torch.tensor([3]))
    return rows.verify(1, draft, (torch.full((1, 7), 0.5, dtype=torch.float64), 7, None, None)).drafted_probs


with torch.inference_mode():
    torch.set_num_threads(2)
    for family, name in _CASES:
        native = NativeForward(random_model(family, CASES[family][name]))
        native._run = _Failing(native._run)
        check(native._run, DeviceError, partial(native_logits, native, drawn(1, _LENGTH)), 20)
    kernels: Any = library()
    assert are_here(torch.device("cpu"))  # before, since this sets types of arguments
    for name in ("outrider_few_row_matmul", "outrider_verify", "outrider_candidates"):
        setattr(kernels, name, _Failing(getattr(kernels, name)))
    rows, blocks = torch.randn(5, 64), torch.zeros(9, 68, dtype=torch.uint8)  # of Q8_0
    check(kernels.outrider_few_row_matmul, MemoryError, lambda: few_row_matmul(rows, blocks, 8, 2, 1), 1)
    kernels.outrider_candidates.number = 0  # a thread keeps what the first rows have needed
    try:
        verdict()
        raise AssertionError("there was memory")
    except MemoryError:
        kernels.outrider_candidates.number = -1
    check(kernels.outrider_verify, MemoryError, verdict, 2)
