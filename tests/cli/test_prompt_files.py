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
ROWS: list[Any] = [{"prompt": "Once", "id": 7, "seed": 4}, {"id": "b", "prompt": "The\n[fox]", "category": "x"}]


def read(path: Path, text: str) -> list[PromptLine]:
    path.write_text(text, encoding="utf-8")
    with open_prompts(path) as prompts:
        return list(prompts)


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_has_the_rows_of_json_lines(tmp_path: Path, indent: int | None) -> None:
    """And an item may be a text alone. Blank lines and a byte order mark are no prompts."""
    array = read(tmp_path / "array", "\ufeff\n" + json.dumps([*ROWS, "A hen"], indent=indent))
    lines = read(tmp_path / "lines", "\ufeff\n" + jsonl(*ROWS, {"prompt": "A hen"}).replace("\n", "\n\n"))
    assert [(one.prompt, one.labels, one.options) for one in array] == [
        (one.prompt, one.labels, one.options) for one in lines
    ]
    assert [one.place for one in array] == ["item 1", "item 2", "item 3"]


def test_lines_end_where_other_programs_end_them(tmp_path: Path) -> None:
    """At LF or CRLF: not at the other characters that Python takes for line ends, which JSON may hold as they are."""
    prompt = "Once\u2028upon\u0085a\u2029time\x0c"
    row = json.dumps({"prompt": prompt}, ensure_ascii=False)
    assert [one.prompt for one in read(tmp_path / "lines", f"{row}\r\n{row}\r\n")] == [prompt, prompt]
    plain = read(tmp_path / "plain", "Once upon\x0ca time\r\nThere was")
    assert [one.prompt for one in plain] == ["Once upon\x0ca time", "There was"]


@pytest.mark.parametrize("text", ["[INST] Hello [/INST]", "[1] A source.", "[1, 2, and 3]", f"[{'9' * 5000}]"])
def test_plain_prompts_may_begin_with_a_bracket(tmp_path: Path, text: str) -> None:
    assert [one.prompt for one in read(tmp_path / "plain", f"{text}\nmore\n")] == [text, "more"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[{"prompt": "a"},\n{"prompt": "b"},\n',
            ", which begins like a JSON array: not JSON (Expecting value at line",
        ),
        ('["a"]\n["b"]\n', ", which begins like a JSON array: not JSON (Extra data at line 2, column 1)"),
        ('["a", 3]', ", item 2: neither a string nor a JSON object"),
        ("[]", " contains no prompts"),
        ('["a", {"promt": "b"}]', ", item 2: a prompt has no field 'promt': did you mean 'prompt'?"),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileError) as error:
        read(tmp_path / "array", text)
    assert str(error.value).startswith(f"{tmp_path / 'array'}{message}")


def test_rows_repeat_what_names_them(outrider: Outrider, tmp_path: Path) -> None:
    """``id``, whatever it is. Other names are another run."""
    path, output = tmp_path / "prompts.json", tmp_path / "out.jsonl"
    first = {"question_id": 81, "category": "writing", "turns": ["Once", "More"]}  # as in Spec-Bench
    rows = [*ROWS, {"prompt": "Hen", "id": {"a": [1, None]}}, "Hen", first]
    path.write_text(json.dumps(rows))
    arguments = ("generate", "--prompts", path, "--output", output, *OPTIONS)
    assert outrider(*arguments).code == 0
    written = rows_of(output.read_text())
    names = [{name: row[name] for name in ("category", "id") if name in row} for row in written]
    assert names[:3] == [{"id": 7}, {"category": "x", "id": "b"}, {"id": {"a": [1, None]}}]
    assert names[3:] == [{}, {"category": "writing"}] and written[4]["prompt"] == "Once"
    assert outrider(*arguments).err.startswith("0 tokens")
    path.write_text(json.dumps([rows[0] | {"id": 8}, *rows[1:]]))
    assert "line 1 belongs to another run (different id)" in outrider(*arguments).error


def test_fields_of_other_projects_are_left_alone(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 4, "metadata": {"colour": "red"}},
        {"question_id": 81, "category": "math", "turns": ["a", "b"], "reference": ["c", ""]},
        {"task_id": "HumanEval/0", "entry_point": "f", "canonical_solution": "1", "test": "def check(f): ..."},
        {"question": "How many?", "answer": "#### 3"},
        {"ind": 4, "activity_label": "Sailing", "ctx": "a b", "ctx_a": "a", "ctx_b": "b", "endings": ["c"], "label": 0},
    ]
    assert len(read(tmp_path / "prompts", jsonl(*({"prompt": "Once"} | row for row in rows)))) == len(rows)


