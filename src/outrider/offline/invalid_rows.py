"""Invalid rows of a prompt file: an error, or skipped."""

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
    """Invalid rows. The first one ends the command, unless invalid rows are skipped.

    Attributes:
        reasons: why a row is skipped, by index.
    """

    lines: PromptFile
    is_skipping: bool
    reasons: dict[int, str] = field(default_factory=dict)

    def check(self, indices: Container[int], check: Callable[[PromptLine], None]) -> None:
        """Check all rows. Rows of other shards are not recorded.

        Args:
            indices: of this run.
            check: raises OptionError or FileError.

        Raises:
            FileError: for the first invalid row, unless rows may be skipped.
        """
        for index in range(len(self.lines)):
            try:
                check(self.lines[index])
            except (OptionError, FileError) as error:
                if index in indices or not self.is_skipping:
                    self.add(index, error)

    def add(self, index: int, error: OutriderError) -> None:
        """Record an invalid row. Raises FileError, unless rows may be skipped."""
        where = f"{self.lines.path}, {self.lines.place(index)}"
        reason = str(error) if isinstance(error, FileError) else f"{where}: {error}"  # a FileError names the file
        if not self.is_skipping:
            raise FileError(reason)
        self.reasons[index] = reason

    def report(self) -> None:
        """Report skipped rows on standard error."""
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
