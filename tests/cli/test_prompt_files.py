"""The forms of a file of prompts: plain lines, JSON lines, a JSON array, chats, and requests of OpenAI's batch form."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
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


def rows_of(text: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, text.splitlines()), key=lambda row: row["index"])


def batch(body: Any, **more: Any) -> dict[str, Any]:
    """A request for a completion, or for a chat if the body has messages."""
    kind = "chat/completions" if "messages" in body else "completions"
    return {"custom_id": "r1", "method": "POST", "url": f"/v1/{kind}", "body": body} | more


@pytest.mark.parametrize("indent", [None, 0, 2])
def test_an_array_has_the_rows_of_json_lines(tmp_path: Path, indent: int | None) -> None:
    """And an item may be a text alone."""
    array = read(tmp_path / "array", "\ufeff\n" + json.dumps([*ROWS, "A hen"], indent=indent))
    lines = read(tmp_path / "lines", jsonl(*ROWS, {"prompt": "A hen"}))
    assert [(one.prompt, one.labels, one.options) for one in array] == [
        (one.prompt, one.labels, one.options) for one in lines
    ]
    assert [one.place for one in array] == ["item 1", "item 2", "item 3"]


@pytest.mark.parametrize("text", ["[INST] Hello [/INST]", "[1] A source.", "[The king] said", "[1, 2, and 3]"])
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
        ("[1, 2]", ", item 1: neither a string nor a JSON object"),
        ("[]", " contains no prompts"),
        ('["a", {"promt": "b"}]', ", item 2: a prompt has no field 'promt': did you mean 'prompt'?"),
        (f"[{'9' * 5000}]\n", None),
    ],
)
def test_arrays_that_are_refused(tmp_path: Path, text: str, message: str | None) -> None:
    if message is None:
        assert len(read(tmp_path / "plain", text)) == 1
        return
    with pytest.raises(FileError) as error:
        read(tmp_path / "array", text)
    assert str(error.value).startswith(f"{tmp_path / 'array'}{message}")


def test_rows_repeat_what_names_them(outrider: Outrider, tmp_path: Path) -> None:
    """``id``, whatever it is, and ``custom_id``. Other names are another run."""
    path, output = tmp_path / "prompts.json", tmp_path / "out.jsonl"
    rows = [*ROWS, {"prompt": "Hen", "id": {"a": [1, None]}}, batch({"prompt": "Fox"}), "Hen"]
    path.write_text(json.dumps(rows))
    arguments = ("generate", "--prompts", path, "--output", output, *OPTIONS)
    assert outrider(*arguments).code == 0
    written = rows_of(output.read_text())
    names = [{name: row[name] for name in ("category", "id", "custom_id") if name in row} for row in written]
    assert names == [{"id": 7}, {"category": "x", "id": "b"}, {"id": {"a": [1, None]}}, {"custom_id": "r1"}, {}]
    assert outrider(*arguments).err.startswith("0 tokens")
    path.write_text(json.dumps([rows[0] | {"id": 8}, *rows[1:]]))
    assert "line 1 belongs to another run (different id)" in outrider(*arguments).error


def test_chats_of_a_file(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the model's template, with --chat and without; contents may be parts of text. A row repeats the messages."""
    monkeypatch.setattr(embedded().tokenizer, "chat_template", "{% for m in messages %}{{ m.content }} {% endfor %}#")
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda *_, **__: embedded().plain())
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": [{"type": "text", "text": "kind"}]}]
    plain = [messages[0], {"role": "user", "content": "kind"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(jsonl({"messages": messages, "id": 1}, batch({"messages": plain, "model": "fable"})))
    want = embedded().tokenizer("Be kind #").input_ids
    for more in ((), ("--chat",)):
        ended = outrider("generate", "--prompts", path, "-n", 2, "--draft", "none", *more)
        assert ended.code == 0, ended.err
        for row in rows_of(ended.out):
            assert (row["messages"], row["prompt_ids"]) == (plain, want) and "prompt" not in row


def test_requests_of_a_batch_are_read_as_by_the_server(outrider: Outrider, tmp_path: Path) -> None:
    """Its names, those that it has beside ``Sampling``'s, and the command's options where it says nothing."""
    bodies: list[dict[str, Any]] = [
        {"prompt": "Once", "max_tokens": 5, "temperature": 0.5, "seed": 3, "logprobs": 1, "user": "me", "n": 1},
        {"prompt": "Once", "stop": "e", "logit_bias": {"5": -100}, "top_k": -1, "stream": False, "temperature": None},
        {"prompt": "Once", "n_predict": 9, "repeat_penalty": 1.5, "response_format": {
            "type": "json_schema", "json_schema": {"schema": {"enum": ["a fox"]}}}},
    ]  # fmt: skip
    path = tmp_path / "batch.jsonl"
    path.write_text(jsonl(*map(batch, bodies)))
    ended = outrider("generate", "--prompts", path, *OPTIONS, "-t", 0.9, "--top-k", 9)
    assert ended.code == 0, ended.err
    wanted: list[dict[str, Any]] = [
        {"max_new_tokens": 5, "temperature": 0.5, "seed": 3, "logprobs": 1, "top_k": 9},
        {"max_new_tokens": 3, "temperature": 0.9, "seed": 21, "stop": "e", "logit_bias": {5: -100}},
        {
            "max_new_tokens": 9,
            "repetition_penalty": 1.5,
            "temperature": 0.9,
            "seed": 22,
            "top_k": 9,
            "json_schema": {"enum": ["a fox"]},
        },
    ]
    for row, options in zip(rows_of(ended.out), wanted, strict=True):
        (completion,) = embedded("float64").generate(["Once"], num_draft_tokens=4, **options)
        assert (row["text"], row["token_ids"]) == (completion.text, list(completion.token_ids))
        for name in ("max_new_tokens", "repetition_penalty"):
            assert row["settings"][name] == options.get(name, 1.0)


ASKED = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f"}}
REFUSED: list[tuple[Any, str]] = [
    (batch({"prompt": "a", "foo": 1}), ", body: unknown field 'foo'"),
    (batch({"prompt": "a", "tools": [{}]}), ", body: tools = [{}] is not supported"),
    (batch({"prompt": "a", "n": 2}), ", body: n = 2 is not supported in a prompt file"),
    (batch({"prompt": "a", "stream": True}), ", body: stream = True is not supported in a prompt file"),
    (batch({"prompt": "a", "acceptance": "gumbel"}), ", body: acceptance = 'gumbel' is not supported in a prompt file"),
    *(
        (batch({"prompt": "a", name: value}), f", body: {name} = {value} is not supported in a prompt file")
        for name, value in [
            ("add_special_tokens", False),
            ("allowed_token_ids", [3]),
            ("include_stop_str_in_output", True),
            ("prompt_logprobs", 1),
            ("skip_special_tokens", False),
            ("truncate_prompt_tokens", 2),
        ]
    ),
    *(
        (
            batch({"messages": ASKED, "tools": [TOOL], **more}),
            ", body: tools that must be called, called once, strictly",
        )
        for more in (
            {"tool_choice": "required"},
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            {"parallel_tool_calls": False},
            {"response_format": {"type": "json_object"}},
        )
    ),
    (batch({"messages": ASKED, "include_reasoning": False}), ", body: include_reasoning = False is not supported"),
    (batch({"prompt": ["a", "b"]}), ", body: the prompt must be one string"),
    (batch({"prompt": [3, 4]}), ", body: the prompt must be one string"),
    (batch({}), ", body: prompt must be a string"),
    (batch({"messages": "a"}), ", body: messages must be a list"),
    (batch({"prompt": "a", "top_k": 10**30}), ": top_k is a number with too many digits"),
    (batch({"prompt": "a", "temperature": 7e9}), ": temperature = 7000000000.0 is invalid"),
    (batch({"prompt": "a", "model": "gpt"}), ": model = 'gpt' is invalid: the target is 'fable'"),
    (batch({"prompt": "a"}, url="/v1/embeddings"), ": the url must be one of /v1/chat/completions, /v1/completions"),
    (batch({"prompt": "a"}, method="GET"), ": the method must be POST, not 'GET'"),
    (batch({"prompt": "a"}, temperature=1), ": a batch request has no field 'temperature'"),
    (batch([1]), ": the body is not a JSON object"),
    ({"messages": []}, ": messages must be a list with at least one message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ": messages[0].content must be a string"),
    ({"messages": [{"role": "user", "content": "a\ud800"}]}, ": the messages has a lone surrogate"),
    ({"messages": [{"role": "user", "content": "a"}], "prompt": "a"}, ": give a prompt or messages"),
    ({"prompt": "a", "id": "\ud800"}, ": the id has a lone surrogate"),
    ({"prompt": "a", "stop": "\ud800"}, ": the stop has a lone surrogate"),
]


def test_rows_that_are_refused(outrider: Outrider, tmp_path: Path) -> None:
    """Each by name; all of them at once with ``--skip-invalid``, before anything is loaded."""
    path, document = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    rows = [row for row, _ in REFUSED]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert f"{path}, line 1{REFUSED[0][1]}" in outrider("generate", "--prompts", path, *OPTIONS).error
    ended = outrider("generate", "--prompts", path, *OPTIONS, "--skip-invalid", "--json", document)
    assert (ended.code, ended.out) == (1, "")
    skipped = only_document(document.read_text(), "generate")["skipped"]
    for number, ((_, message), one) in enumerate(zip(REFUSED, skipped, strict=True), start=1):
        assert (one["index"], one["place"]) == (number - 1, f"line {number}")
        assert one["error"].startswith(f"{path}, line {number}{message}")
    assert ended.err.startswith(f"skipped: {skipped[0]['error']}\n")
    assert f"skipped: {len(REFUSED) - 20} more rows; --json lists all\n" in ended.err
    assert ended.err.endswith(f", {len(REFUSED)} skipped\n")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}], "seed": 1},
        batch({"prompt": "a", "top_p": 0.5}),
        batch({"prompt": "a", "model": "fable"}),
    ],
)
def test_other_commands_take_texts(outrider: Outrider, tmp_path: Path, row: Any) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(jsonl({"prompt": "a"}, row))
    assert f"{path}, line 2: this command does not support " in outrider("alpha", "--prompts", path).error


