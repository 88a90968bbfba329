"""The types of the public names, as a caller's type checker sees them."""

import subprocess
import sys
from pathlib import Path

import pytest

import outrider

RIGHT = """
from typing import assert_type

import outrider

decoder = outrider.load("fable", "fable-draft", num_draft_tokens="auto", execution="eager")
assert_type(decoder, outrider.Decoder)
for chunk in decoder.stream("Once", temperature=0.5, seed=1, stop=["."]):
    assert_type(chunk.text, str)
(completion,) = decoder.generate(["The king"], outrider.Sampling(max_new_tokens=5), n=1, max_new_tokens=3)
assert_type(completion.stats.mean_acceptance_length, float | None)
assert_type(decoder.chat([{"role": "user", "content": "Hello"}], system="Be brief."), outrider.Completion)
for index, result in decoder.complete(["a", ("b", {"seed": 1})]):
    if not isinstance(result, outrider.OutriderError):
        assert_type(result, outrider.Completion)
with decoder.session(slots=2) as session:
    assert_type(session, outrider.Session)
"""
WRONG = {
    'decoder.stream("Once", temprature=0.5)\n': "temprature",
    'decoder.stream("Once", temperature="hot")\n': "arg-type",
    "outrider.load()\n": "call-arg",
    "outrider.lod\n": "attr-defined",
}


@pytest.mark.slow
def test_a_caller_under_strict_mypy(tmp_path: Path) -> None:
    """No complaint about right code, and one about each line of wrong code."""
    (tmp_path / "right.py").write_text(RIGHT)
    (tmp_path / "wrong.py").write_text('import outrider\n\ndecoder = outrider.load("fable")\n' + "".join(WRONG))
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\nfollow_imports = silent\n")
    source = Path(outrider.__file__).parents[1]
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "right.py", "wrong.py"]
    env = {} if source.name == "site-packages" else {"MYPYPATH": str(source)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    *errors, last = done.stdout.splitlines()
    assert "right.py" not in done.stdout and last.startswith(f"Found {len(WRONG)} errors"), done.stdout + done.stderr
    for place, named in enumerate(WRONG.values(), start=4):
        assert any(line.startswith(f"wrong.py:{place}:") and named in line for line in errors), done.stdout
