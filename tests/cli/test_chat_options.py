"""``--chat`` and its options in the commands that generate or measure, and chats of files."""

import json
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider, only_document
from outrider.text import tokenizer as module
from pairs import embedded

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}{% if tools %}{{ tools | length }} {% endif %}"
    "{% if add_generation_prompt %}{{ 'yes' if think else 'no' }}:{% endif %}"
)
SYSTEM, KWARGS = ("--system", "Be brief"), ("--chat-template-kwargs", '{"think": true}')
ROW = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "A hen"}]}


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chats that were written, of an embedded pair with a template."""
    texts: list[str] = []

    def write(*arguments: Any) -> str:
        texts.append(chat_text(*arguments))
        return texts[-1]

    chat_text = module.chat_text
    monkeypatch.setattr(module, "chat_text", write)
    monkeypatch.setattr(embedded().tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr("outrider.cli.shared.pair_options.PairOptions.load", lambda *_, **__: embedded().plain())
    return texts


@pytest.mark.parametrize("command", [("generate", "-n", 2), ("plan", "-n", 4, "-k", 1)])
def test_prompts_become_chats(outrider: Outrider, tmp_path: Path, written: list[str], command: tuple[Any, ...]) -> None:
    """Texts by ``--chat``, which other options imply; messages without it; and a row's own options stand."""
    prompts = tmp_path / "prompts.jsonl"
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, ROW["messages"][1]]
    continued = {"messages": parts, "continue_final_message": True}
    own = {**ROW, "tools": [{"type": "function"}], "chat_template_kwargs": {"think": False}}
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ({"prompt": "The fox"}, continued, own)))
    ended = outrider(*command, "--prompts", prompts, *SYSTEM, *KWARGS, "--json", tmp_path / "out.json")
    assert ended.code == 0, ended.err
    assert "add --chat" not in ended.err
    assert set(written) == {
        "system: Be brief user: The fox yes:",
        "system: Be brief user: Hello assistant: A hen",
        "system: Be brief user: Hello assistant: A hen 1 no:",
    }
    if command[0] == "generate":
        (_, other, row) = only_document((tmp_path / "out.json").read_text(), "generate")["completions"]
        assert row.items() >= own.items() and other["messages"] == ROW["messages"]


def test_options_that_the_template_does_not_read(outrider: Outrider, written: list[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({**ROW, "chat_template_kwargs": {"x": 1}}) + "\n")
    message = "line 1: chat_template_kwargs = {'x': 1} is invalid"
    assert message in outrider("generate", "--prompts", path, *SYSTEM).error
    words = "Hello", *SYSTEM, "--chat-template-kwargs", '{"thought": 1}'
    assert "does not read 'thought', but think" in outrider("generate", *words).error
