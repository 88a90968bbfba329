"""Memory that cannot be allocated: an error of the step, never the end of the process; and threads, after forks too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.kernels.build import compiler
from outrider.native.team import Team

# Memory of C++, of which all allocations fail from the given number on.
_FAILING = """
#include <atomic>
#include <cstdlib>
#include <new>
std::atomic<long> num_left{-1};
extern "C" void fail_after(long number) { num_left = number; }
void count() {
  if (num_left == 0) throw std::bad_alloc();
  if (num_left > 0) num_left--;
}
void* operator new(std::size_t size) { return count(), std::malloc(size); }
void* operator new[](std::size_t size) { return count(), std::malloc(size); }
void* operator new[](std::size_t size, std::align_val_t to) {
  return count(), std::aligned_alloc(std::size_t(to), (size + std::size_t(to) - 1) / std::size_t(to) * std::size_t(to));
}
void operator delete(void* place) noexcept { std::free(place); }
void operator delete[](void* place) noexcept { std::free(place); }
void operator delete(void* place, std::size_t) noexcept { std::free(place); }
void operator delete[](void* place, std::size_t) noexcept { std::free(place); }
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS preloads in another way")
def test_native_forward_survives_failed_allocations(tmp_path: Path) -> None:
    """An error, and the next call has the same bytes. Of two threads none allocates in a forward."""
    library = tmp_path / "failing.so"
    command = [*compiler(), "-shared", "-fPIC", "-x", "c++", "-", "-o", str(library)]
    subprocess.run(command, input=_FAILING, text=True, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).with_name("failing_memory.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])


_PROGRAM = """
import os
import torch
from native_cases import CASES, native_forward, native_logits, random_model

def run():
    return native_logits(native, torch.arange(1, 51)[None]), torch.zeros(1_000_000).add_(1).sum()

torch.set_num_threads(2)
native = native_forward(random_model("llama", CASES["llama"]["llama with biases, tied"]))
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


def test_a_neighbour_costs_a_thread_until_it_is_gone() -> None:
    team, sizes = Team(), list[int]()
    for step in range(9000):
        sizes.append(team.size(2))
        team.learn("step", sizes[-1], 2, {2: 30.0 if 1000 < step < 4000 else 1.0, 1: 1.8}[sizes[-1]])
    assert sizes[100:1000].count(2) > 850 and sizes[2000:4000].count(1) > 1900 and set(sizes[-500:]) == {2}
