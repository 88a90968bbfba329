#!/usr/bin/env python3
"""Build the site of the documentation into build/site, and check that its links lead somewhere.

Zensical makes the pages from build/docs, a copy of docs/ with the pages that .ci/reference.py makes; the page of a
recorded race (benchmarks/cast.py) is beside them. Pages link to scripts, results and sources outside of docs/, which
are copied beside them, at the same relative places. Links and anchors are then checked in the HTML, as a browser
resolves them.
"""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import reference
from outrider.race.page import recorded_page

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
REDIRECT = '<!doctype html><title>Outrider</title><meta http-equiv="refresh" content="0; url=docs/index.html">\n'


class Page(HTMLParser):
    """Links and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value and not urlsplit(value).scheme and not value.startswith("//"):
                self.links.append(value)


def copy_linked(pages: dict[Path, Page]) -> None:
    """Copy what lies outside of docs/ and is linked to: a file, or the files of a folder."""
    for path, page in pages.items():
        for link in page.links:
            target = (path.parent / unquote(urlsplit(link).path)).resolve()
            if not target.exists() and target.is_relative_to(SITE) and not target.is_relative_to(SITE / "docs"):
                source = ROOT / target.relative_to(SITE)
                if source.is_file():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)


def broken_links(pages: dict[Path, Page]) -> list[str]:
    broken = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append(f"{path.relative_to(SITE)}: {link}")
    return broken


def llms_txt() -> str:
    """A list of all pages for language models, with the first sentence of each (llmstxt.org)."""
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    lines = [f"# {project['site_name']}", "", f"> {project['site_description']}"]

    def add(entries: list[dict[str, object]], heading: str) -> None:
        lines.extend(["", f"## {heading}", ""])
        for entry in entries:
            ((name, value),) = entry.items()
            if isinstance(value, str):
                text = (PAGES / value).read_text(encoding="utf-8")
                body = re.sub(r"^(#|<|!|```|\|).*$", "", text, flags=re.MULTILINE).strip().split("\n\n")[0]
                body = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(body.split()))
                lines.append(f"- [{name}](docs/{value.removesuffix('.md')}.html): {body.split('. ')[0].rstrip('.:')}.")

    nav = project["nav"]
    add([entry for entry in nav if isinstance(next(iter(entry.values())), str)], "Pages")
    for entry in nav:
        ((name, value),) = entry.items()
        if not isinstance(value, str):
            add(value, name)
    return "\n".join(lines) + "\n"


def main() -> int:
    for folder in (SITE, PAGES):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    reference.main(PAGES / "reference")
    subprocess.run(["zensical", "build", "--strict", "--clean"], cwd=ROOT, check=True)
    (SITE / "index.html").write_text(REDIRECT, encoding="utf-8")
    (SITE / "llms.txt").write_text(llms_txt(), encoding="utf-8")
    docs = SITE / "docs"
    recording = json.loads((ROOT / "docs" / "pictures" / "race.json").read_text(encoding="utf-8"))
    (docs / "race.html").write_text(recorded_page(**recording), encoding="utf-8")
    pages = {path.resolve(): Page(path) for path in docs.rglob("*.html") if path.name != "404.html"}
    copy_linked(pages)
    broken = broken_links(pages)
    print("\n".join(broken) if broken else f"{len(pages)} pages in {SITE.relative_to(ROOT)}, all links lead somewhere")
    return 1 if broken else 0


sys.exit(main())
