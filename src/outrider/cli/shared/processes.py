"""A command as one of several processes (``torchrun``), that print, fail and end as one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from outrider.errors import DeviceError
from outrider.system.ranks import Ranks, has_lost_others, join

_LOST = "another process of this job was killed or has crashed (its memory may be full); torchrun reports which one"


def run_together(command: Callable[[], None], mistake: Callable[[BaseException], str | None]) -> None:
    """Run the same command in all processes, and end this one. The first process prints; whichever fails first tells
    why, and alone does so.

    Args:
        mistake: what to tell the user of an error, in one line; None if it is no mistake of theirs.
    """
    if os.environ["RANK"] != "0":  # before torch is imported, which keeps the streams that it finds
        sys.stdout = sys.stderr = open(os.devnull, "w")
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before there are threads, which inherit it
    try:
        ranks = join()
    except DeviceError as error:
        print(f"error: {error}", file=sys.__stderr__)
        sys.exit(2)
    threading.Thread(target=_heed, args=(ranks, signals), daemon=True).start()
    code = 0
    try:
        command()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if code:
            ranks.fail()  # it has been told: by the first process, like all else that commands print
    except BaseException as error:
        message = _LOST if has_lost_others(error) else mistake(error)
        code = 1 if message is None else 2
        _tell(ranks, traceback.format_exc().rstrip() if message is None else f"error: {message}")
    sys.stdout.flush()
    sys.stderr.flush()
    ranks.leave()
    os._exit(code)  # what torch and its threads do at a regular end may wait for processes that are gone


def _tell(ranks: Ranks, message: str) -> None:
    if ranks.fail():
        print(message, file=sys.__stderr__, flush=True)


def _heed(ranks: Ranks, signals: set[signal.Signals]) -> None:
    """Wait for signals, in a thread: the main one may be waiting for a process that is gone.

    torchrun passes Ctrl-C on to all processes; and it terminates them when one of them has ended.
    """
    while signal.sigwait(signals) == signal.SIGINT:
        ranks.is_interrupted = True
        if not ranks.has_begun:  # there is nothing to keep
            ranks.fail()
            os._exit(128 + signal.SIGINT)
    _tell(ranks, f"error: {_LOST}")
    os._exit(128 + signal.SIGTERM)
