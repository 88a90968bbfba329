"""Rows of a file of prompts that cannot be continued: an error, or skipped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import FileError, OptionError, OutriderError
from outrider.offline.prompt_file import PromptFile
from outrider.offline.prompt_row import PromptLine

_MOST_SHOWN = 20


@dataclass
class InvalidRows:
    """Rows that cannot be continued. The first one ends the command, unless they are skipped.

    Attributes:
        reasons: by index, of the rows that are skipped.
    """

    lines: PromptFile
    is_skipping: bool
    reasons: dict[int, str] = field(default_factory=dict)

    def check(self, indices: Container[int], check: Callable[[PromptLine], None]) -> None:
        """Read all rows. Those of other shards are not among the skipped ones.

        Args:
            indices: of this run.
            check: raises OptionError or FileError.

        Raises:
            FileError: of the first row that cannot be continued, unless rows may be skipped.
        """
        for index in range(len(self.lines)):
            try:
                check(self.lines[index])
            except (OptionError, FileError) as error:
                if index in indices or not self.is_skipping:
                    self.add(index, error)

    def add(self, index: int, error: OutriderError) -> None:
        """Note a row and the reason. Raises FileError, unless rows may be skipped."""
        where = f"{self.lines.path}, {self.lines.place(index)}"
        reason = str(error) if isinstance(error, FileError) else f"{where}: {error}"  # those of a file name it
        if not self.is_skipping:
            raise FileError(reason)
        self.reasons[index] = reason

    def tell(self) -> None:
        """Report them on standard error."""
        for index in sorted(self.reasons)[:_MOST_SHOWN]:
            print(f"skipped: {self.reasons[index]}", file=sys.stderr)
        num_more = len(self.reasons) - _MOST_SHOWN
        if num_more > 0:
            print(f"skipped: {num_more} more rows; --json lists all", file=sys.stderr)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"index": index, "place": self.lines.place(index), "error": reason}
            for index, reason in sorted(self.reasons.items())
        ]
