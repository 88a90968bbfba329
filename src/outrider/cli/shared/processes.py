"""Runs a command as one of several processes (``torchrun``): the first runs it, the others follow, all end together."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from outrider.errors import DeviceError
from outrider.system.ranks import Ranks, join

_LOST = "another process of this job was killed or has crashed (its memory may be full); torchrun reports which one"


def run_together(command: Callable[[], int], mistake: Callable[[BaseException], str | None]) -> None:
    """Run a command in the first process, follow it in the others, and exit. Only the process that fails first reports
    its error. ``command``: returns the exit code. ``mistake``: one-line message for a user's error; None for other
    errors."""
    if os.environ["RANK"] != "0":  # before importing torch, which keeps the current streams
        sys.stdout = sys.stderr = open(os.devnull, "w")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before any thread starts, since threads inherit it
    try:
        ranks = join()
    except DeviceError as error:
        print(f"error: {error}", file=sys.__stderr__)
        sys.exit(2)
    threading.Thread(target=_watch_signals, args=(ranks, signals), daemon=True).start()
    code = 0
    try:
        if ranks.rank:
            ranks.follow()
        elif code := command():
            ranks.fail()  # it has printed the reason
    except BaseException as error:
        message = _LOST if _has_lost_others(error) else mistake(error)
        code = 1 if message is None else 2
        _report(ranks, traceback.format_exc().rstrip() if message is None else f"error: {message}")
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        ranks.leave()
    os._exit(code)  # which ends the others, too; a regular exit of torch may wait for processes that have gone


def _report(ranks: Ranks, message: str) -> None:
    if ranks.fail():
        print(message, file=sys.__stderr__, flush=True)


def _watch_signals(ranks: Ranks, signals: set[signal.Signals]) -> None:
    """Wait for signals in a thread: the main thread may be blocked by a process that has gone. torchrun passes Ctrl-C
    to all processes, and terminates them when one has ended."""
    while signal.sigwait(signals) == signal.SIGINT:
        ranks.is_interrupted = True
    _report(ranks, f"error: {_LOST}")
    os._exit(128 + signal.SIGTERM)


def _has_lost_others(error: BaseException | None) -> bool:
    import torch.distributed as dist

    while error is not None:
        if isinstance(error, dist.DistError) or "gloo/transport" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
