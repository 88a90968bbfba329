"""Which execution runs a model, and how it is chosen: in Python, on the command line, in a file of names."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outrider
from outrider.errors import OptionError
from outrider.models.executions import choose_execution
from outrider.models.registry import resolve
from toys import as_lm, tiny_llama


@pytest.mark.parametrize(("name", "want"), [("auto", "eager"), ("native", "native")])
def test_a_model_in_memory(name: str, want: str) -> None:
    """It may be changed later, so it runs in its own code unless asked for."""
    decoder = outrider.load(tiny_llama().float(), "ngram", execution=name)
    lm = decoder.target
    assert lm.execution.name == want and (lm.native is None) == (want == "eager")
    promise = {"native": "promised", "eager": "not promised (eager)"}[want]
    sampled = replace(decoder, acceptance="gumbel")
    assert lm.execution.same_bytes == decoder.same_bytes(0.0) == sampled.same_bytes(1.0) == promise
    assert decoder.same_bytes(1.0) == "not promised (block)" and decoder.plain().same_bytes(1.0) == promise


def test_a_model_from_files_runs_natively(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the native engine knows its configuration and gives its logits; else the log says why it does not."""
    source, folder = resolve("fable-draft").path, tmp_path / "known"
    assert source is not None
    shutil.copytree(source, folder)
    assert outrider.load(folder).target.execution.name == "native"
    assert outrider.load(folder, execution="eager").target.execution.name == "eager"
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_act"', '"attention_chunk_size": 3, "hidden_act"'))
    with caplog.at_level("INFO"):
        assert outrider.load(folder).target.execution.name == "eager"
    assert "runs eagerly: its plan does not know attention_chunk_size=3" in caplog.text
    with pytest.raises(
        OptionError, match="execution = 'native' is invalid: .* its plan does not know attention_chunk_size=3"
    ):
        outrider.load(folder, execution="native")


def test_executions_that_are_not_there() -> None:
    for name, reason in (
        ("captured", "CUDA graphs need a CUDA device, and .* is on cpu"),
        ("compiled", "choose one of auto, eager, native, captured"),
    ):
        with pytest.raises(OptionError, match=f"execution = '{name}' is invalid: {reason}"):
            outrider.load(tiny_llama(), execution=name)


def test_on_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this can be told without one. A model of several processes is not captured."""
    lm = as_lm(tiny_llama())
    assert not lm.has_states  # found while it can run
    monkeypatch.setattr(lm, "device", torch.device("cuda"))
    monkeypatch.setattr("outrider.models.executions.probe", lambda lm: None)
    found = {name: choose_execution(lm, name).execution.name for name in ("auto", "eager", "captured")}
    assert found == {"auto": "captured", "eager": "eager", "captured": "captured"}
    lm.num_shares = 2
    assert choose_execution(lm, "auto").execution.name == "eager"
    with pytest.raises(OptionError, match="is shared by 2 processes: leave it out"):
        choose_execution(lm, "captured")
