"""The words of the field, in docstrings, help and messages. docs/internals/architecture.md has the vocabulary."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "outrider"
FILES = sorted(SRC.rglob("*.py"))

# Phrases that were given up, and what is said now.
GIVEN_UP = {
    r"\bright rule\b": "a correct rule",
    r"\bstands? with (probability|min)\b": "is accepted with",
    r"\b(drafts?|tokens?) (that )?(stands?|stood)\b": "accepted",
    r"\bthe law (of|does|is|stays|follows)\b": "the distribution",
    r"\btargets?'s? law\b": "the target's distribution",
    r"\btakes? orders\b": "compiles",
    r"\btakes? note of\b": "reads, records",
    r"\brehears": "warm up, check beforehand",
    r"\bgo(es)? on with the text\b": "continue",
    r"\bas if it were alone\b": "as in a batch of one",
    r"\bgives? (it )?up its slot\b": "leaves its slot",
    r"\bin truth\b": "",
}


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SRC)))
def test_docstrings_begin_with_a_verb_or_a_noun(path: Path) -> None:
    for line, text in _docstrings(ast.parse(path.read_text(encoding="utf-8"))):
        assert not re.match(r"(Of|The same|What)\b", text), f"line {line}: {text.splitlines()[0]}"


@cache
def _said() -> list[tuple[str, str]]:
    """The strings of all files, each with its place."""
    return [
        (f"{path.relative_to(SRC)}, line {line}", re.sub(r"\s+", " ", text))
        for path in FILES
        for line, text in _strings(ast.parse(path.read_text(encoding="utf-8")))
    ]


@pytest.mark.parametrize("phrase", GIVEN_UP)
def test_phrases_that_were_given_up(phrase: str) -> None:
    for place, text in _said():
        found = re.search(phrase, text, re.IGNORECASE)
        assert found is None, f"{place}: {found[0]!r}; better: {GIVEN_UP[phrase]}"


def test_the_search_finds_them() -> None:
    """The control."""
    tree = ast.parse('def f():\n    """Of a row: what stands."""\n    raise ValueError("a right   rule")\n')
    assert next(_docstrings(tree)) == (1, "Of a row: what stands.")
    assert any(re.search(r"\bright rule\b", re.sub(r"\s+", " ", text)) for _, text in _strings(tree))
