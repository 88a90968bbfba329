"""What is written for each engine, and the laws that are promised."""

import json
import shlex
import subprocess
from dataclasses import replace

import pytest
import torch

from outrider.export.engine_files import Handover, transformers_options, vllm_config
from outrider.export.engine_rules import (
    GREEDY,
    RATIO,
    RATIO_OF_TEN,
    Outlook,
    by_draft_cost,
    by_measured_costs,
)
from outrider.export.engines import ENGINES
from outrider.options import Sampling
from outrider.records import Stats
from outrider.replay.plan import Costs, RoundCost, Setting
from outrider.replay.replay import ExpectedRounds
from outrider.stats.counts import tau_interval
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
    handovers.append(replace(handovers[0], sampling=Sampling(temperature=0.0), k_by_rows=((1, 5), (4, 2), (8, 0))))
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


def test_the_table_of_vllm_is_what_it_takes() -> None:
    """Ranges from 1 on, in order, without an overlap; the last one is carried on; no K above the general one."""
    config = vllm_config(replace(PAIR, k=2, setting="greedy", k_by_rows=((1, 5), (2, 4), (4, 2), (8, 0))))
    table = config["num_speculative_tokens_per_batch_size"]
    assert table == [[1, 1, 5], [2, 3, 4], [4, 7, 2], [8, 8, 0]]
    assert config["num_speculative_tokens"] == 5


def test_sglang_counts_the_last_token() -> None:
    values = _values(_words(ENGINES["sglang"].files(PAIR)["serve.sh"]))
    assert values["--speculative-num-steps"] == "3" and values["--speculative-num-draft-tokens"] == "4"
    assert values["--speculative-algorithm"] == "STANDALONE" and values["--speculative-eagle-topk"] == "1"


def test_heads() -> None:
    """The option of each engine for them; SGLang samples drafts from an EAGLE-3 head if told so."""
    head = replace(PAIR, head="eagle3")
    vllm = vllm_config(replace(head, setting="probabilistic"))
    assert (vllm["method"], vllm["draft_sample_method"]) == ("eagle3", "probabilistic")
    for setting in ("rejection", "greedy"):
        words = _words(ENGINES["sglang"].files(replace(head, setting=setting))["serve.sh"])
        assert _values(words)["--speculative-algorithm"] == "EAGLE3"
        assert ("--speculative-use-rejection-sampling" in words) == (setting == "rejection")
    values = _values(_words(ENGINES["llama.cpp"].files(replace(head, setting="greedy"))["serve.sh"]))
    assert values["--spec-type"] == "draft-eagle3"
    block = replace(PAIR, head="dflash")
    assert vllm_config(block)["method"] == "dflash"
    values = _values(_words(ENGINES["sglang"].files(block)["serve.sh"]))
    assert values["--speculative-algorithm"] == "DFLASH" and values["--speculative-num-draft-tokens"] == "4"
    assert "--speculative-num-steps" not in values


def test_llama_cpp_samples_like_the_others() -> None:
    handover = replace(PAIR, setting="probabilistic", sampling=replace(PAIR.sampling, repetition_penalty=1.25))
    values = _values(_words(ENGINES["llama.cpp"].files(handover)["serve.sh"]))
    assert values["--spec-draft-n-max"] == "3" and values["--spec-draft-sampling"] == "probabilistic"
    assert values["--samplers"] == "penalties;temperature;top_k;top_p;min_p"
    names = ("--temp", "--top-k", "--top-p", "--min-p", "--repeat-penalty", "--repeat-last-n")
    assert [values[name] for name in names] == ["0.7", "40", "0.9", "0", "1.25", "512"]


