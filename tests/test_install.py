"""What pages and messages say about installing works today: in a clone, with extras that exist."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.errors import INSTALL, MissingExtra

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"].keys()
FOLDERS = ("docs", "recipes", "examples", "deploy", "src", ".github")
FILES = [
    path
    for path in [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")))]
    if path.suffix in {".md", ".py", ".yml", ".yaml", ".html"} and path.name != "CHANGELOG.md"
]
WORKS_TODAY = {".", *(shlex.split(INSTALL.format(extra=extra))[-1] for extra in [*EXTRAS, "EXTRA"])}


def _installed(text: str) -> Iterator[str]:
    """What the lines ``pip install ...`` of a text install of Outrider: folders, or its name."""
    for line in re.findall(r"pip install ([^`\n\"#&|;]+)", text):
        for word in line.replace("'", " ").split():
            if re.match(r"\.($|\[)|outrider\b", word):
                yield word.rstrip(".,:") or "."


def test_lines_that_install_work_today() -> None:
    texts = [(path, path.read_text(encoding="utf-8")) for path in FILES]
    wrong = {(path, word) for path, text in texts for word in _installed(text) if word not in WORKS_TODAY}
    assert {one for one in wrong if "{" not in one[1]} == set()
    text = "`pip install 'outrider[serve]'`\n  pip install .\npip install -e '.[test]' && x\npip install six '.[no]'"
    assert [*_installed(text)] == ["outrider[serve]", ".", ".[test]", ".[no]"]
    assert {"outrider[serve]", ".[no]"}.isdisjoint(WORKS_TODAY)


def test_the_readme_has_two_commands() -> None:
    """The second is read by .ci/run."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    second = f"{INSTALL.format(extra='test')} && pytest"
    assert re.findall(r"^pip install .*$", readme, re.MULTILINE) == ["pip install . && outrider compare", second]
    (pattern,) = re.findall(r"sed -n '(.*)' README", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    done = subprocess.run(["sed", "-n", pattern, ROOT / "README.md"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{second}\n"


def test_messages_name_extras_that_exist() -> None:
    named = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MissingExtra":
                named += [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
    assert named and set(named) <= EXTRAS
    assert str(MissingExtra("ray", "ray", "this")) == "this needs ray: pip install '.[ray]' in a clone of Outrider"


def test_the_version_is_the_same_everywhere() -> None:
    for text in ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "CITATION.cff")):
        assert re.findall(r"^(?:## \[|version: )(\d+\.\d+\.\d+)", text, re.MULTILINE)[:1] == [PROJECT["version"]]


@pytest.mark.parametrize("module", ["outrider.kernels.build", "benchmarks.real_models"])
def test_what_runs_before_an_installation_needs_no_package(module: str) -> None:
    """The hook that compiles the kernels, and the script that fetches published files."""
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'src')]}; import {module}"
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env={})
