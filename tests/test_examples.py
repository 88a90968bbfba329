"""Examples and notebooks run with the embedded pair. Those whose packages are not installed are skipped; .ci/examples
installs them."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted((EXAMPLES / "notebooks").glob("*.py"))


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (see .ci/examples)")


def run(name: str, *arguments: str, python: str = sys.executable, **environment: str) -> str:
    """Standard output of an example in a process of its own."""
    command = [python, str(EXAMPLES / name), *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_file_is_listed_and_short() -> None:
    """In the README; each is read in two minutes."""
    listed = re.findall(r"\]\((\S+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    files = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")]
    assert sorted(name for name in listed if not name.startswith("..")) == sorted(files)
    assert max(len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) for name in files) <= 90


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a script, and as a list of cells: each begins with a marker, prose is commented."""
    cells = re.split(r"^# %%", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cells[0] == "" and len(cells) > 4
    for cell in cells[1:]:
        kind, _, body = cell.partition("\n")
        assert kind in ("", " [markdown]")
        assert kind == "" or all(line.startswith("#") for line in body.strip().splitlines())
    runpy.run_path(str(path), run_name="__main__")
    expected = {
        "choose_and_train_a_draft": "my-draft",
        "how_much_faster": "predicted speed-up",
        "prove_it": "seed 2:",
        "watch_a_round": "tau = ",
    }
    assert expected[path.stem] in capsys.readouterr().out


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Standard output of an example in this process, which has imported what it needs."""

    def run_here(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [name])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def test_in_transformers(here: Callable[[str], str]) -> None:
    assert "equal to plain generate: True" in here("in_transformers.py")


@needs("fastapi", "httpx")
def test_fastapi(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi.testclient import TestClient

    monkeypatch.syspath_prepend(str(EXAMPLES))
    from fastapi_stories import app

    with TestClient(app) as client:
        first, again = (client.get("/story", params={"begin": "Once", "seed": 1, "max_new_tokens": 8}) for _ in "12")
        assert first.status_code == 200 and first.text == again.text != ""
        refused = client.get("/story", params={"begin": "Once", "max_new_tokens": -1})
        assert refused.status_code == 400 and "max_new_tokens" in refused.text


@needs("ray", "pandas")
def test_ray_data() -> None:
    assert run("ray_data_batches.py").count("tokens per round") == 4


@needs("gradio")
def test_gradio() -> None:
    """In a process of its own: Gradio leaves an event loop open."""
    code = "import gradio_demo as g; *_, last = g.story('Once', 0.7, 1); print(last, len(g.demo.input_components))"
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "'accepted'" in done.stdout, done.stderr
    assert done.stdout.endswith("tokens per round') 3\n")


@needs("llm")
def test_the_plugin_of_llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "llm-outrider"))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    import llm_outrider

    found: list[llm_outrider.Outrider] = []
    llm_outrider.register_models(found.append)
    first, again = (found[0].prompt("Once upon a time", max_new_tokens=8, seed=1).text() for _ in "12")
    assert first == again != ""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the embedded pair."""
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "-k", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        found = next((m[1] for line in server.stderr if (m := re.search(r"ready: (http://\S+/v1)", line))), None)
        assert found is not None
        yield found
    finally:
        server.terminate()
        server.communicate()


@pytest.mark.parametrize(
    ("name", "module"), [("langchain_stories.py", "langchain_openai"), ("litellm_stories.py", "litellm")]
)
def test_clients_of_the_server(name: str, module: str, request: pytest.FixtureRequest) -> None:
    """Each from the environment that has it: they want other versions of the same packages."""
    pytest.importorskip("starlette")
    for python in (sys.executable, *filter(None, os.environ.get("CLIENTS", "").split(os.pathsep))):
        found = subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False)
        if found.returncode == 0:
            break
    else:
        pytest.skip(f"not installed: {module} (see .ci/examples)")
    assert run(name, request.getfixturevalue("url"), python=python).strip()
