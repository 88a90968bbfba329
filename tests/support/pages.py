"""The pages of the documentation."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"),
    *(path for folder in ("docs", "examples", "recipes") for path in (ROOT / folder).rglob("*.md")),
]
