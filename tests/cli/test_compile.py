"""``outrider compile``."""

from pathlib import Path

import pytest

from commands import Outrider, only_document
from compile_services import OnCall, Refuses
from outrider.compile import service as service_module


class AtOnce(OnCall):
    """Every program is there at once."""

    def order(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
        made = super().order(*arguments, **options)  # type: ignore[arg-type]
        self.deliver()
        return made


def test_the_document(outrider: Outrider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two views of the cache, each with a verify for a row's end, a verify of the drafts, and the drafts."""
    monkeypatch.setattr(service_module, "CompileService", AtOnce)
    done = outrider("compile", "-k", "2", "--context", "256", "--json", "-")
    assert done.code == 0 and "6 programs in " in done.err
    document = only_document(done.out, "compile")
    steps = sorted(program["step"] for program in document["programs"])
    assert steps == ["draft_steps of fable-draft"] * 2 + ["verify_step of fable"] * 4


def test_what_cannot_be_compiled(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(service_module, "Process", Refuses)
    for arguments in (["compile", "--draft", "none"], ["generate", "The king", "--compile", "--seed", "1"]):
        done = outrider(*arguments)
        assert (
            done.code == 2 and "cannot be compiled here: RuntimeError: no compiler at all" in done.err.splitlines()[-1]
        )
    assert "--context = 3 is invalid" in outrider("compile", "--context", "3").error


@pytest.mark.slow  # compiles a program
def test_a_machine_that_was_prepared(outrider: Outrider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert outrider("compile", "--draft", "none", "--context", "64").code == 0
    assert len(list((tmp_path / "outrider" / "programs").glob("*.pt2"))) == 1
    arguments = ["generate", "The king", "--draft", "none", "-n", "24", "--compile", "--seed", "1"]
    done = outrider(*arguments)
    assert done.code == 0 and "compiling" not in done.err
    assert outrider(*arguments).out == done.out
