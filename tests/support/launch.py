"""Starting several processes with torchrun, as a user does."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@contextmanager
def launched(*arguments: object, size: int = 2) -> Iterator[subprocess.Popen[str]]:
    """What torchrun starts with these arguments; when the test is over, all of it ends."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TQDM_DISABLE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")  # or torchrun says that it chose it
    command = [*TORCHRUN, str(size), *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as launcher:
        try:
            yield launcher
        finally:
            for pid in (*ranks_of(launcher).values(), launcher.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ranks_of(launcher: subprocess.Popen[str]) -> dict[str, int]:
    """The process numbers by rank, as Linux tells them."""
    ranks: dict[str, int] = {}
    with suppress(FileNotFoundError, ProcessLookupError):  # one has ended
        for pid in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
            for entry in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                if entry.startswith("RANK="):
                    ranks[entry.removeprefix("RANK=")] = int(pid)
    return ranks


def said_by_loading(*names: str) -> str:
    """Standard output and error of a process, as a user's own, that loads a target and a draft, generates, and ends
    while streams are suspended."""
    code = (
        "import sys, outrider\n"
        "decoder = outrider.load(*sys.argv[1:])\n"
        "decoder.generate([[3, 4, 5]], max_new_tokens=3, seed=1)\n"
        "left = decoder.stream([3, 4, 5], seed=1), decoder.complete([[3], [4]], seed=1, max_new_tokens=9)\n"
        "for one in left: next(one)\n"
    )
    environment = {name: value for name, value in os.environ.items() if "VERBOSITY" not in name}
    ended = subprocess.run(
        [sys.executable, "-c", code, *names], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr
