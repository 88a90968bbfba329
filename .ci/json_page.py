"""The page of the JSON documents, from the examples that the tests hold."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from outrider.offline.prompt_row import NOTES
from outrider.options import Sampling
from outrider.text.chat import FIELDS

_EXAMPLES = Path(__file__).parents[1] / "tests" / "golden" / "documents.json"
_FILES = {
    "generate-output": "a line of `generate --output`",
}
_NAMES = {  # of fields, by their place in the text
    "@CHAT@": FIELDS,
    "@OPTIONS@": [option.name for option in fields(Sampling) if option.name != "processor"],
    "@IGNORED@": [name for names in NOTES.values() for name in names if name != "metadata"],
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

## Files of prompts

`--prompts FILE` takes plain lines, each a prompt; or JSON lines, or one JSON array, of objects with these fields. Other
fields are refused, but for those of common files, which are ignored: @IGNORED@.

| field | meaning |
|---|---|
| `prompt` | a string |
| `messages` | a chat in its place, as OpenAI's API takes it, with @CHAT@ |
| `turns` | a list of strings, of which the first is the prompt (Spec-Bench, MT-bench) |
| `category` | a string: reports give figures for each |
| `id` | any value; copied to the output |
| @OPTIONS@ | as the options of `outrider generate`, for this prompt alone (`null`: absent) |
| `metadata` | your own notes, ignored |

`logit_bias` maps token ids to numbers, or to `"-inf"`.

"""


def page() -> str:
    text, is_first = HEAD, True
    for place, names in _NAMES.items():
        text = text.replace(place, ", ".join(f"`{name}`" for name in names))
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
