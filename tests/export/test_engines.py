"""What is written for each engine, and the rules that are promised."""

import json
import shlex
import subprocess
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider.export.engines import ENGINES, RULES, Handover
from outrider.options import Sampling
from pairs import embedded, embedded_tokenizer, zoo

PAIR = Handover("target", "draft", 3, Sampling(temperature=0.7, top_k=40, top_p=0.9), "", 512)

# By nobody's wish does any of these become part of what is written.
LOSSY = (
    "threshold_single",
    "threshold_acc",
    "fly",
    "synthetic",
    "synth",
    "ensemble",
    "typical",
    "relaxed",
    "posterior",
)


def _written(name: str) -> list[tuple[str, Handover, dict[str, str]]]:
    engine = ENGINES[name]
    handovers = [replace(PAIR, setting=setting) for setting in engine.rules]
    handovers.append(replace(handovers[0], sampling=Sampling(temperature=0.0)))
    for kind, heads in engine.heads.items():
        handovers += [replace(PAIR, setting=setting, head=kind) for setting in heads.rules]
    return [(name, handover, engine.files(handover)) for handover in handovers]


ALL = [item for name in ENGINES for item in _written(name)]


@pytest.mark.parametrize(("name", "handover", "files"), ALL, ids=[f"{name} {i}" for i, (name, *_) in enumerate(ALL)])
def test_every_file_is_well_formed_and_lossless(name: str, handover: Handover, files: dict[str, str]) -> None:
    for file, text in files.items():
        assert text.endswith("\n") and not any(word in text for word in LOSSY)
        if file.endswith(".json"):
            json.loads(text)
        elif file.endswith(".py"):
            compile(text, file, "exec")
        elif file.endswith(".sh"):
            done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
    together = "\n".join(files.values())
    num_stated = handover.k + (name == "sglang" and handover.head == "dflash")  # slots, the last token's included
    assert "draft" in together and str(num_stated) in together


def _words(script: str) -> list[str]:
    [line] = [
        line for line in script.replace("\\\n", "").splitlines() if line and line.split()[0] not in ("set", "cd")
    ][1:]
    return shlex.split(line)


def _values(words: list[str]) -> dict[str, str]:
    """Option -> value."""
    return {a: b for a, b in zip(words, words[1:], strict=False) if a.startswith("-") and len(a) > 2}


def test_vllm() -> None:
    files = ENGINES["vllm"].files(replace(PAIR, setting="probabilistic"))
    words = _words(files["serve.sh"])
    assert words[:3] == ["vllm", "serve", "target"] and _values(words)["--max-model-len"] == "512"
    assert _values(words)["--speculative-config"] == "$(cat speculative.json)"
    assert json.loads(files["speculative.json"]) == {
        "method": "draft_model",
        "model": "draft",
        "num_speculative_tokens": 3,
        "draft_sample_method": "probabilistic",
        "rejection_sample_method": "standard",
    }
    assert json.loads(files["request.json"])["top_k"] == 40
    plain = ENGINES["vllm"].files(replace(PAIR, setting="greedy", sampling=Sampling()))
    assert json.loads(plain["request.json"])["top_k"] == -1
    for kind in ("eagle3", "dflash"):
        config = json.loads(ENGINES["vllm"].files(replace(PAIR, setting="greedy", head=kind))["speculative.json"])
        assert (config["method"], config["draft_sample_method"]) == (kind, "greedy")


def test_sglang() -> None:
    """It counts the last token; it samples drafts from an EAGLE-3 head if told so; a DFlash head has no steps."""

    def values(**more: object) -> dict[str, str]:
        return _values(_words(ENGINES["sglang"].files(replace(PAIR, **more))["serve.sh"]))

    model, eagle3, dflash = values(), values(head="eagle3", setting="rejection"), values(head="dflash")
    algorithms = [one["--speculative-algorithm"] for one in (model, eagle3, dflash)]
    assert algorithms == ["STANDALONE", "EAGLE3", "DFLASH"]
    for one in (model, eagle3):
        assert one["--speculative-num-steps"] == "3" and one["--speculative-eagle-topk"] == "1"
    assert {one["--speculative-num-draft-tokens"] for one in (model, eagle3, dflash)} == {"4"}
    assert "--speculative-num-steps" not in dflash
    for setting in ("rejection", "greedy"):
        words = _words(ENGINES["sglang"].files(replace(PAIR, head="eagle3", setting=setting))["serve.sh"])
        assert ("--speculative-use-rejection-sampling" in words) == (setting == "rejection")


def test_llama_cpp_samples_like_the_others() -> None:
    handover = replace(PAIR, setting="probabilistic", sampling=replace(PAIR.sampling, repetition_penalty=1.25))
    values = _values(_words(ENGINES["llama.cpp"].files(handover)["serve.sh"]))
    assert values["--spec-draft-n-max"] == "3" and values["--spec-draft-sampling"] == "probabilistic"
    assert values["--samplers"] == "penalties;temperature;top_k;top_p;min_p"
    names = ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--repeat-last-n")
    assert [values[name] for name in names] == ["0.7", "40", "0.9", "0", "1.25", "512"]
    head = ENGINES["llama.cpp"].files(replace(handover, head="eagle3"))
    assert _values(_words(head["serve.sh"]))["--spec-type"] == "draft-eagle3"


def test_transformers_generates_with_these_options() -> None:
    """The assistant drafts K tokens a round; greedy tokens are those of plain decoding, here and there."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    handover = replace(PAIR, sampling=Sampling(temperature=0.0))
    program = ENGINES["transformers"].files(handover)["generate.py"]
    found: dict[str, Any] = {}
    exec(program[program.index("drafting =") : program.index("draft.generation_config")], found)
    exec(program[program.index("options =") : program.index("inputs =")], found)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(zoo(name), dtype=torch.float32) for name in ("fable", "fable-draft")
    )
    draft.generation_config.update(**found["drafting"])
    widths = []
    target.register_forward_pre_hook(lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True)
    inputs = embedded_tokenizer()("Once upon a time", return_tensors="pt")
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    target.generation_config = GenerationConfig(pad_token_id=0)
    output = target.generate(**given, assistant_model=draft, max_new_tokens=24, **found["options"])
    assert max(widths[1:]) == handover.k + 1 and len(widths) < 24
    [want] = embedded().plain().generate("Once upon a time", max_new_tokens=24, temperature=0.0, ignore_eos=True)
    assert output[0, inputs.input_ids.shape[1] :].tolist() == list(want.token_ids)


def test_rules_are_known() -> None:
    settings = {name: list(engine.rules.values()) for name, engine in ENGINES.items()}
    assert settings["sglang"] == ["greedy"] and settings["transformers"] == ["ratio"]
    for engine in ENGINES.values():
        assert {rule for one in (engine, *engine.heads.values()) for rule in one.rules.values()} <= RULES.keys()
