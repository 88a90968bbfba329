"""A process whose memory runs out in the kernels, at each allocation in turn (test_native_processes.py)."""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from native_cases import CASES, drawn, native_forward, native_logits, random_model
from outrider.errors import DeviceError
from outrider.kernels.library import few_row_matmul, library

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


with torch.inference_mode():
    torch.set_num_threads(2)
    for family, name in _CASES:
        native = native_forward(random_model(family, CASES[family][name]))
        native._run = _Failing(native._run)
        check(native._run, DeviceError, partial(native_logits, native, drawn(1, _LENGTH)), 20)
    kernels: Any = library()
    kernels.outrider_few_row_matmul = _Failing(kernels.outrider_few_row_matmul)
    rows, blocks = torch.randn(5, 64), torch.zeros(9, 68, dtype=torch.uint8)  # of Q8_0
    check(kernels.outrider_few_row_matmul, MemoryError, lambda: few_row_matmul(rows, blocks, 8, 2, 1), 1)
