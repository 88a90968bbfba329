"""Options of single prompts, in a file of them: ``outrider generate`` takes them, other commands refuse them."""

import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider
from pairs import embedded

TEXT = "Once upon a time"
COMMAND = {"max_new_tokens": 6, "seed": 20, "temperature": 0.9}
ARGUMENTS = ("-n", 6, "--seed", 20, "-t", 0.9, "--dtype", "float64")

OWN: list[tuple[dict[str, Any], dict[str, Any]]] = [  # in the file, and as the library takes it
    ({}, {}),
    ({"max_new_tokens": 3}, {"max_new_tokens": 3}),
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 1.5, "top_k": 5, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.3},) * 2,
    ({"logit_bias": {"5": 3, "300": "-inf"}}, {"logit_bias": {5: 3.0, 300: -float("inf")}}),
    ({"seed": 7}, {"seed": 7}),
    ({"stop": "e"}, {"stop": ["e"]}),
    ({"stop": ["e", "a"], "ignore_eos": True}, {"stop": ["e", "a"], "ignore_eos": True}),
    ({"logprobs": 2}, {"logprobs": 2}),
    ({"presence_penalty": 1.0, "frequency_penalty": -0.5, "min_tokens": 4, "stop_token_ids": [5, 7]},) * 2,
    ({"regex": " [a-z]+", "max_new_tokens": 5},) * 2,
    ({"json_schema": {"enum": ["a fox", "a hen"]}, "max_new_tokens": 20},) * 2,
    ({"temperature": None, "seed": None}, {}),
]


def file_of(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"prompt": TEXT} | row) + "\n" for row in rows))
    return path


def rows_of(text: str) -> list[dict[str, Any]]:
    return sorted(map(json.loads, text.splitlines()), key=itemgetter("index"))


@pytest.mark.parametrize("batch_size", [1, 4])
def test_they_override_those_of_the_command(outrider: Outrider, tmp_path: Path, batch_size: int) -> None:
    """Each row is that of the library with the same options, and its settings say what they were."""
    prompts = file_of(tmp_path / "prompts.jsonl", [own for own, _ in OWN])
    ended = outrider("generate", "--prompts", prompts, "--batch-size", batch_size, *ARGUMENTS)
    assert ended.code == 0, ended.err
    for row, (_, own) in zip(rows_of(ended.out), OWN, strict=True):
        options: dict[str, Any] = COMMAND | {"seed": 20 + row["index"]} | own
        (want,) = embedded("float64").generate([TEXT], num_draft_tokens=4, **options)
        assert (row["text"], row["finish_reason"]) == (want.text, want.finish_reason)
        assert tuple(row["token_ids"]) == want.token_ids and row["seed"] == want.seed
        assert ("logprobs" in row) == ("logprobs" in own)
        settings = row["settings"]
        assert settings["max_new_tokens"] == options["max_new_tokens"]
        assert settings["temperature"] == options["temperature"]
        assert settings["seed"] == own.get("seed", 20)
        assert settings["logit_bias"] == (["5=3.0", "300=-inf"] if "logit_bias" in own else None)


def test_fields_of_other_projects_are_left_alone(outrider: Outrider, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 4, "metadata": {"colour": "red"}},
        {"question_id": 81, "category": "math", "turns": ["a", "b"], "reference": ["c", ""]},
        {"task_id": "HumanEval/0", "entry_point": "f", "canonical_solution": "1", "test": "def check(f): ..."},
        {"question": "How many?", "answer": "#### 3"},
        {"ind": 4, "activity_label": "Sailing", "ctx": "a b", "ctx_a": "a", "ctx_b": "b", "endings": ["c"], "label": 0},
    ]
    prompts = file_of(tmp_path / "prompts.jsonl", rows)
    ended = outrider("generate", "--prompts", prompts, "-n", 1)
    assert ended.code == 0 and len(ended.out.splitlines()) == len(rows)


def test_a_prompt_with_a_seed_keeps_a_constant_k(outrider: Outrider, tmp_path: Path) -> None:
    """Or its text would depend on the times of this machine: K = 4 in every round, whatever is chosen for the others.
    So its text is the same alone and beside others."""
    beside = file_of(tmp_path / "beside.jsonl", [{"seed": 3}, {}, {}])
    alone = file_of(tmp_path / "alone.jsonl", [{"seed": 3}])
    options = ("-n", 16, "--dtype", "float64")
    rows = rows_of(outrider("generate", "--prompts", beside, "--batch-size", 3, *options).out)
    (row,) = rows_of(outrider("generate", "--prompts", alone, *options).out)
    (same,) = [one for one in rows if one["index"] == 0]
    assert same["token_ids"] == row["token_ids"]
    drafted = same["stats"]["drafted_histogram"]
    assert len(drafted) == 5 and drafted[4] > 0  # fewer only near the end
    assert {one["settings"]["num_draft_tokens"] for one in rows} == {"auto"}


def test_a_changed_option_is_another_run(outrider: Outrider, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    prompts = file_of(tmp_path / "prompts.jsonl", [{"top_k": 5, "logit_bias": {"5": "-inf"}}, {}])
    arguments = ("generate", "--prompts", prompts, "--output", output, *ARGUMENTS)
    assert outrider(*arguments).code == 0
    whole = output.read_bytes()
    assert outrider(*arguments).code == 0
    assert output.read_bytes() == whole
    for changed in ([{"top_k": 6, "logit_bias": {"5": "-inf"}}, {}], [{}, {}]):
        file_of(prompts, changed)
        assert f"{output}, line 1 belongs to another run (different settings)" in outrider(*arguments).error
        assert output.read_bytes() == whole


@pytest.mark.parametrize(
    "command",
    [
        ("record", "--output", "log"),
        ("certify",),
        ("alpha",),
        ("plan",),
    ],
    ids=lambda command: command[0],
)
def test_other_commands_refuse_them(outrider: Outrider, tmp_path: Path, command: tuple[str, ...]) -> None:
    """They would mean something else there, or nothing."""
    prompts = file_of(tmp_path / "prompts.jsonl", [{}, {"temperature": 0.5}])
    message = outrider(*command, "--prompts", prompts).error
    assert f"{prompts}, line 2: this command does not support per-prompt options ('temperature')" in message
