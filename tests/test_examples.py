"""Examples and notebooks run with the embedded pair, or are skipped without their packages (.ci/examples)."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = {
    "choose_and_train_a_draft": "my-draft",
    "how_much_faster": "predicted speed-up",
    "prove_it": "seed 2:",
    "watch_a_round": "tau = ",
}
GRADIO = "import gradio_demo as g; *_, last = g.story('Once', 0.7, 1); print(last, len(g.demo.input_components))"


def run(*arguments: str, python: str = sys.executable) -> str:
    environment = os.environ | {"GRADIO_ANALYTICS_ENABLED": "False"}
    command = [python, *arguments]
    done = subprocess.run(command, cwd=EXAMPLES, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_file_is_listed_and_short() -> None:
    """In the README; each is read in two minutes."""
    listed = re.findall(r"\]\((\S+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    files = [path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")]
    assert sorted(name for name in listed if not name.startswith("..")) == sorted(files)
    assert max(len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) for name in files) <= 90


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a script of cells, of which each begins with a marker."""
    path = EXAMPLES / "notebooks" / f"{name}.py"
    assert path.read_text(encoding="utf-8").count("\n# %%") > 3
    runpy.run_path(str(path), run_name="__main__")
    assert NOTEBOOKS[name] in capsys.readouterr().out


def test_in_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, which has imported what it needs."""
    monkeypatch.setattr(sys, "argv", ["in_transformers.py"])
    runpy.run_path(str(EXAMPLES / "in_transformers.py"), run_name="__main__")
    assert "equal to plain generate: True" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("modules", "arguments", "expected"),
    [
        ("ray pandas", ["ray_data_batches.py"], r"(?s)(tokens per round.*){4}"),
        ("gradio", ["-c", GRADIO], r"(?s)'accepted'.*tokens per round'\) 3\n$"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_example_scripts_run(modules: str, arguments: list[str], expected: str) -> None:
    for module in modules.split():
        if find_spec(module) is None:
            pytest.skip(f"not installed: {module} (see .ci/examples)")
    assert re.search(expected, run(*arguments))


def test_fastapi_and_the_plugin_of_llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if find_spec("fastapi") and find_spec("httpx"):
        from fastapi.testclient import TestClient

        monkeypatch.syspath_prepend(str(EXAMPLES))
        from fastapi_stories import app

        with TestClient(app) as client:
            asked = {"begin": "Once", "seed": 1, "max_new_tokens": 8}
            first, again = (client.get("/story", params=asked) for _ in "12")
            assert first.status_code == 200 and first.text == again.text != ""
            refused = client.get("/story", params=asked | {"max_new_tokens": -1})
            assert refused.status_code == 400 and "max_new_tokens" in refused.text
    if find_spec("llm"):
        monkeypatch.syspath_prepend(str(EXAMPLES / "llm-outrider"))
        monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
        import llm_outrider

        found: list[llm_outrider.Outrider] = []
        llm_outrider.register_models(found.append)
        texts = {found[0].prompt("Once upon a time", max_new_tokens=8, seed=1).text() for _ in "12"}
        assert len(texts) == 1 and texts != {""}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "outrider", "serve", "--port", "0", "-k", "2"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        yield next(found[1] for line in server.stderr if (found := re.search(r"ready: (http://\S+/v1)", line)))
    finally:
        server.terminate()
        server.communicate()


@pytest.mark.parametrize(("name", "module"), [("langchain", "langchain_openai"), ("litellm", "litellm")])
def test_clients_of_the_server(name: str, module: str, request: pytest.FixtureRequest) -> None:
    """Each from the environment that has it: they want other versions of the same packages."""
    pytest.importorskip("starlette")
    for python in (sys.executable, *filter(None, os.environ.get("CLIENTS", "").split(os.pathsep))):
        if subprocess.run([python, "-c", f"import {module}"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip(f"not installed: {module} (see .ci/examples)")
    assert run(f"{name}_stories.py", request.getfixturevalue("url"), python=python).strip()
