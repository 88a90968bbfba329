"""Docstrings begin as CONTRIBUTING.md asks."""

import ast
import re
from pathlib import Path

SRC = Path(__file__).parent.parent / "src" / "outrider"


def _odd(code: str) -> list[str]:
    """Docstrings that begin with neither a verb nor a noun."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
    return [text for text in texts if re.match(r"(Of|The same|That|What)\b", text)]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {str(path): odd for path in SRC.rglob("*.py") if (odd := _odd(path.read_text(encoding="utf-8")))}
    assert found == {}
    assert _odd('def f():\n    """Of a row: what is accepted."""\n') == ["Of a row: what is accepted."]