# Invalid rows: in the file, on the command line too, and only for the target.
GOOD = {0: "Once", 3: "The fox", 4: "The hen and the king", 6: "A"}
BAD: dict[int, bytes] = {
    1: b'{"prompt": "cut off\n',
    2: b'{"prompt": "\xff"}\n',
    5: json.dumps({"prompt": "word " * 2000}).encode() + b"\n",
    7: b'{"prompt": ""}\n',
    8: b'{"prompt": "a", "temperature": -1}\n',
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    lines = {index: jsonl({"prompt": text}).encode() for index, text in GOOD.items()} | BAD
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"".join(lines[index] for index in sorted(lines)))
    return path


def texts(output: Path) -> dict[int, str]:
    """By index. No row is there twice."""
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len({row["index"] for row in rows}) == len(rows)
    return {row["index"]: row["text"] for row in rows}


def said(prompts: dict[int, str]) -> dict[int, str]:
    decoder = embedded("float64")
    return {i: decoder.generate(prompt, seed=20 + i, max_new_tokens=3)[0].text for i, prompt in prompts.items()}


def test_invalid_rows_are_skipped(outrider: Outrider, mixed: Path, tmp_path: Path) -> None:
    """The others keep their index and their seed. A run that is interrupted goes on, and tells of them again; when one
    is mended, the same command adds its row."""
    output, document = tmp_path / "out.jsonl", tmp_path / "out.json"
    arguments = ("generate", "--prompts", mixed, *OPTIONS, "--batch-size", 2, "--output", output)
    assert f"{mixed}, line 2: not JSON" in outrider(*arguments).error
    arguments = (*arguments, "--skip-invalid", "--json", document)
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.endswith(", 5 skipped\n")
    assert texts(output) == said(GOOD)
    skipped = only_document(document.read_text(), "generate")["skipped"]
    assert [one["index"] for one in skipped] == sorted(BAD)
    assert [line for line in ended.err.splitlines() if line.startswith("skipped: ")] == [
        f"skipped: {one['error']}" for one in skipped
    ]
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) * 2 // 3])
    assert outrider(*arguments).code == 1
    assert sorted(output.read_bytes().splitlines()) == sorted(whole.splitlines())
    mixed.write_bytes(mixed.read_bytes().replace(b'"cut off', b'"mended"}'))
    ended = outrider(*arguments)
    assert ended.code == 1 and ended.err.endswith(", 4 skipped\n")
    assert texts(output) == said(GOOD | {1: "mended"})


def test_invalid_rows_of_shards(outrider: Outrider, mixed: Path, tmp_path: Path) -> None:
    """Each shard tells of its own; together they have the rows of one process."""
    found, reported = {}, []
    for number in (1, 2, 3):
        output, document = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.json"
        arguments = ("generate", "--prompts", mixed, *OPTIONS, "--output", output, "--json", document)
        ended = outrider(*arguments, "--skip-invalid", "--shard", f"{number}/3")
        skipped = [one["index"] for one in only_document(document.read_text(), "generate")["skipped"]]
        assert ended.code == (1 if skipped else 0) and all(index % 3 == number - 1 for index in skipped)
        found |= texts(output) if output.exists() else {}
        reported += skipped
    assert found == said(GOOD) and sorted(reported) == sorted(BAD)


def test_nothing_to_skip(outrider: Outrider, prompts: Path) -> None:
    ended = outrider("generate", "--prompts", prompts, *OPTIONS, "--skip-invalid")
    assert ended.code == 0 and "skipped" not in ended.err
    assert "add --prompts FILE" in outrider("generate", "Once", "--skip-invalid").error
