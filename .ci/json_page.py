"""The page of the JSON documents, from the examples that the tests hold."""

import json
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[1] / "tests" / "golden" / "documents.json"
_FILES = {
    "generate-output": "a line of `generate --output`",
    "rounds": "a line of `replay --output`",
    "log": "`log.json` of `record`",
    "log-index": "a line of its `index.jsonl`",
}
_ONCE = "options", "provenance"  # keys in the first document alone
HEAD = """# The JSON documents of the commands

Every command accepts `--json FILE`, or `--json -` for standard output (the human-readable output then goes to standard
error), and writes one document. This page shows an example of each, with shortened lists; the tests hold what
commands write against these examples.

Every document has three keys: `schema`, its name and version, like `outrider/compare/1`; `options`, those of the
command, as they were in effect; and `provenance`: versions, machine, time. The last two are in the first example alone.
New keys may be added, so ignore those that you do not know. The version changes when a key is removed, or changes its
type or meaning.

An undefined ratio or rate (no tokens were drafted, a single run has no interval) is `null`. Times are in seconds unless
the name contains `ms`, sizes in bytes, logarithms natural.

If the reader of standard output leaves (`| head`), generation stops, files are still written, and the exit code is 141,
as after SIGPIPE. If standard output is closed or its disk is full, the exit code is 2, with one line of error.

"""


def page() -> str:
    text, is_first = HEAD, True
    for name, (example, *_) in json.loads(_EXAMPLES.read_text(encoding="utf-8")).items():
        shown = {key: one for key, one in example.items() if is_first or name in _FILES or key not in _ONCE}
        about = f"{_FILES[name][0].upper()}{_FILES[name][1:]}:\n\n" if name in _FILES else ""
        text += f"## {name}\n\n{about}```json\n{_lines(shown)}\n```\n\n"
        is_first = False
    return text.rstrip() + "\n"


def _lines(value: Any, indent: str = "", width: int = 100) -> str:
    """JSON, with what fits on one line."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(indent) + len(whole) <= width or not isinstance(value, dict | list) or not value:
        return whole
    inner = indent + "  "
    if isinstance(value, dict):
        rows = [f"{inner}{json.dumps(key)}: {_lines(one, inner, width)}" for key, one in value.items()]
        return "{\n" + ",\n".join(rows) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _lines(one, inner, width) for one in value) + f"\n{indent}]"
