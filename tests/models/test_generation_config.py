"""Sampling defaults that a checkpoint states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from gguf_models import CASES, write_case
from outrider.errors import FileError
from outrider.models.registry import ModelSpec, resolve
from outrider.models.sampling_defaults import StatedSampling, stated_sampling
from outrider.options import Sampling
from outrider.serve.about import fingerprint_of
from pairs import embedded, stating

STATED = {"temperature": 0.4, "top_k": 9, "top_p": 1.0, "eos_token_id": 0, "do_sample": False, "max_new_tokens": 3}
TAKEN = {"temperature": 0.4, "top_k": 9}
OPTIONS: dict[str, Any] = {"seed": 1, "max_new_tokens": 6}


def spec_of(path: Path, document: Any) -> ModelSpec:
    (path / "generation_config.json").write_text(json.dumps(document))
    return ModelSpec("toy", path=path)


def test_only_what_the_file_states_counts(tmp_path: Path) -> None:
    assert stated_sampling(spec_of(tmp_path, STATED)).defaults == TAKEN
    assert stated_sampling(spec_of(tmp_path, STATED), "none") == StatedSampling()
    assert stated_sampling(spec_of(tmp_path, {"temperature": None, "do_sample": True})) == StatedSampling()
    assert stated_sampling(resolve("fable")).defaults == embedded().sampling_defaults == {}
    for document, message in (
        ({"temperature": -1}, "temperature = -1 is invalid: .*; --generation-config none does without it"),
        ({"top_k": "many"}, "top_k = 'many' is invalid"),
    ):
        with pytest.raises(FileError, match=message):
            stated_sampling(spec_of(tmp_path, document))


def test_what_a_gguf_file_states(tmp_path: Path) -> None:
    def stated_in(name: str, **stated: Any) -> StatedSampling:
        keys = {f"general.sampling.{key}": value for key, value in stated.items()}
        return stated_sampling(resolve(str(write_case(tmp_path / name, CASES["llama"], keys=keys))))

    found = stated_in("model.gguf", temp=0.7, top_p=0.95, top_k=20, penalty_repeat=1.0)
    assert found.defaults == {"temperature": 0.7, "top_p": 0.95, "top_k": 20} and not found.others
    assert found.options.keys() == {"temperature", "top_p", "top_k", "repetition_penalty"}
    assert stated_in("greedy.gguf", temp=-1.0).options == {"temperature": 0.0}
    others = stated_in("others.gguf", temp=0.7, xtc_probability=0.5, mirostat=2, penalty_last_n=64, penalty_repeat=1.5)
    assert others.text("others.gguf", others.defaults) == (
        "sampling as others.gguf states: temperature 0.7, repetition-penalty 1.5; "
        "not honoured: mirostat, penalty_last_n, xtc_probability (--generation-config none does without)"
    )
    assert stated_in("off.gguf", mirostat=0, xtc_probability=0.0, penalty_last_n=64) == StatedSampling()
    with pytest.raises(FileError, match="temperature = .* is invalid"):
        stated_in("wrong.gguf", temp=float("nan"))


def test_the_library_takes_them_where_nothing_else_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = stating(tmp_path / "fable", STATED)
    with caplog.at_level("INFO", "outrider.sampling"):  # which the server shows
        decoder = outrider.load(folder, dtype="float32", device="cpu")
    assert decoder.sampling_defaults == TAKEN and "states: temperature 0.4, top-k 9 (" in caplog.text
    plain, prompts = embedded().plain(), ["Once upon a time", "The king"]

    def said(decoder: Any, *arguments: Any, **options: Any) -> list[tuple[int, ...]]:
        done = decoder.generate(prompts, *arguments, **OPTIONS | options)
        return [one.token_ids for one in done]

    assert said(decoder) == said(plain, **TAKEN) != said(plain)
    assert said(decoder, temperature=1.5) == said(plain, temperature=1.5, top_k=9)
    assert said(decoder, Sampling()) == said(plain)
    assert said(outrider.load(folder, dtype="float32", device="cpu", generation_config="none")) == said(plain)
    assert fingerprint_of(decoder) != fingerprint_of(replace(decoder, sampling_defaults={}))
