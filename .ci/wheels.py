"""Make an sdist, and wheels with the kernels for all processors of this machine and of ARM, and check them.

python .ci/wheels.py FOLDER

Checked are files, tags (by auditwheel), results of each library that can run here (ARM's in an emulator), and that this
machine's wheel needs no compiler. Packages are those of the environment that runs this.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))
from outrider.kernels.build import BASELINE, FLAGS, LEVELS, levels_here  # noqa: E402

ARM = "aarch64-linux-gnu"
FEW = "20"  # one of so many shapes


def run(*command: str | Path, **variables: str) -> str:
    """Standard output of a command, run in the repository with these variables."""
    print("+", *(f"{name}={value}" for name, value in variables.items()), *command, flush=True)
    environment = os.environ | variables
    return subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True).stdout


def make(folder: Path, parts: list[str], compiler: str) -> Path:
    """A wheel for all processors of the machine for which the compiler compiles, in place of an earlier one."""
    with TemporaryDirectory() as made:
        run(sys.executable, "-m", "build", *parts, "-o", made, OUTRIDER_KERNELS="all", CXX=compiler)
        paths = [Path(shutil.move(path, folder / path.name)) for path in Path(made).iterdir()]
    (wheel,) = (path for path in paths if path.suffix == ".whl")
    shown = run("auditwheel", "show", wheel)
    print(shown)
    oldest, tag = (re.search(r"manylinux_2_(\d+)_", text) for text in (shown.partition("platform tag:")[2], wheel.name))
    assert oldest is not None and tag is not None and int(oldest[1]) <= int(tag[1])
    return wheel


def check(wheel: Path, levels: list[str], compiler: str, emulator: list[str]) -> None:
    """Run the drivers of the tests with the wheel's libraries. They compare results with sums in double."""
    found = {}
    with TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for level in levels:
            (library,) = Path(folder).rglob(f"{level}-{'?' * 64}.so")
            program, drivers = Path(folder) / level, sorted((ROOT / "tests" / "cpu_kernels").glob("*.cpp"))
            run(*compiler.split(), *FLAGS, "-w", "-O1", "-fopenmp", *drivers, library, "-o", program)
            found[level] = run(*emulator, program, FEW, OMP_WAIT_POLICY="passive")
    print(found)
    for level in ("amx", "baseline-fast"):  # int8 on tiles, and sums that round twice, have bits of their own
        found.pop(level, None)
    assert len(set(found.values())) == 1


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wheel = make(folder, [], os.environ.get("CXX", "g++"))
    run(".ci/bare", wheel)
    levels = [level.name for level in levels_here()]
    levels += ["baseline-fast"] if platform.machine() == "x86_64" else []
    check(wheel, levels, os.environ.get("CXX", "g++"), [])
    if platform.machine() != "aarch64" and shutil.which(f"{ARM}-g++") and shutil.which("qemu-aarch64"):
        wheel = make(folder, ["--wheel"], f"{ARM}-g++")
        levels = [level.name for level in (*LEVELS["aarch64"], BASELINE)]
        check(wheel, levels, f"{ARM}-g++", ["qemu-aarch64", "-L", f"/usr/{ARM}"])
    run(sys.executable, ".ci/check_dist.py", folder)


if __name__ == "__main__":
    main()
