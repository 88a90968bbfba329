"""``-n`` beyond the context, in every command that has it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import Outrider
from outrider.cli.shared.context_limit import report_num_limited
from outrider.errors import UsageError

_WORK = {  # of each command: where it begins, the options, and the tokens of the longest prompt
    "generate": ("outrider.decoder.Decoder.stream", ("Once",), 1),
    "certify": ("outrider.certify.run.run_pilot", ("--prompts", "PROMPTS"), 5),
    "plan": ("outrider.cli.commands.plan.own_text", ("--prompts", "PROMPTS"), 5),
    "latency": ("outrider.bench.run.warm_up", (), 22),
    "compare": ("outrider.bench.run.warm_up", ("The king",), 2),
}


@pytest.mark.parametrize("command", _WORK)
def test_a_limit_beyond_the_context_is_told(
    command: str, outrider: Outrider, monkeypatch: pytest.MonkeyPatch, prompts: Path
) -> None:
    """Before the work, which does not begin here."""
    place, words, longest = _WORK[command]
    arguments = [prompts if word == "PROMPTS" else word for word in words]

    def told(max_new_tokens: int) -> Sequence[str]:
        *lines, last = outrider(command, *arguments, "-n", max_new_tokens).err.splitlines()
        assert last == "error: the work begins"
        return lines

    def end(*_: Any, **__: Any) -> None:
        raise UsageError("the work begins")

    monkeypatch.setattr(place, end)
    (line,) = told(1024 - longest + 1)
    prompt = "prompt" if command in ("generate", "compare") else "longest prompt"
    assert line == (
        f"-n {1024 - longest + 1} exceeds the context of fable, 1024 tokens: with {longest} in the {prompt}, at most "
        f"{1024 - longest} are generated"
    )
    assert not told(1024 - longest)


def test_prompts_of_a_file_with_limits_of_their_own(outrider: Outrider, tmp_path: Path, capsys: Any) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Once", "max_new_tokens": 9}\n{"prompt": "Once"}\n{"prompt": "A"}\n')
    ended = outrider("generate", "--prompts", prompts, "-n", 2000, "--stop", " ")
    assert ended.err.splitlines()[0] == "-n exceeds the context of fable for 2 prompts: generation stops there"
    for num_cut in (0, 1):
        report_num_limited("fable", num_cut)
    assert capsys.readouterr().err == "-n exceeds the context of fable for 1 prompt: generation stops there\n"
