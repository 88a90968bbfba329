"""Docstrings begin as CONTRIBUTING.md asks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "outrider"
FILES = sorted(SRC.rglob("*.py"))


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _odd(tree: ast.AST) -> list[str]:
    """Docstrings that begin with neither a verb nor a noun."""
    return [f"line {line}: {text}" for line, text in _docstrings(tree) if re.match(r"(Of|The same|That|What)\b", text)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    assert _odd(ast.parse(path.read_text(encoding="utf-8"))) == []


def test_an_odd_docstring_is_found() -> None:
    """The control."""
    tree = ast.parse('def f():\n    """Of a row: what is accepted."""\n')
    assert _odd(tree) == ["line 1: Of a row: what is accepted."]
