"""Packages lie in layers: imports never go up, nor in circles, and what must be quick to import stays free of torch."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from scripts import script

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "outrider"

# Packages and single modules, top to bottom: each imports from its own layer and those below it.
LAYERS = """
    __main__ cli
    serve offline
    certify measure race distill export evals
    __init__ api decoder custom_generate
    decoding drafters requests
    models
    native
    kernels runtime sampling
    text system pages
    records options errors
""".strip().splitlines()
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}

# The packages' own files hold a docstring and nothing else, so that importing one file imports no other.
PACKAGE_FILES = {".".join(path.relative_to(SRC).with_suffix("").parts) for path in SRC.glob("*/**/__init__.py")}


def _imported(tree: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """The modules of this package that are imported anywhere in the code, for type checkers too."""

    def resolve(dotted: str) -> str:
        name = dotted.removeprefix("outrider").removeprefix(".") or "__init__"
        return name if name in modules else f"{name}.__init__"

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (resolve(alias.name) for alias in node.names if alias.name.split(".")[0] == "outrider")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute here"
            if node.module.split(".")[0] == "outrider":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}".removeprefix("outrider.")
                    yield name if name in modules else resolve(node.module)


def _package(name: str) -> str:
    return name.split(".")[0]


def test_imports_go_neither_up_nor_in_circles() -> None:
    """Neither of modules nor of packages. Known mistakes are for certificates alone. Package files hold a docstring."""
    modules = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in sorted(SRC.rglob("*.py"))}
    graph = {name: set(_imported(ast.parse(path.read_text()), modules)) for name, path in modules.items()}
    packages: dict[str, set[str]] = {package: set() for package in LAYER_OF}
    for name, found in graph.items():
        for imported in map(_package, found):
            assert LAYER_OF[_package(name)] <= LAYER_OF[imported], f"{name} imports {imported}"
            packages[_package(name)] |= {imported} - {_package(name)}
    assert packages.keys() == LAYER_OF.keys(), "every package has its layer"
    for one in (graph, packages):
        TopologicalSorter(one).prepare()  # raises CycleError
    assert "kernels" not in packages["runtime"]
    users = {name for name, found in graph.items() if "certify.controls" in found}
    assert users == {"certify.run", "cli.commands.certify"}
    for tree in (ast.parse(modules[name].read_text()) for name in PACKAGE_FILES):
        assert len(tree.body) == 1 and ast.get_docstring(tree)
    assert len(list(SRC.glob("*.py"))) <= 8, "the top level is small"
    code = "import os, outrider\nfrom outrider import api\ndef late():\n    from outrider.cli import app, __doc__"
    assert [*_imported(ast.parse(code), modules)] == ["__init__", "api", "cli.app", "cli.__init__"]


def test_the_command_line_starts_without_torch() -> None:
    """What is imported at the top is clean all the way down, and so is all help; the program's imports no command."""
    code = """
import sys, outrider.records
from outrider.cli.app import EXAMPLES, app
app(["--help"], standalone_mode=False)
assert not [name for name in sys.modules if name.startswith("outrider.cli.commands.")]
for words in ("eval", *EXAMPLES):
    app([*words.split(), "--help"], standalone_mode=False)
    assert "outrider.cli.commands." + words.split()[0].replace("-", "_") in sys.modules
heavy = "asyncio httpx huggingface_hub jinja2 multiprocessing numpy psutil pydantic safetensors scipy tokenizers torch"
sys.exit(str(found) if (found := sys.modules.keys() & {"transformers", *heavy.split()}) else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_scripts_import_names_that_are_there() -> None:
    """Scripts outside of the package, of which most run by hand alone."""
    for path in (
        path for folder in ("benchmarks", "recipes", "examples", ".ci") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
                module = import_module(node.module or "")
                for name in (alias.name for alias in node.names):
                    assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), f"{path}, line {node.lineno}"


def test_faults_are_in_lines_that_are_there() -> None:
    """Each of ``.ci/faults.py`` stands once in its file, so that moved code takes its faults along."""
    for name, line, *_ in script(".ci/faults.py").FAULTS:
        assert (SRC / name).read_text(encoding="utf-8").count(line) == 1, (name, line)


def _odd(code: str) -> list[str]:
    """Docstrings that begin with neither a verb nor a noun."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(code)) if isinstance(node, kinds)]
    return [text for text in texts if re.match(r"(Of|The same|That|What)\b", text)]


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = {str(path): odd for path in SRC.rglob("*.py") if (odd := _odd(path.read_text(encoding="utf-8")))}
    assert found == {}
    assert _odd('def f():\n    """Of a row: what is accepted."""\n') == ["Of a row: what is accepted."]
