"""What the package takes of PyTorch and Transformers is there; a failure names what a release lacks, and the place."""

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SRC = Path(__file__).parents[1] / "src" / "outrider"
LIBRARIES = "torch", "transformers"
# Operators appear when a library is registered; the others are only asked for where a device or a package has them.
ELSEWHERE = "torch.ops.", "torch.cuda.", "torch.xpu.", "torch.mps.", "torch.distributed."


def _taken(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines, and the dotted names of modules, and of what is taken from modules."""
    known: dict[str, str] = {}  # by the name in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                known[alias.asname or first] = alias.name if alias.asname else first
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield node.lineno, f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in known and rest.replace(".", "").isidentifier():
                yield node.lineno, f"{known[first]}.{rest}"


def _is_there(dotted: str) -> bool:
    """Whether modules have a dotted name; attributes of what is no module are not looked up."""
    path, *names = dotted.split(".")
    found: Any = importlib.import_module(path)
    for name in names:
        if not isinstance(found, ModuleType):
            return True
        path += f".{name}"
        try:
            found = getattr(found, name)
        except (AttributeError, ImportError, RuntimeError):  # Transformers' modules are imported when first asked
            try:
                found = importlib.import_module(path)
            except ImportError:
                return False
    return True


@pytest.mark.parametrize("library", LIBRARIES)
def test_names_are_there(library: str) -> None:
    importlib.import_module(library)
    lacking, num_names = [], 0
    for path in sorted(SRC.rglob("*.py")):
        for line, name in _taken(ast.parse(path.read_text(encoding="utf-8"))):
            if name.partition(".")[0] == library and not f"{name}.".startswith(ELSEWHERE):
                num_names += 1
                if not _is_there(name):
                    lacking.append(f"{path.relative_to(SRC)}:{line}: {name}")
    version = sys.modules[library].__version__
    assert not lacking, f"{library} {version} lacks names:\n" + "\n".join(lacking)
    assert num_names > 10


def test_a_lacking_name_is_found() -> None:
    code = "import torch\nfrom torch import nn, thing\nnn.Linear.weight\nnn.NoLayer(3)\ntorch.nn.functional.none"
    lacking = {name for _, name in _taken(ast.parse(code)) if not _is_there(name)}
    assert lacking == {"torch.thing", "torch.nn.NoLayer", "torch.nn.functional.none"}
