"""The forms of a file of prompts: plain lines, JSON lines, a JSON array, and chats."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, rows_of
from outrider.errors import FileError
from outrider.offline.prompt_file import open_prompts
from outrider.offline.prompt_row import PromptLine
from pairs import embedded

OPTIONS = ("-n", 3, "--seed", 20, "--dtype", "float64")


def read(path: Path, text: str) -> list[PromptLine]:
    path.write_text(text, encoding="utf-8")
    with open_prompts(path) as prompts:
        return list(prompts)


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def test_an_array_has_the_rows_of_json_lines(tmp_path: Path) -> None:
    """And an item may be a text alone. Blank lines and a byte order mark are no prompts."""
    rows: list[Any] = [{"prompt": "Once", "id": 7, "seed": 4}, {"id": "b", "prompt": "The\n[fox]", "category": "x"}]
    array = read(tmp_path / "array", "\ufeff\n" + json.dumps([*rows, "A hen"], indent=2))
    lines = read(tmp_path / "lines", "\ufeff\n" + jsonl(*rows, {"prompt": "A hen"}).replace("\n", "\n\n"))
    assert [(one.prompt, one.labels, one.options) for one in array] == [
        (one.prompt, one.labels, one.options) for one in lines
    ]
    assert [one.place for one in array] == ["item 1", "item 2", "item 3"]


def test_plain_lines_are_prompts(tmp_path: Path) -> None:
    """Some begin with a bracket. Lines end at LF or CRLF, not at Python's other line ends."""
    for text in ("[INST] Hello [/INST]", "[1] A source.", f"[{'9' * 5000}]"):
        assert [one.prompt for one in read(tmp_path / "plain", f"{text}\nmore\n")] == [text, "more"]
    plain = read(tmp_path / "plain", "Once upon\x0ca time\r\nThere was")
    assert [one.prompt for one in plain] == ["Once upon\x0ca time", "There was"]
    prompt = "Once\u2028upon\u0085a\u2029time\x0c"
    row = json.dumps({"prompt": prompt}, ensure_ascii=False)
    assert [one.prompt for one in read(tmp_path / "lines", f"{row}\r\n{row}\r\n")] == [prompt, prompt]
    rows: list[dict[str, Any]] = [
        {"prompt": "Once", "id": 4, "metadata": {"colour": "red"}},
        {"question_id": 81, "category": "math", "turns": ["Once", "b"], "reference": ["c", ""]},
    ]
    assert [one.prompt for one in read(tmp_path / "prompts", jsonl(*rows))] == ["Once"] * len(rows)


