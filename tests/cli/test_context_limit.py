"""``-n`` beyond the context, in every command that has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider
from outrider.cli.shared.context_limit import report_num_limited
from outrider.errors import UsageError

_WORK = {  # of each command, where it begins
    "certify": "outrider.certify.run.run_pilot",
    "plan": "outrider.cli.commands.plan.own_text",
    "latency": "outrider.bench.run.warm_up",
    "compare": "outrider.bench.run.warm_up",
}


def told(outrider: Outrider, monkeypatch: pytest.MonkeyPatch, command: str, *arguments: object) -> Sequence[str]:
    """The lines on standard error before the work, which does not begin."""

    def end(*_: Any, **__: Any) -> None:
        raise UsageError("the work begins")

    monkeypatch.setattr(_WORK[command], end)
    *lines, last = outrider(command, *arguments).err.splitlines()
    assert last == "error: the work begins"
    return lines


@pytest.mark.parametrize("command", _WORK)
def test_a_limit_beyond_the_context_is_told(
    command: str, outrider: Outrider, monkeypatch: pytest.MonkeyPatch, prompts: Path
) -> None:
    arguments: tuple[object, ...] = "--prompts", prompts
    longest = 5
    if command == "latency":
        arguments, longest = ("--execution", "eager"), 22
    elif command == "compare":
        arguments, longest = ("The king",), 2
    (line,) = told(outrider, monkeypatch, command, *arguments, "-n", 1024 - longest + 1)
    assert line == (
        f"-n {1024 - longest + 1} exceeds the context of fable, 1024 tokens: with {longest} in the "
        f"{'prompt' if command == 'compare' else 'longest prompt'}, at most {1024 - longest} are generated"
    )
    assert not told(outrider, monkeypatch, command, *arguments, "-n", 1024 - longest)


def test_prompts_of_a_file_with_limits_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    for num_cut in range(3):
        report_num_limited("fable", num_cut)
    begin, end = "-n exceeds the context of fable for ", ": generation stops there\n"
    assert capsys.readouterr().err == f"{begin}1 prompt{end}{begin}2 prompts{end}"
