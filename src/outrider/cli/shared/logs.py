"""Log messages on standard error: those about long work, and with ``--verbose`` those about models, too."""

from __future__ import annotations

import logging

from outrider.cli.shared.wrapping import say

_PACKAGE = "outrider"


class _OnStderr(logging.Handler):
    """Logs to the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def log_to_stderr(name: str = _PACKAGE) -> logging.Logger:
    """Show a logger's messages on standard error."""
    logger = logging.getLogger(name)
    if not (logger.handlers or logging.getLogger(_PACKAGE).handlers):
        logger.addHandler(_OnStderr())
    logger.setLevel(logging.INFO)
    return logger
