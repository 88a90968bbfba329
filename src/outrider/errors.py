"""What can go wrong, in one tree.

    OutriderError
    ├── UsageError                 the caller can mend it: a message of one line that names the value and the remedy
    │   ├── OptionError            an option's value is out of range, or unknown
    │   ├── PromptError            a prompt is empty, or longer than the context
    │   ├── ModelError             a model cannot be had
    │   │   ├── ModelNotFound      no such name, path or hub id
    │   │   ├── ModelCorrupt       there is something, but it cannot be read as a causal language model
    │   │   ├── UnsupportedModel   a model of a kind that does not work here, or a part of one
    │   │   └── CompileError       a model that cannot be compiled on this machine
    │   ├── TokenizerMismatch      target and draft do not speak of the same tokens
    │   ├── DeviceError            the device is not there, or has too little memory
    │   ├── WorkerError            the processes that do the work on other machines end before it is done
    │   ├── ConstraintNotRead      the machine has too much other work to read a constraint
    │   ├── FileError              a file cannot be read or written, or a row of it is wrong
    │   └── MissingExtra           an optional dependency is not installed
    ├── NumericsError              a text cannot go on: NaN or infinite logits, or a grammar beyond its limits
    └── RankError                  the processes of a job that share a target have parted

The command line prints the message of any of them on one line and ends with exit code 2. A fault of Outrider itself is
an ``assert`` or an ordinary exception, never one of these.
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "ConstraintNotRead",
    "DeviceError",
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
    "TokenizerMismatch",
    "UnsupportedModel",
    "UsageError",
    "WorkerError",
]


_MOST_CHARACTERS = 200  # of a value, which may be a whole document


class OutriderError(Exception):
    """Base of all errors that Outrider raises on purpose."""


class UsageError(OutriderError):
    """The caller can mend it; the message names the value and the remedy."""


class OptionError(UsageError):
    """An option's value is out of range, or unknown."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > _MOST_CHARACTERS:
            shown = f"{shown[: _MOST_CHARACTERS - 4]} ..."
        super().__init__(f"{name} = {shown} is invalid: {remedy}")
        self.name = name
        self.value = value
        self.remedy = remedy

    def __reduce__(self) -> tuple[object, ...]:  # or it could not go from one process to another
        return type(self), (self.name, self.value, self.remedy)


class PromptError(UsageError):
    """A prompt is empty, or longer than the context."""


class ModelError(UsageError):
    """A model cannot be had."""


class ModelNotFound(ModelError):
    """No such name, path or hub id."""


class ModelCorrupt(ModelError):
    """There is something, but it cannot be read as a causal language model."""


class UnsupportedModel(ModelError):
    """A model of a kind that does not work here: its cache cannot be rolled back, it needs code of its own, or it is a
    part of a model."""


class CompileError(ModelError):
    """A model that cannot be compiled on this machine: run it without compiling."""


class TokenizerMismatch(UsageError):
    """Target and draft do not speak of the same tokens."""


class DeviceError(UsageError):
    """The device is not there."""


class WorkerError(UsageError):
    """The processes that do the work on other machines end before it is done."""


class ConstraintNotRead(UsageError):
    """The process that reads a constraint was ended by something other than its limits, so that it is not known
    whether the constraint can be read."""


class FileError(UsageError):
    """A file cannot be read or written, or a row of it is wrong."""


class MissingExtra(UsageError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, needed_by: str = "this") -> None:
        super().__init__(f"{needed_by} needs {package}: pip install 'outrider[{extra}]'")
        self.package = package
        self.extra = extra
        self.needed_by = needed_by

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.package, self.extra, self.needed_by)


class NumericsError(OutriderError):
    """A text cannot go on: a model gave NaN or infinite logits, or a grammar has come to its limits."""

    @classmethod
    def at(cls, model_name: str, position: int) -> NumericsError:
        """A model has no distribution for the token at a position of a text."""
        return cls(
            f"the model {model_name} gave NaN or infinite logits for position {position} of the text; "
            "its weights may be damaged, or its dtype too narrow (try --dtype float32)"
        )


class RankError(OutriderError):
    """The processes of a job (``torchrun``), which share a target, have come to different tokens."""