OWN: list[tuple[dict[str, Any], dict[str, Any]]] = [  # options of a row in the file, and as the library takes them
    ({}, {}),
    ({"max_new_tokens": 3, "temperature": 0},) * 2,
    ({"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 7},) * 2,
    ({"logit_bias": {"5": 3, "300": "-inf"}}, {"logit_bias": {5: 3.0, 300: -float("inf")}}),
    ({"stop": "e"}, {"stop": ["e"]}),
    ({"stop": ["e", "a"], "ignore_eos": True, "logprobs": 2},) * 2,
    ({"presence_penalty": 1.0, "frequency_penalty": -0.5, "min_tokens": 4, "stop_token_ids": [5, 7]},) * 2,
    ({"regex": " [a-z]+", "max_new_tokens": 5},) * 2,
    ({"json_schema": {"enum": ["a fox", "a hen"]}, "max_new_tokens": 20},) * 2,
    ({"temperature": None, "seed": None}, {}),
]


def test_options_of_rows_override_those_of_the_command(outrider: Outrider, tmp_path: Path) -> None:
    """Each row is that of the library with the same options. Changed options or names of rows are another run."""
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": "Once", **own} for own, _ in OWN]
    path.write_text(jsonl(rows[0] | {"id": {"a": [1, None]}, "category": "x"}, *rows[1:]))
    arguments = ("generate", "--prompts", path, "--batch-size", 4, *OPTIONS, "-t", 0.9, "--output", output)
    ended = outrider(*arguments)
    assert ended.code == 0, ended.err
    for row, (_, own) in zip(rows_of(output.read_text()), OWN, strict=True):
        options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.9, "seed": 20 + row["index"]} | own
        (want,) = embedded("float64").generate(["Once"], num_draft_tokens=4, **options)
        assert (row["text"], row["finish_reason"]) == (want.text, want.finish_reason)
        assert tuple(row["token_ids"]) == want.token_ids and row["seed"] == want.seed
        assert ("logprobs" in row) == ("logprobs" in own)
        settings = row["settings"]
        assert settings["max_new_tokens"] == options["max_new_tokens"] and settings["seed"] == own.get("seed", 20)
        assert settings["logit_bias"] == (["5=3.0", "300=-inf"] if "logit_bias" in own else None)
    assert outrider(*arguments).err.startswith("0 tokens")
    names = [{name: row[name] for name in ("category", "id") if name in row} for row in rows_of(output.read_text())]
    assert names[:2] == [{"category": "x", "id": {"a": [1, None]}}, {}]
    for old, new, differing in (('"5": 3,', "", "settings"), ('{"a": [1, null]}', "8", "id")):
        changed = path.read_text().replace(old, new)
        assert changed != path.read_text()
        path.write_text(changed)
        assert f"belongs to another run (different {differing}" in outrider(*arguments).error


ARRAYS = [
    ('[{"prompt": "a"},\n{"prompt": "b"},\n', ", which begins like a JSON array: not JSON (Expecting value at line"),
    ('["a", 3]', ", item 2: neither a string nor a JSON object"),
    ('["a", {"promt": "b"}]', ", item 2: a prompt has no field 'promt': did you mean 'prompt'?"),
]
ASKED = [{"role": "user", "content": "a"}]
REFUSED: list[tuple[Any, str]] = [
    ({"messages": []}, ": messages must be a list with at least one message"),
    ({"messages": ASKED, "prompt": "a"}, ": give a prompt or messages"),
    ({"prompt": "\udc00"}, ": the prompt has a lone surrogate at 0"),
    ({"prompt": 5}, ": the key 'prompt' has no string"),
    ({"prompt": "a", "temprature": 0}, ": a prompt has no field 'temprature': did you mean 'temperature'?"),
    ({"prompt": "a", "colour": 5}, ": a prompt has no field 'colour': put your own notes under 'metadata'"),
    ({"prompt": "a", "temperature": float("nan")}, ": temperature = nan is invalid: a number >= 0"),
    ({"prompt": "a", "ignore_eos": "no"}, ": ignore_eos must be true or false, not 'no'"),
    ({"prompt": "a", "regex": "(a"}, ": regex = '(a' is invalid"),
    (b'{"prompt": "b"', ": not JSON (Expecting ',' delimiter at column 15)"),
    (b'{"prompt": "a", "top_k": 1' + b"0" * 5000 + b"}", ": a number has too many digits"),
    (b'{"prompt": ' + b"[" * 99_999, ": a number has too many digits, or the nesting is too deep"),
]


@pytest.mark.usefixtures("unloaded")
def test_prompt_files_refuse_bad_rows(outrider: Outrider, tmp_path: Path) -> None:
    """Each by name, with its line; and options of a prompt where they would mean something else, or nothing."""
    path = tmp_path / "prompts.jsonl"
    for text, message in ARRAYS:
        with pytest.raises(FileError) as error:
            read(path, text)
        assert str(error.value).startswith(f"{path}{message}")
    for row, message in REFUSED:
        path.write_bytes(b'{"prompt": "a"}\n' + (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
        assert outrider("generate", "--prompts", path, *OPTIONS).error.startswith(f"{path}, line 2{message}")
    path.write_text(jsonl({"prompt": "a"}, {"messages": ASKED, "seed": 1}))
    for command in ("certify", "plan"):
        message = outrider(command, "--prompts", path).error
        assert f"{path}, line 2: this command does not support per-prompt options " in message
