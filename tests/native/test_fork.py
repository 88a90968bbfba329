"""Processes that are forked from one whose threads have run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os
import torch
from native_cases import CASES, native_logits, random_model
from outrider.native.engine import NativeForward

def run():
    return native_logits(native, torch.arange(1, 51)[None]), torch.zeros(1_000_000).add_(1).sum()

torch.set_num_threads(2)
native = NativeForward(random_model("llama", CASES["llama"]["llama with biases, tied"]))
want = run()
if (child := os.fork()) == 0:
    assert torch.get_num_threads() == 1
    os._exit(0 if all(map(torch.equal, run(), want)) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_child_uses_one_thread() -> None:
    """It has none of its parent's, and OpenMP would wait for them forever. A warning says so."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])}
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "forked from one with threads" in done.stderr and "'spawn'" in done.stderr
