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
ELSEWHERE = "torch.ops", "torch.cuda", "torch.xpu", "torch.mps", "torch.distributed"


def _taken(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Lines, and the dotted names of modules, and of what is taken from modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            words = ast.unparse(node)
            if words.replace(".", "").isidentifier():
                yield node.lineno, words


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
        except AttributeError:
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
            if name.partition(".")[0] == library and not name.startswith(ELSEWHERE):
                num_names += 1
                if not _is_there(name):
                    lacking.append(f"{path.relative_to(SRC)}:{line}: {name}")
    version = sys.modules[library].__version__
    assert not lacking, f"{library} {version} lacks names:\n" + "\n".join(lacking)
    assert num_names > 10


def test_a_lacking_name_is_found() -> None:
    code = "import torch.nn\nfrom torch import Tensor, thing\ntorch.nn.Linear.weight\ntorch.nn.NoLayer(3)"
    assert [name for _, name in _taken(ast.parse(code)) if not _is_there(name)] == ["torch.thing", "torch.nn.NoLayer"]
