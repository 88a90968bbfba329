"""The blocks of code of all pages are run, or at least parsed, as pages.py says.

Commands of ``outrider`` run in this process; curl and clients in Python get a real server.
"""

import ast
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

import outrider
from commands import Outrider, command_of
from pages import PAGES, ROOT, Block, blocks_of, missing_line, without_fences
from serve.servers import running

ADDRESS = "http://127.0.0.1:8000"
WITH_BLOCKS = [page for page in PAGES if any(block.is_run for block in blocks_of(page))]
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


def arguments_of(command: list[str]) -> list[str] | None:
    """The arguments of ``outrider`` in a command, whatever starts it, or None."""
    if "-m" in command and command[command.index("-m") + 1] == "outrider":
        return command[command.index("-m") + 2 :]
    for i, word in enumerate(command):
        if word == "outrider":
            return command[i + 1 :]
    return None


def check_options(arguments: list[str]) -> None:
    """Every option of a command exists, and has a value where it needs one."""
    command = command_of("")
    context, rest = command.make_context("outrider", [], resilient_parsing=True), arguments
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command = command.commands[rest[0]]
        context, rest = type(context)(command, info_name=rest[0], parent=context), rest[1:]
    command.make_parser(context).parse_args(list(rest))


def check(block: Block) -> None:
    """A block can be parsed."""
    if block.language == "bash":
        for command in commands_of(block.code):
            arguments = arguments_of(command)
            if arguments is not None:
                check_options(arguments)
            for extras in re.findall(r"\[([a-z,]+)\]", " ".join(command)) if "pip" in command else ():
                assert set(extras.split(",")) <= set(EXTRAS), command
    parsers: dict[str, Callable[[str], object]] = {
        "python": ast.parse,
        "toml": tomllib.loads,
        "json": json.loads,
        "yaml": yaml.safe_load,
    }
    parsers.get(block.language, str)(block.code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_can_be_parsed(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in ("bash", "python", "toml", "json", "yaml", "text"), f"{page}:{block.line}"
        assert not block.mark or block.mark.startswith("not run: "), f"{page}:{block.line}"
        try:
            check(block)
        except Exception as error:
            raise AssertionError(f"{page}:{block.line}: {error}") from error
    hidden = re.search(r"^ {4}(outrider|pip|curl|torchrun|python) .*", without_fences(page), re.MULTILINE)
    assert hidden is None, f"{page}: a command outside of a fence: {hidden[0]}"


def test_mistakes_are_found() -> None:
    """The control."""
    with pytest.raises(Exception, match="--draff"):
        check(Block(1, "bash", "A=1 outrider compare --draff x | cat\n", "", None))
    with pytest.raises(KeyError, match="comprae"):
        check(Block(1, "bash", "torchrun --nproc-per-node 4 -m outrider comprae\n", "", None))
    with pytest.raises(AssertionError):
        check(Block(1, "bash", "pip install '.[serv]' && outrider compare\n", "", None))
    code = "outrider compare \\\n  -k 3,5 > f.txt  # 'a comment\noutrider eval multiplication\n"
    check(Block(1, "bash", code, "", None))
    assert missing_line("a  1\nb", "x\na 27.5\ny\nb") is None
    assert missing_line("a\nb", "b\na") == "b"


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Starts a server of the embedded pair when it is first asked for."""
    with ExitStack() as stack:
        found: list[str] = []

        def url() -> str:
            if not found:
                decoder = outrider.load("fable", "fable-draft")
                found.append(stack.enter_context(running(decoder, names=("fable",))).url)
            return found[0]

        yield url


def run_blocks(
    page: Path, blocks: list[Block], run: Outrider, url: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in blocks:
        code = block.code.replace(ADDRESS, url()) if ADDRESS in block.code else block.code
        written = ""
        if block.language == "python":
            capsys.readouterr()
            exec(compile(code, f"{page}:{block.line}", "exec"), names)
            written = capsys.readouterr().out
        else:
            for command in commands_of(code):
                if command[0] == "outrider" and command[1] != "serve":  # the server of ``url`` takes its place
                    ended = run(*command[1:])
                    assert ended.code == 0, (page, block.line, command, ended)
                    written += ended.out + ended.err
                elif command[0] in SHELL:
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                    assert done.returncode == 0 and '"error"' not in done.stdout, (page, block.line, done)
                    written += done.stdout
                else:
                    assert command[0] in {*ONLY_READ, "outrider"}, (page, block.line, command)
        if block.output is not None:
            missing = missing_line(block.output, written)
            assert missing is None, f"{page}:{block.line}: not written: {missing!r}, but:\n{written}"


@pytest.fixture
def page_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a page, with the files that its commands name."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


@pytest.mark.slow
@pytest.mark.usefixtures("page_folder")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(
    page: Path, outrider: Outrider, address: Callable[[], str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_blocks(page, [block for block in blocks_of(page) if block.is_run], outrider, address, capsys)
