"""The house has floors: imports go down, never up, and what must be quick to import stays free of torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "outrider"

# All modules, top to bottom: each may import those below it. A new file is given its place here; if there is none that
# it fits, it does too much. ("__init__" is the public door.)
ORDER = """
    __main__
    cli.app
    cli.alpha
    cli.divergence
    cli.certify
    cli.certify_samples
    cli.compare
    cli.distill
    cli.evaluate
    cli.eval_harness
    cli.eval_multiplication
    cli.eval_perplexity
    cli.generate
    cli.latency
    cli.models
    cli.plan
    cli.pairs
    cli.whatif
    cli.analyze
    cli.record
    cli.replay
    cli.shapes
    cli.stored
    cli.findings
    cli.jsonl
    cli.output
    cli.options
    bench.certificate_html
    bench.plots
    bench.report
    bench.run
    distill.shapes
    distill.train
    distill.data
    distill.student
    distill.losses
    bench.prompts
    evals.tasks
    evals.harness
    evals.scores
    evals.perplexity
    lab.plan
    lab.rounds
    lab.replay
    lab.record
    lab.foreign
    lab.alpha
    lab.certify
    lab.samples
    lab.design
    lab.certificate
    lab.divergence
    lab.exact
    lab.wrong
    lab.observed
    lab.edges
    lab.evidence
    lab.forced
    lab.lookups
    lab.log
    lab.renewal
    lab.bounds
    lab.counts
    evals.multiplication
    __init__
    api
    costs
    decode
    reading
    drafters.model
    drafters.ngram
    drafters.base
    schedule
    batch
    models.loading
    models.memory
    models.registry
    lm
    captured
    compiled
    execution
    thin
    verify
    cache
    probs
    noise
    stop
    tokens
    intervals
    provenance
    clock
    flow
    files
    rounding
    speedup
    errors
""".split()
FLOORS = {name: floor for floor, name in enumerate(ORDER)}

# The packages' own files hold a docstring and nothing else, so that importing one file imports no other.
PACKAGE_FILES = {f"{path.parent.name}.__init__" for path in SRC.glob("*/__init__.py")}


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


def test_every_file_has_its_place() -> None:
    """In the table, once; nor are there places without a file."""
    assert len(FLOORS) == len(ORDER)
    files = _modules().keys() - PACKAGE_FILES
    assert files - FLOORS.keys() == set(), "give these files their place in ORDER"
    assert FLOORS.keys() - files == set(), "these places in ORDER have no file"


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_down(name: str) -> None:
    modules = _modules()
    for imported in _imported(ast.parse(modules[name].read_text()), modules):
        if imported not in PACKAGE_FILES:
            assert FLOORS[name] < FLOORS[imported], f"{name} must not import {imported}"


def test_known_mistakes_are_for_certificates_only() -> None:
    """No option of the decoder leads to them."""
    modules = _modules()
    users = {name for name, path in modules.items() if "lab.wrong" in _imported(ast.parse(path.read_text()), modules)}
    assert users == {"lab.certify", "lab.certificate", "cli.certify"}


def test_package_files_hold_only_a_docstring() -> None:
    for name in PACKAGE_FILES:
        tree = ast.parse(_modules()[name].read_text())
        assert len(tree.body) == 1
        assert ast.get_docstring(tree)


@pytest.mark.parametrize("name", ["flow", "errors", "__init__", *(name for name in ORDER if name.startswith("cli."))])
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
        "import sys, outrider, outrider.flow, outrider.errors, outrider.cli.app;"
        "sys.exit(str(heavy) if (heavy := sys.modules.keys() & {'torch', 'transformers', 'scipy', 'numpy'}) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


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
