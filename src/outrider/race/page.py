"""The page that shows a race: its files, and one self-contained file with a recorded race.

Scripts and styles come from the package; the browser enforces it (``content-security-policy``).
Text is inserted as text nodes only; the browser enforces that, too (``require-trusted-types-for``).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from outrider.pages.reports import report_of

PAGE = {"/": "race.html", "/page/race.css": "race.css", "/page/race.js": "race.js"}  # path on the server: file
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


def _policy(script: str, style: str, more: str) -> str:
    """The policy of a page: nothing but these sources, and an icon."""
    sources = f"default-src 'none'; img-src data:; script-src {script}; style-src {style}; {more}"
    return f"{sources}base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"


HEADERS = {
    "content-security-policy": _policy("'self'", "'self'", "connect-src 'self'; frame-ancestors 'none'; "),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def recorded_page(events: Sequence[Mapping[str, Any]], document: Mapping[str, Any] | None = None) -> str:
    """Self-contained page that replays a race, with tables below, and fetches nothing. ``events``: see
    outrider.race.events. ``document``: of ``outrider compare``, with the measurement after the race."""
    page, style, script = (read_file(name)[1] for name in ("race.html", "race.css", "race.js"))
    content = _policy(_hash(script), _hash(style), "")
    # A script ends at "</script" anywhere, and "<!--" would change where its end is looked for.
    recording = json.dumps(events, allow_nan=False).replace("<", "\\u003c")
    below = "" if document is None else f'<section class="below">{_below(document)}</section>\n'
    charset, scripts = '<meta charset="utf-8">', f'<script type="module">{script}</script>'
    for old, new in (
        (charset, f'{charset}\n<meta http-equiv="content-security-policy" content="{content}">'),
        ('<link rel="stylesheet" href="page/race.css">', f"<style>{style}</style>"),
        (
            '<script type="module" src="page/race.js"></script>',
            f'<script type="application/json" id="recording">{recording}</script>\n{scripts}',
        ),
        ('<div id="tip"', f'{below}<div id="tip"'),
    ):
        assert page.count(old) == 1
        page = page.replace(old, new)
    return page


def _below(document: Mapping[str, Any]) -> str:
    tables, lines = report_of(document)
    origin = dict(document["provenance"])
    command = shlex.join(["outrider", *origin.pop("argv")])
    stopped = ", until it was interrupted" if document["is_interrupted"] else ""

    def pairs(values: Mapping[str, Any]) -> str:
        texts = {k: ", ".join(map(str, v)) if isinstance(v, list) else v for k, v in values.items() if v is not None}
        items = (f"<dt>{escape(name)}</dt><dd>{escape(str(text))}</dd>" for name, text in texts.items())
        return f'<dl class="pairs">{"".join(items)}</dl>'

    parts = [*(table.html() for table in tables), *(f"<p>{escape(line)}</p>" for line in lines)]
    parts.append(f"<h2>How it was measured{stopped}</h2><pre>{escape(command)}</pre>")
    return "\n".join([*parts, pairs(document["options"]), pairs(origin)])


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def read_file(name: str) -> tuple[str, str]:
    content = (files("outrider.race") / "page" / name).read_text(encoding="utf-8")
    return _KINDS[name.rpartition(".")[2]], content
