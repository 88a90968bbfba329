"""Reports of measurements: the same in 80 columns of a terminal and as elements of a page, true to their documents."""

import base64
import hashlib
import io
import json
import re
from html import unescape

import pytest
from rich.console import Console

from documents import examples
from outrider.cli.shared.output import print_report
from outrider.pages.reports import Table, report_of
from outrider.race.page import HEADERS, recorded_page

KINDS = [(kind, place) for kind in ("compare", "latency", "plan", "replay") for place in range(len(examples()[kind]))]


@pytest.mark.parametrize(("kind", "place"), KINDS)
def test_a_terminal_shows_the_words_of_the_page_in_80_columns(kind: str, place: int) -> None:
    """Names and numbers are whole, and no line is longer."""
    document = examples()[kind][place]
    tables, _ = report_of(document)
    console = Console(width=80, file=io.StringIO())
    print_report(console, document)
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, shown)) <= 80 and "…" not in "".join(shown)
    words = re.sub(r"\W", "", "".join(shown))
    for table in tables:
        html = unescape(re.sub(r"<[^>]*>", "\n", table.html()))
        for row in table.rows[: table.most_rows]:
            for cell in filter(None, row):
                assert cell in html.split("\n") and re.sub(r"\W", "", cell) in words


def test_texts_are_no_markup() -> None:
    html = Table("a <b>", ("name", "n"), [("<i>&", "1")], "note <u>").html()
    assert re.findall(r"<([bius])\b", html) == [] and "&lt;i&gt;&amp;" in html
    assert "<td class=n>1</td>" in html and "<th scope=col>name</th>" in html


def test_a_recorded_page_allows_its_own_script_and_style_alone() -> None:
    """By their checksums; a text in the recording cannot end the element that it is in."""
    events = [{"type": "start", "prompt": "</script><!-- <script>"}]
    page = recorded_page(events)
    (recording,) = re.findall(r'<script type="application/json" id="recording">(.*?)</script>', page)
    assert json.loads(recording) == events
    (policy,) = re.findall(r'http-equiv="content-security-policy" content="([^"]*)"', page)
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for kind, content in (("script", script), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "unsafe" not in HEADERS["content-security-policy"]
