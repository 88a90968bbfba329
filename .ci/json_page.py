"""The page of the JSON documents, from the examples that the tests hold."""

import json
from pathlib import Path
from typing import Any

_EXAMPLES = Path(__file__).parents[1] / "tests" / "golden" / "documents.json"
_FILES = {
    "generate-output": "a line of `generate --output`",
}
_ONCE = "options", "provenance"  # keys in the first document alone
HEAD = """# The JSON documents of the commands

An example of each, with shortened lists; the tests hold what commands write against these examples. [What is common to
all](../guides/long-jobs.md#json-documents); `options` and `provenance` are in the first example alone.

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
