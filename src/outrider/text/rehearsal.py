"""Reading a constraint in a process of its own, before it is read here.

A few hundred bytes can keep llguidance busy for hours: it decides whether a string can match all patterns of a schema
by expanding them, and none of its limits (``LLParserLimits``) counts that work. It cannot be interrupted either. So a
process whose processor time and memory are limited reads each constraint first.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache

_MOST_CPU_S = 2  # ordinary constraints take 0.1, most of it for the start of Python
_MOST_MEMORY = 2**30
_MOST_S = 60.0  # on a machine so busy that the processor time does not pass

# Imports nothing of this package, which would take longer than all the rest. Windows has no such limits, and macOS none
# of memory: there the caller's limit of time remains.
_PROGRAM = """
import contextlib, sys
import llguidance
with contextlib.suppress(ImportError, ValueError, OSError):
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]),) * 2)
    resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
llguidance.LLMatcher.validate_grammar_with_warnings(sys.stdin.read())
"""


@lru_cache(maxsize=64)
def can_be_read(grammar: str) -> bool:
    """Whether llguidance can tell within the limits if a grammar, in its own form, is valid."""
    command = [sys.executable, "-P", "-c", _PROGRAM, str(_MOST_CPU_S), str(_MOST_MEMORY)]
    try:
        done = subprocess.run(command, input=grammar.encode(), capture_output=True, timeout=_MOST_S)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