def test_chats_of_a_file(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's template, with --chat and without; contents may be parts of text. A row repeats the messages."""
    monkeypatch.setattr(embedded().tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} {% endfor %}#")
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda *_, **__: embedded().plain())
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "kind"}]}]
    plain = [messages[0], {"role": "user", "content": "kind"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(jsonl({"messages": messages, "id": 1}, {"messages": plain}))
    want = embedded().tokenizer("Be kind #").input_ids
    for more in ((), ("--chat",)):
        ended = outrider("generate", "--prompts", path, "-n", 2, "--draft", "none", *more)
        assert ended.code == 0, ended.err
        for row in rows_of(ended.out):
            assert (row["messages"], row["prompt_ids"]) == (plain, want) and "prompt" not in row


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
    """Each row is that of the library with the same options, and its settings say what they were. Changed options are
    another run."""
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text(jsonl(*({"prompt": "Once", **own} for own, _ in OWN)))
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
        assert settings["max_new_tokens"] == options["max_new_tokens"]
        assert settings["temperature"] == options["temperature"]
        assert settings["seed"] == own.get("seed", 20)
        assert settings["logit_bias"] == (["5=3.0", "300=-inf"] if "logit_bias" in own else None)
    assert outrider(*arguments).err.startswith("0 tokens")
    for old, new in (('"5": 3,', ""), ('"max_new_tokens": 20', '"max_new_tokens": 21')):
        path.write_text(path.read_text().replace(old, new))
        assert "belongs to another run (different settings)" in outrider(*arguments).error


def test_a_row_with_a_seed_keeps_a_constant_k(outrider: Outrider, tmp_path: Path) -> None:
    """Or its text would depend on the times of this machine: K = 4 in every round, whatever is chosen for the others.
    So its text is the same alone and beside others."""
    path, found = tmp_path / "prompts.jsonl", []
    for others in ([], [{"prompt": "Once"}] * 2):
        path.write_text(jsonl({"prompt": "Once", "seed": 3}, *others))
        rows = rows_of(outrider("generate", "--prompts", path, "--batch-size", 3, "-n", 16, "--dtype", "float64").out)
        assert {one["settings"]["num_draft_tokens"] for one in rows} == {"auto"}
        found.append(rows[0]["token_ids"])
        drafted = rows[0]["stats"]["drafted_histogram"]
        assert len(drafted) == 5 and drafted[4] > 0  # fewer only near the end
    assert found[0] == found[1]


ASKED = [{"role": "user", "content": "a"}]
REFUSED: list[tuple[Any, str]] = [
    ({"messages": []}, ": messages must be a list with at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ": messages[0].content must be a string"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, ": the messages has a lone surrogate"),
    ({"messages": ASKED, "prompt": "a"}, ": give a prompt or messages"),
    ({"messages": ASKED, "continue_final_message": 1}, ": continue_final_message = 1 is invalid: true or false"),
    ({"prompt": "a", "tools": []}, ": tools is for the messages of a chat"),
    ({"prompt": "a", "id": "\ud800"}, ": the id has a lone surrogate at 0"),
    ({"prompt": "a", "stop": "\ud800"}, ": the stop has a lone surrogate at 0"),
    ({"prompt": "\udc00"}, ": the prompt has a lone surrogate at 0"),
    ({"prompt": "a", "category": 3}, ": the category 3 is not a string"),
    ({"text": "b"}, ": the key 'prompt' has no string"),
    ({"prompt": 5}, ": the key 'prompt' has no string"),
    ({"turns": []}, ": the key 'turns' has no string"),
    ({"turns": "text"}, ": the key 'turns' has no string"),
    ({"prompt": "a", "temprature": 0}, ": a prompt has no field 'temprature': did you mean 'temperature'?"),
    ({"prompt": "a", "max_tokens": 5}, ": a prompt has no field 'max_tokens': did you mean 'max_new_tokens'?"),
    ({"prompt": "a", "suppress_tokens": [5]}, ": a prompt has no field 'suppress_tokens': logit_bias forbids a token"),
    ({"prompt": "a", "colour": 5}, ": a prompt has no field 'colour': put your own notes under 'metadata'"),
    ({"prompt": "a", "temperature": float("nan")}, ": temperature = nan is invalid: a number >= 0"),
    ({"prompt": "a", "ignore_eos": "no"}, ": ignore_eos must be true or false, not 'no'"),
    ({"prompt": "a", "logit_bias": ["5=1"]}, ": logit_bias must map token ids to numbers"),
    ({"prompt": "a", "logit_bias": {"the": 1}}, ": logit_bias must map token ids to numbers"),
    ({"prompt": "a", "regex": "(a"}, ": regex = '(a' is invalid"),
    (b'{"prompt": "b"', ": not JSON (Expecting ',' delimiter at column 15)"),
    (b'{"prompt": "a", "top_k": 1' + b"0" * 5000 + b"}", ": a number has too many digits"),
    (b'{"prompt": ' + b"[" * 99_999, ": a number has too many digits, or the nesting is too deep"),
]


@pytest.mark.usefixtures("unloaded")
def test_rows_that_are_refused(outrider: Outrider, tmp_path: Path) -> None:
    """Each by name, with its line."""
    path = tmp_path / "prompts.jsonl"
    for row, message in REFUSED:
        path.write_bytes(b'{"prompt": "a"}\n' + (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n")
        assert outrider("generate", "--prompts", path, *OPTIONS).error.startswith(f"{path}, line 2{message}")


@pytest.mark.parametrize("command", [("certify",), ("plan",)])
@pytest.mark.usefixtures("unloaded")
def test_other_commands_take_texts(outrider: Outrider, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Options of a prompt would mean something else there, or nothing."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(jsonl({"prompt": "a"}, {"messages": ASKED, "seed": 1}))
    message = outrider(*command, "--prompts", path).error
    assert f"{path}, line 2: this command does not support per-prompt options " in message
