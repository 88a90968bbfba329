"""What a machine has for a process: cores worth a thread, and a while without garbage collection."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.cli.shared.pair_options import set_threads
from outrider.models.loading import Checkpoint, load_checkpoint
from outrider.system.resources import gc_paused, useful_threads


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def _siblings(pairs: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": listed for n, listed in pairs.items()}


def test_a_thread_for_each_physical_core(tmp_path: Path) -> None:
    root = _write(tmp_path, _siblings({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert useful_threads({0, 1, 2, 3}, root) == 2
    assert useful_threads({0, 2}, root) == 1  # both halves of one
    assert useful_threads(set(range(5)), tmp_path / "nothing") == 5


def test_efficiency_cores_are_left_out(tmp_path: Path) -> None:
    """Two cores of two threads and four efficiency cores, as Intel's are described; and ARM's."""
    intel = _siblings({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"})
    root = _write(tmp_path / "intel", intel | {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"})
    assert useful_threads(set(range(8)), root) == 2
    assert useful_threads({4, 5, 6}, root) == 3  # the process may use no others
    capacities = {0: 250, 1: 250, 2: 250, 3: 250, 4: 870, 5: 870, 6: 870, 7: 1024}
    arm = {f"sys/devices/system/cpu/cpu{n}/cpu_capacity": str(size) for n, size in capacities.items()}
    assert useful_threads(set(range(8)), _write(tmp_path / "arm", arm)) == 4


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 8), ("10000 100000", 1), ("250000 100000", 2)])
def test_the_quota_of_a_container_is_the_most(limit: str, expected: int, tmp_path: Path) -> None:
    """Of the root, or of a group of the process."""
    assert useful_threads(set(range(8)), _write(tmp_path / "root", {"sys/fs/cgroup/cpu.max": limit})) == expected
    files = {"proc/self/cgroup": "0::/a.slice/b", "sys/fs/cgroup/a.slice/cpu.max": limit}
    assert useful_threads(set(range(8)), _write(tmp_path / "slice", files)) == expected


def test_the_default_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is taken; PyTorch's choice is only ever lowered."""
    chosen: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", chosen.append)
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for useful in (3, 16, None):
        monkeypatch.setattr("outrider.cli.shared.pair_options.useful_threads", lambda useful=useful: useful)
        set_threads(None)
    set_threads(5)
    monkeypatch.setattr("outrider.cli.shared.pair_options.useful_threads", lambda: 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    set_threads(None)
    assert chosen == [3, 5]


@pytest.mark.slow
def test_threads_that_are_bound_to_cores() -> None:
    """PyTorch's OpenMP binds the main thread as PyTorch is imported; all cores are counted nevertheless."""
    program = "from outrider.cli.shared.pair_options import set_threads; set_threads(None)\n"
    program += "import torch; print(torch.get_num_threads())"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    bound = environment | {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    command = [sys.executable, "-c", program]
    free, all_bound = (subprocess.check_output(command, env=one, text=True) for one in (environment, bound))
    assert all_bound == free


@pytest.mark.parametrize("is_enabled", [True, False])
def test_collection_is_as_it_was_afterwards(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        gc.enable() if is_enabled else gc.disable()
        with pytest.raises(ValueError), gc_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()


def test_models_are_loaded_without_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    states = []

    def noting(*arguments: Any, **options: Any) -> Checkpoint:
        states.append(gc.isenabled())
        return load_checkpoint(*arguments, **options)

    monkeypatch.setattr("outrider.api.load_checkpoint", noting)
    outrider.load("fable", "fable-draft")
    assert states == [False, False]
    assert gc.isenabled()
