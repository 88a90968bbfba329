"""Reports of measurements: the same in 80 columns of a terminal and as elements of a page, true to their documents."""

import io
import re
from html import unescape

import pytest
from rich.console import Console

from documents import examples
from outrider.cli.shared.output import print_report
from outrider.pages.reports import Table, report_of

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