def test_transformers_generates_with_these_options() -> None:
    """The assistant drafts K tokens a round; greedy tokens are those of plain decoding, here and there."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    handover = replace(PAIR, sampling=Sampling(temperature=0.0))
    options, drafting = transformers_options(handover)
    target, draft = (
        AutoModelForCausalLM.from_pretrained(zoo(name), dtype=torch.float32) for name in ("fable", "fable-draft")
    )
    draft.generation_config.update(**drafting)
    widths = []
    target.register_forward_pre_hook(lambda _, __, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True)
    inputs = embedded_tokenizer()("Once upon a time", return_tensors="pt")
    given = {"input_ids": inputs.input_ids, "attention_mask": inputs.attention_mask}
    target.generation_config = GenerationConfig(pad_token_id=0)
    output = target.generate(**given, assistant_model=draft, max_new_tokens=24, **options)
    assert max(widths[1:]) == handover.k + 1 and len(widths) < 24
    [want] = embedded().plain().generate("Once upon a time", max_new_tokens=24, temperature=0.0, ignore_eos=True)
    assert output[0, inputs.input_ids.shape[1] :].tolist() == list(want.token_ids)


def test_how_engines_draft() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.8)
    by_temperature = ENGINES["vllm"].rules["probabilistic"]
    assert by_temperature.draft_sampling(sampling) == Sampling(temperature=0.5)
    assert RATIO_OF_TEN.draft_sampling(sampling) == Sampling(temperature=0.5, top_k=10)
    assert RATIO.draft_sampling(sampling) == sampling
    names = {name: [rule.name for rule in engine.rules.values()] for name, engine in ENGINES.items()}
    assert names["sglang"] == [GREEDY.name] and names["transformers"] == [RATIO.name]


def _expected(*accepted: int) -> ExpectedRounds:
    counts = Stats(10, (0.0,) * accepted[0] + (10.0,), (0.0,) * 8 + (10.0,))
    return ExpectedRounds(8, (counts, counts), tau_interval([counts, counts]))


def test_the_best_k_by_the_cost_of_a_draft_step() -> None:
    """tau = 2, 3, 3 at K = 1, 2, 3."""
    expected = {1: _expected(1), 2: _expected(2), 3: _expected(2)}
    outlook = by_draft_cost(expected, 0.25)
    assert outlook.speed_up == pytest.approx({1: 2 / 1.25, 2: 3 / 1.5, 3: 3 / 1.75}) and outlook.best_k == 2
    assert outlook.merit(None) == pytest.approx(2.0) and outlook.merit(3) == pytest.approx(3 / 1.75)
    unknown = by_draft_cost(expected, None)
    assert unknown.best_k is None and unknown.merit(1) == pytest.approx(2.0)
    assert by_draft_cost(expected, 0.0).best_k == 2  # the least K among equals
    at_once = by_draft_cost(expected, 0.25, is_at_once=True)  # as blocks of tokens are
    assert at_once.speed_up == pytest.approx({1: 2 / 1.25, 2: 3 / 1.25, 3: 3 / 1.25})


def test_the_best_k_by_measured_costs() -> None:
    """For one text a round costs little more than a plain one, for eight as much as it commits."""

    def costs(num_rows: int, round_s: float) -> Costs:
        rounds = {("draft", k): RoundCost(round_s * (k + 1), 0.001, 0.01) for k in (1, 2)}
        return Costs(Setting(num_rows, 64), 0.1, RoundCost(0.010, 0.0, 0.009), rounds)

    counts = {
        k: ExpectedRounds(k, (one, one), tau_interval([one, one]))
        for k, one in {
            1: Stats(10, (0.0, 5.0), (0.0, 5.0)),
            2: Stats(10, (0.0, 5.0, 0.0), (0.0, 0.0, 5.0)),
        }.items()
    }
    outlook = by_measured_costs(counts, [costs(1, 0.006), costs(8, 0.012)])
    assert isinstance(outlook, Outlook) and outlook.k_by_rows == [(1, 1), (8, 0)]
    assert outlook.best_k == 1 and outlook.speed_up[1] == pytest.approx(0.020 / 0.012)
