"""The pages of the documentation: their files, and the blocks of code in them.

A block is run by tests/cli/test_page_blocks.py (with ``-m slow``) unless a comment before it, which readers do not see,
says otherwise:

    <!-- not run: REASON -->  it is parsed only

A block of ``text`` right after one that is run shows its output: every line of it was written, in this order. Numbers
stand for any number, since most depend on the machine.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "examples", "recipes") for path in (ROOT / folder).rglob("*.md")),
]

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?```(?P<language>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE
)
_NUMBER = re.compile(r"[-+±]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?")


@dataclass(frozen=True)
class Block:
    """A block of code: its language, its text, the comment before it, and the output that the page shows."""

    line: int
    language: str
    code: str
    mark: str
    output: str | None

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and not self.mark.startswith("not run: ")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(_FENCE.finditer(text))
    blocks = []
    for match, following in zip(found, [*found, None][1:], strict=True):
        output = None
        if following and following["language"] == "text" and not text[match.end() : following.start()].strip():
            output = following["code"]
        line = text.count("\n", 0, match.start()) + 1
        blocks.append(Block(line, match["language"], match["code"], match["mark"] or "", output))
    return blocks


def without_fences(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _plain(line: str) -> str:
    return " ".join(_NUMBER.sub("0", line).split())


def missing_line(shown: str, written: str) -> str | None:
    """The first line of ``shown`` that ``written`` does not have after the lines before it."""
    lines = iter([_plain(line) for line in written.splitlines()])
    for line in shown.splitlines():
        if _plain(line) and _plain(line) not in lines:
            return line
    return None
