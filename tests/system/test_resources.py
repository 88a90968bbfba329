"""What a machine has for a process: cores worth a thread, and a while without garbage collection."""

import gc
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider.cli.shared.pair_options import set_threads
from outrider.errors import OptionError
from outrider.models.loading import load_checkpoint
from outrider.system.resources import useful_threads


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def _siblings(pairs: dict[int, str]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": listed for n, listed in pairs.items()}


def test_a_thread_for_each_performance_core(tmp_path: Path) -> None:
    """Cores of two threads; two of these and four efficiency cores, as Intel's are described; and ARM's."""
    root = _write(tmp_path / "plain", _siblings({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}))
    assert useful_threads({0, 1, 2, 3}, root) == 2
    assert useful_threads({0, 2}, root) == 1  # both halves of one
    assert useful_threads(set(range(5)), tmp_path / "nothing") == 5
    intel = _siblings({0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 4: "4", 5: "5", 6: "6", 7: "7"})
    root = _write(tmp_path / "intel", intel | {"sys/devices/cpu_core/cpus": "0-3", "sys/devices/cpu_atom/cpus": "4-7"})
    assert useful_threads(set(range(8)), root) == 2
    assert useful_threads({4, 5, 6}, root) == 3  # the process may use no others
    capacities = [250] * 4 + [870] * 3 + [1024]
    arm = {f"sys/devices/system/cpu/cpu{n}/cpu_capacity": str(size) for n, size in enumerate(capacities)}
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


@pytest.mark.parametrize("is_enabled", [True, False])
def test_models_are_loaded_without_collections(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Afterwards collection is as it was, after an error too."""
    states, was_enabled = [], gc.isenabled()

    def noting(*arguments: Any, **options: Any) -> Any:
        states.append(gc.isenabled())
        return load_checkpoint(*arguments, **options)

    monkeypatch.setattr("outrider.api.load_checkpoint", noting)
    try:
        gc.enable() if is_enabled else gc.disable()
        outrider.load("fable", "fable-draft")
        assert states == [False, False] and gc.isenabled() == is_enabled
        with pytest.raises(OptionError):
            outrider.load("fable", placment=1)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable() if was_enabled else gc.disable()
