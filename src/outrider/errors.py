"""Exceptions. A ``UsageError`` is for the caller to fix: the command line prints its one-line message, which names the
value and the remedy, and exits with code 2. A bug in Outrider is an ``assert`` or an ordinary exception, never one of
these.
"""

from __future__ import annotations

from itertools import islice

__all__ = [
    "ConstraintNotRead",
    "DeviceError",
    "ExecutionError",
    "FileError",
    "MissingExtra",
    "ModelCorrupt",
    "ModelError",
    "ModelNotFound",
    "NumericsError",
    "OptionError",
    "OutriderError",
    "PromptError",
    "RankError",
    "SessionError",
    "TokenizerMismatch",
    "UnsupportedModel",
    "UsageError",
    "WorkerError",
]


# The line that installs an extra, in a clone: nothing is published yet. README and pages say the same
# (tests/test_install.py).
INSTALL = "pip install '.[{extra}]'"
_MOST_CHARACTERS = 200  # shown of a value, which may be a whole document


def shown(value: object, num_characters: int) -> str:
    """The beginning of a value's ``repr``. That of a whole document would take memory and time."""
    if isinstance(value, str | bytes | list | tuple) and len(value) > num_characters:
        value = value[:num_characters]
    elif isinstance(value, dict) and len(value) > num_characters:
        value = dict(islice(value.items(), num_characters))
    return repr(value)[:num_characters]


def reason_of(error: Exception) -> str:
    """The text of an error, in one line, cut."""
    return " ".join(str(error).split())[:300]


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""


class UsageError(OutriderError):
    """The caller can fix it; the message names the value and the remedy."""


class OptionError(UsageError):
    """An option's value is out of range, or unknown."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        text = shown(value, _MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            text = f"{text[: _MOST_CHARACTERS - 4]} ..."
        super().__init__(f"{name} = {text} is invalid: {remedy}")
        self.name, self.value, self.remedy = name, value, remedy

    def __reduce__(self) -> tuple[object, ...]:  # so that it can be pickled
        return type(self), (self.name, self.value, self.remedy)


class PromptError(UsageError):
    """A prompt is empty, or longer than the context."""

    @classmethod
    def empty(cls) -> PromptError:
        return cls("the prompt is empty: give at least one token of text to start from")


class ModelError(UsageError):
    """A model cannot be loaded."""


class ModelNotFound(ModelError):
    """No such name, path or hub id."""


class ModelCorrupt(ModelError):
    """The model was found, but cannot be read as a causal language model."""


class UnsupportedModel(ModelError):
    """Unsupported model: its cache cannot be rolled back, it needs code of its own, its weights are pickled, or it is
    a part of a model."""


class ExecutionError(ModelError):
    """The model cannot run with the execution that was asked for: leave the choice to "auto"."""


class TokenizerMismatch(UsageError):
    """Target and draft have different tokens."""


class DeviceError(UsageError):
    """The device is missing, or has too little memory."""


class WorkerError(UsageError):
    """Worker processes on other machines, or a server that was asked, ended before the work was done."""


class ConstraintNotRead(UsageError):
    """The process that compiles a constraint was ended by something other than its limits, so the constraint may be
    valid."""


class SessionError(UsageError):
    """The session is closed, or an error in another of its streams has ended this one."""


class FileError(UsageError):
    """A file cannot be read or written, or a row of it is wrong."""


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, needed_by: str = "this") -> None:
        super().__init__(f"{needed_by} needs {package}: {INSTALL.format(extra=extra)} in a clone of Outrider")
        self.package, self.extra, self.needed_by = package, extra, needed_by

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra, self.needed_by)


class NumericsError(OutriderError):
    """Generation cannot continue: a model gave NaN or infinite logits, or a grammar reached its limits."""

    @classmethod
    def at(cls, model_name: str, position: int) -> NumericsError:
        """The error for a model without a distribution for the token at ``position``."""
        return cls(
            f"the model {model_name} gave NaN or infinite logits for position {position} of the text; "
            "its weights may be damaged, or its dtype too narrow (try --dtype float32)"
        )


class RankError(OutriderError):
    """The ranks of a job (``torchrun``) that share a target generated different tokens."""
