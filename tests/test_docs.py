"""The pages: links lead somewhere, the site names each page, and docs/internals/architecture.md names what exists."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import outrider
from outrider import errors
from pages import DOCS, PAGES, ROOT
from public import public

SRC = ROOT / "src" / "outrider"
ARCHITECTURE = DOCS / "internals" / "architecture.md"


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = (
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:", link):
            name, _, anchor = link.partition("#")
            path = page.parent / name if name else page
            if not path.exists() or (anchor and path.suffix == ".md" and anchor not in _anchors(path)):
                broken.append(link)
    return broken


def test_links_lead_somewhere() -> None:
    assert {page.name: links for page in PAGES if (links := _broken_links(page))} == {}


def _named_in(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [path for entry in (nav.values() if isinstance(nav, dict) else nav) for path in _named_in(entry)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all pages, as the site has them, with those that are made."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    shutil.copytree(DOCS, folder)
    subprocess.run([sys.executable, ROOT / ".ci" / "reference.py", folder], check=True)
    return folder


def test_the_navigation_names_every_page_once(made: Path) -> None:
    nav = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    assert sorted(_named_in(nav)) == sorted(page.relative_to(made).as_posix() for page in made.rglob("*.md"))


def test_the_links_of_pages_that_are_made_lead_somewhere(made: Path) -> None:
    pages = [page for page in made.rglob("*.md") if not (DOCS / page.relative_to(made)).exists()]
    assert {page.name: _broken_links(page) for page in pages} == {"api.md": [], "commands.md": [], "json.md": []}


def test_the_page_of_python_names_has_each(made: Path) -> None:
    page = (made / "reference" / "api.md").read_text(encoding="utf-8")
    sections = {text.splitlines()[0]: text for text in page.split("\n## ")[1:]}
    listed = public()["python"]
    assert set(sections) == set(listed)
    for name, members in listed.items():
        of_tuples = {"count", "index"} if hasattr(getattr(outrider, name), "_fields") else set()
        for member in set(members) - {"__init__"} - of_tuples:
            shown = rf"\b{member}\b" if isinstance(members, list) else rf"`{member}[`(]|^### {name}\.{member}$"
            assert re.search(shown, sections[name], re.MULTILINE), (name, member)


def test_the_page_of_errors_names_each() -> None:
    page = (DOCS / "guides" / "troubleshooting.md").read_text(encoding="utf-8")
    section = page.split("\n## Errors")[1].split("\n## ")[0]
    assert set(re.findall(r"^- `(\w+)`", section, re.MULTILINE)) == set(errors.__all__)


def test_broken_links_are_found(tmp_path: Path) -> None:
    """The control."""
    page = tmp_path / "page.md"
    page.write_text("# A `b`: c\n[1](#a-b-c) [2](#d) [3](page.md#a-b-c) [4](none.md) [5](https://example.org/none)\n")
    assert _broken_links(page) == ["#d", "none.md"]


def test_the_architecture_names_every_package() -> None:
    picture = ARCHITECTURE.read_text(encoding="utf-8").split("## Packages")[1].split("\n## ")[0]
    packages = {path.name for path in SRC.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= set(re.findall(r"\w+", picture))


def test_the_answers_of_the_architecture_hold() -> None:
    """The files that a row names exist, and one of them defines each name that it gives."""
    section = ARCHITECTURE.read_text(encoding="utf-8").split("## Where to begin")[1].split("\n## ")[0]
    answers = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    assert len(answers) == 5
    for answer in answers:
        named = re.findall(r"`([^`]+)`", answer)
        paths = [SRC / name for name in named if name.endswith(".py")]
        assert paths and all(path.exists() for path in paths), answer
        code = "".join(path.read_text(encoding="utf-8") for path in paths)
        for name in (name for name in named if name.isidentifier()):
            assert re.search(rf"^ *(class |def )?{name}\b", code, re.MULTILINE), name
