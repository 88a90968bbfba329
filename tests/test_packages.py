"""Packages lie in layers: imports never go up, nor in circles, and what must be quick to import stays free of torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "outrider"

# Packages and single modules, top to bottom: each imports from its own layer and those below it.
LAYERS = """
    __main__ cli
    serve offline
    certify measure bench race distill export evals
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


def _modules() -> dict[str, Path]:
    return {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in sorted(SRC.rglob("*.py"))}


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


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run at import: not those in functions, nor those for type checkers only."""
    for node in body:
        if isinstance(node, ast.FunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        ):
            continue
        yield node
        for field in ("body", "orelse", "finalbody"):
            yield from _top_level(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _top_level(handler.body)


def _package(name: str) -> str:
    return name.split(".")[0]


def test_every_package_has_its_layer() -> None:
    assert {_package(name) for name in _modules()} == LAYER_OF.keys()


@pytest.mark.parametrize("package", LAYER_OF)
def test_imports_do_not_go_up(package: str) -> None:
    modules = _modules()
    for name in (name for name in modules if _package(name) == package):
        for imported in map(_package, _imported(ast.parse(modules[name].read_text()), modules)):
            assert LAYER_OF[package] <= LAYER_OF[imported], f"{name} imports {imported}"


def test_nothing_is_imported_in_circles() -> None:
    """Neither modules nor packages."""
    modules = _modules()
    graph = {name: set(_imported(ast.parse(path.read_text()), modules)) for name, path in modules.items()}
    packages: dict[str, set[str]] = {package: set() for package in LAYER_OF}
    for name, found in graph.items():
        packages[_package(name)] |= {_package(other) for other in found} - {_package(name)}
    for one in (graph, packages):
        TopologicalSorter(one).prepare()  # raises CycleError


def test_running_a_model_knows_no_kernels() -> None:
    modules = _modules()
    for name in (name for name in modules if _package(name) == "runtime"):
        assert "kernels" not in map(_package, _imported(ast.parse(modules[name].read_text()), modules))


def test_the_top_level_is_small() -> None:
    assert len(list(SRC.glob("*.py"))) <= 8


def test_known_mistakes_are_for_certificates_only() -> None:
    """No option of the decoder leads to them."""
    modules = _modules()
    users = {
        name for name, path in modules.items() if "certify.controls" in _imported(ast.parse(path.read_text()), modules)
    }
    assert users == {"certify.run", "cli.commands.certify"}


def test_package_files_hold_only_a_docstring() -> None:
    for name in PACKAGE_FILES:
        tree = ast.parse(_modules()[name].read_text())
        assert len(tree.body) == 1
        assert ast.get_docstring(tree)


@pytest.mark.parametrize(
    "name", ["records", "errors", "__init__", *(name for name in _modules() if name.startswith("cli."))]
)
def test_no_torch_at_import(name: str) -> None:
    """Records and errors know no tensors, and `outrider --help` does not wait for torch."""
    for node in _top_level(ast.parse(_modules()[name].read_text()).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            roots = {alias.name.split(".")[0] for alias in node.names} | {
                (getattr(node, "module", "") or "").split(".")[0]
            }
            assert not roots & {"torch", "transformers"}, f"{name}, line {node.lineno}"


def test_the_command_line_starts_without_torch() -> None:
    """What is imported at the top is clean all the way down."""
    code = (
        "import sys, outrider, outrider.records, outrider.errors, outrider.cli.app;"
        "sys.exit(str(heavy) if (heavy := sys.modules.keys() & {'torch', 'transformers', 'scipy', 'numpy'}) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _names(path: Path) -> set[str]:
    """Names at the top of a module, which others may import."""
    found = {one.stem for one in path.parent.glob("*")} if path.name == "__init__.py" else set()
    for node in ast.parse(path.read_text()).body:
        for part in ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.If, ast.Try)) else [node]:
            match part:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.ImportFrom(names=names):
                    found |= {alias.asname or alias.name for alias in names}
    return found


@pytest.mark.parametrize("folder", ["benchmarks", "recipes", "examples", ".ci"])
def test_scripts_import_names_that_are_there(folder: str) -> None:
    """Scripts outside of the package, of which most run by hand alone."""
    modules = _modules()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
                name = (node.module or "").removeprefix("outrider").removeprefix(".") or "__init__"
                names = _names(modules[name] if name in modules else modules[f"{name}.__init__"])
                assert {alias.name for alias in node.names} <= names, f"{path.relative_to(ROOT)}, line {node.lineno}"


def test_faults_are_in_lines_that_are_there() -> None:
    """Each of ``.ci/faults.py`` stands once in its file, so that moved code takes its faults along."""
    for name, line, *_ in script(".ci/faults.py").FAULTS:
        assert (SRC / name).read_text(encoding="utf-8").count(line) == 1, (name, line)


def test_the_walk_over_imports_sees_all_kinds() -> None:
    """The control."""
    modules = {"api": Path(), "cli.app": Path(), "cli.__init__": Path(), "__init__": Path(), "lm": Path()}
    code = """
import os, outrider
import outrider.lm
from outrider import api
from outrider.cli import app
from outrider.cli.app import main
from outrider.cli import __doc__
def late():
    from outrider.api import load
if TYPE_CHECKING:
    import torch
try:
    import numpy
except ImportError:
    import scipy
"""
    tree = ast.parse(code)
    expected = ["__init__", "lm", "api", "cli.app", "cli.app", "cli.__init__", "api"]
    assert sorted(_imported(tree, modules)) == sorted(expected)
    names = {alias.name for node in _top_level(tree.body) for alias in getattr(node, "names", [])}
    assert {"numpy", "scipy", "os"} <= names
    assert not names & {"torch", "load"}
