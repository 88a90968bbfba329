"""Sampling defaults that a checkpoint states."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outrider
from gguf_models import CASES, write_case
from outrider.errors import FileError, OptionError
from outrider.models.registry import ModelSpec, resolve
from outrider.models.sampling_defaults import sampling_defaults, stated_sampling
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
    """And differs from our own defaults. Transformers would add others."""
    assert sampling_defaults(spec_of(tmp_path, STATED)) == TAKEN
    assert sampling_defaults(spec_of(tmp_path, STATED), "none") == {}
    assert sampling_defaults(spec_of(tmp_path, {"temperature": None, "do_sample": True})) == {}
    assert sampling_defaults(resolve("fable")) == embedded().sampling_defaults == {}


def test_what_a_gguf_file_states(tmp_path: Path) -> None:
    """In float32, under llama.cpp's names. A file that is not there states nothing here."""
    stated = {"temp": 0.7, "top_p": 0.95, "top_k": 20, "penalty_repeat": 1.0}
    keys = {f"general.sampling.{name}": value for name, value in stated.items()}
    spec = resolve(str(write_case(tmp_path / "model.gguf", CASES["llama"], keys=keys)))
    assert sampling_defaults(spec) == {"temperature": 0.7, "top_p": 0.95, "top_k": 20}
    assert stated_sampling(spec).keys() == {"temperature", "top_p", "top_k", "repetition_penalty"}
    assert sampling_defaults(replace(spec_of(tmp_path, STATED), gguf="x.gguf")) == {}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"temperature": -1}, "temperature = -1 is invalid: .*; --generation-config none does without it"),
        ({"top_k": "many"}, "top_k = 'many' is invalid"),
        ([1], "generation_config.json: .*has no attribute"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(FileError, match=message):
        sampling_defaults(spec_of(tmp_path, document))


def test_the_library_takes_them_where_nothing_else_is_said(tmp_path: Path) -> None:
    folder = stating(tmp_path / "fable", STATED)
    decoder = outrider.load(folder, dtype="float32", device="cpu")
    assert decoder.sampling_defaults == TAKEN
    plain, prompts = embedded().plain(), ["Once upon a time", "The king"]

    def said(decoder: Any, *arguments: Any, **options: Any) -> list[tuple[int, ...]]:
        done = decoder.generate(prompts, *arguments, **OPTIONS | options)
        return [one.token_ids for one in done]

    assert said(decoder) == said(plain, **TAKEN) != said(plain)
    assert [one.token_ids for _, one in sorted(decoder.complete(prompts, **OPTIONS))] == said(decoder)
    chunks = decoder.stream(prompts[0], **OPTIONS)
    assert tuple(i for chunk in chunks for i in chunk.token_ids) == said(decoder)[0]
    assert said(decoder, temperature=1.5) == said(plain, temperature=1.5, top_k=9)
    assert said(decoder, Sampling()) == said(plain)
    assert said(outrider.load(folder, dtype="float32", device="cpu", generation_config="none")) == said(plain)
    assert decoder.request([5], {"top_k": 0}).request.sampling.top_k == 0
    assert decoder.request([5], {}).request.sampling.temperature == 0.4
    assert fingerprint_of(decoder) != fingerprint_of(replace(decoder, sampling_defaults={}))
    with pytest.raises(OptionError, match="generation_config = 'vllm' is invalid"):
        outrider.load(folder, generation_config="vllm")
