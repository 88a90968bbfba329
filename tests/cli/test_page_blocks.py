"""The blocks of code of all pages are run (with ``-m slow``), or at least parsed, as those after a comment, which
readers do not see, ``<!-- not run: REASON -->``. Commands of ``outrider`` run in this process; curl and clients get a
real server. A block of ``text`` after one that is run shows lines of its output, in order, with any numbers."""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from commands import Outrider, command_of
from outrider.api import load
from pages import PAGES, ROOT
from serve.servers import running

ADDRESS = "http://127.0.0.1:8000"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
SHELL = {"cat", "curl", "echo", "ls"}  # run by a shell
ONLY_READ = {"pip", "git", "python3", ".", "cd", "pytest"}  # of installations
FILES = {
    "prompts.jsonl": "".join(json.dumps({"prompt": text}) + "\n" for text in ("The king", "The fox", "One day the")),
    "prompts.txt": "The king\nThe fox and the hen\n",
    "schema.json": '{"type": "object", "properties": {"name": {"enum": ["fox", "hen"]}}, "required": ["name"]}',
    "animal.lark": 'start: " " ("fox" | "hen")\n',
    "story.txt": "The king saw the queen and the queen saw the king.\n" * 100,
}
FENCE = re.compile(r"^(?:<!-- ([^\n]*?) -->\n\n?)?```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A block of code: its line and language, its text, the comment before it, and the output that the page shows."""

    line: int
    language: str
    code: str
    mark: str
    output: str

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "python") and not self.mark.startswith("not run: ")


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(FENCE.finditer(text))
    blocks = []
    for match, after in zip(found, [*found, None][1:], strict=True):
        is_shown = after is not None and after[2] == "text" and not text[match.end() : after.start()].strip()
        output = after[3] if after is not None and is_shown else ""
        blocks.append(Block(text.count("\n", 0, match.start()) + 1, match[2], match[3], match[1] or "", output))
    return blocks


def plain_lines(text: str) -> list[str]:
    """Lines with 0 for each number, and one space for several."""
    number = re.compile(r"[-+±]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?")
    return [" ".join(number.sub("0", line).split()) for line in text.splitlines() if line.strip()]


def commands_of(code: str) -> list[list[str]]:
    """The words of each command of a block: without variables before it, redirections and comments."""
    commands: list[list[str]] = [[]]
    line = ""
    for part in code.replace("\\\n", " ").splitlines():
        line += part
        lexer = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        lexer.whitespace_split = True
        try:
            words = iter(list(lexer))
        except ValueError:  # a quotation goes on in the next line
            line += "\n"
            continue
        line = ""
        commands.append([])
        for word in words:
            if set(word) <= set("&|;"):
                commands.append([])
            elif set(word) <= set("<>"):
                next(words)
            elif commands[-1] or not re.match(r"[A-Z_]+=", word):
                commands[-1].append(word)
    return [command for command in commands if command]


def check_options(rest: list[str]) -> None:
    command = command_of("")
    context = command.make_context("outrider", [], resilient_parsing=True)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        name, command, rest = command.resolve_command(context, rest)
        context = type(context)(command, info_name=name, parent=context)
    command.make_parser(context).parse_args(list(rest))


def check(block: Block) -> None:
    if block.language == "bash":
        for command in commands_of(block.code):
            if "outrider" in command:  # whatever starts it
                check_options(command[command.index("outrider") + 1 :])
            for extras in re.findall(r"\[([a-z,]+)\]", " ".join(command)) if "pip" in command else ():
                assert set(extras.split(",")) <= set(EXTRAS), command
    {"python": ast.parse, "toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}.get(block.language, str)(
        block.code
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_can_be_parsed(page: Path) -> None:
    for block in blocks_of(page):
        assert not block.mark or block.mark.startswith("not run: "), f"{page}:{block.line}"
        try:
            check(block)
        except Exception as error:
            raise AssertionError(f"{page}:{block.line}: {error}") from error


@pytest.fixture
def url() -> Iterator[Callable[[], str]]:
    with ExitStack() as stack:

        @cache
        def started() -> str:
            return stack.enter_context(running(load("fable", "fable-draft"), names=("fable",))).url

        yield started


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(one.is_run for one in blocks_of(page))], ids=lambda page: page.name
)
def test_blocks_run(
    page: Path,
    outrider: Outrider,
    url: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In a folder with the files that commands name."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    names: dict[str, Any] = {}
    for block in filter(lambda one: one.is_run, blocks_of(page)):
        code = block.code.replace(ADDRESS, url()) if ADDRESS in block.code else block.code
        written = ""
        if block.language == "python":
            capsys.readouterr()
            exec(compile(code, f"{page}:{block.line}", "exec"), names)
            written = capsys.readouterr().out
        else:
            for command in commands_of(code):
                if command[0] == "outrider" and command[1] != "serve":  # the server of ``url`` takes its place
                    ended = outrider(*command[1:])
                    assert ended.code == 0, (page, block.line, command, ended)
                    written += ended.out + ended.err
                elif command[0] in SHELL:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    assert done.returncode == 0 and '"error"' not in done.stdout, (page, block.line, done)
                    written += done.stdout
                else:
                    assert command[0] in {*ONLY_READ, "outrider"}, (page, block.line, command)
        lines = iter(plain_lines(written))
        missing = [line for line in plain_lines(block.output) if line not in lines]
        assert not missing, f"{page}:{block.line}: not written: {missing[0]!r}, but:\n{written}"
