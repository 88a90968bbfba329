"""Engines that a pair can be exported to: acceptance rules, supported sampling options, and configuration files.

Facts were read in the sources of the versions named in ``ENGINES`` (docs/export.md cites the places). Settings that are
not lossless are never written: SGLang's thresholds below 1, vLLM's ``fly`` and ``synthetic``, an
``assistant_ensemble_weight``. Files are pure functions of a handover; nothing is loaded here.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.export.engine_rules import EQUALITY, GREEDY, RATIO, RATIO_BY_TEMPERATURE, RATIO_OF_TEN, EngineRule
from outrider.options import Sampling

# The most used text models that Outrider can load, in the registries of the versions below.
_FAMILIES = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Granite")
)
_LLAMA_CPP_PORT = 8080
_FILTERS = frozenset({"temperature", "top_k", "top_p"})


@dataclass(frozen=True, slots=True)
class Handover:
    """A pair and its options for an engine.

    Attributes:
        target, draft: folders beside the files, or hub ids.
        k: drafted tokens per round.
        setting: the engine's, a key of ``ServingEngine.rules``.
        context: maximum length of a sequence.
        k_by_rows: (rows, K), ascending: the best K from this number of running requests on; empty if not measured.
        is_head: the draft is an EAGLE-3 head.
    """

    target: str
    draft: str
    k: int
    sampling: Sampling
    setting: str
    context: int
    k_by_rows: Sequence[tuple[int, int]] = ()
    is_head: bool = False


@dataclass(frozen=True, slots=True)
class Heads:
    """EAGLE-3 heads in an engine, where they differ from draft models.

    Attributes:
        rules: see ``ServingEngine``.
        notes: for the README.
        layout: the only one that it reads: "specforge"; None if it reads all.
    """

    rules: Mapping[str, EngineRule]
    notes: tuple[str, ...] = ()
    layout: str | None = None


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """An inference engine.

    Attributes:
        name: display name.
        version: whose sources were read.
        rules: acceptance rules, by the engine's own setting; the key is "" if there is no choice.
        options: fields of ``Sampling`` that it supports exactly with a draft.
        families: architectures that it is known to serve; None if not looked up.
        vocab_gap: largest difference of the vocabulary sizes of a pair; None if not checked by the engine.
        files: returns name -> content.
        start: command that starts it, in the folder.
        port: default port of its server; None for a script.
        notes: for the README.
        is_exact_sampled: whether sampling with a draft is lossless.
        needs_gguf: needs GGUF files, target.gguf and draft.gguf.
        heads: None if it takes draft models only.
    """

    name: str
    version: str
    rules: Mapping[str, EngineRule]
    options: frozenset[str]
    families: frozenset[str] | None
    vocab_gap: int | None
    files: Callable[[Handover], dict[str, str]]
    start: str
    port: int | None = None
    notes: tuple[str, ...] = ()
    is_exact_sampled: bool = True
    needs_gguf: bool = False
    heads: Heads | None = None

    def with_heads(self) -> ServingEngine:
        """The engine with a head as draft."""
        assert self.heads is not None
        return replace(self, rules=self.heads.rules, notes=self.heads.notes)


def _script(*commands: Sequence[str]) -> str:
    """Shell script that runs commands in its own folder."""
    lines = [" \\\n  ".join(_groups(command)) for command in commands]
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', *lines, ""])


def _groups(words: Sequence[str]) -> list[str]:
    """Group the quoted words of a command: each option with its value."""
    groups = [words[0]]
    for word in words[1:]:
        quoted = word if word.startswith('"$(') else shlex.quote(word)
        is_option = word.startswith("-") and not word[1:].isdigit()
        if is_option:
            groups.append(quoted)
        else:
            groups[-1] += f" {quoted}"
    return groups


def _lines(values: Mapping[str, Any], show: Callable[[Any], str] = json.dumps) -> str:
    """Format an object with one entry per line."""
    entries = ",\n".join(f"  {show(key)}: {show(value)}" for key, value in values.items())
    return f"{{\n{entries}\n}}"


def _json(values: Mapping[str, Any]) -> str:
    return _lines(values) + "\n"


def _request(handover: Handover) -> dict[str, Any]:
    """Request body for ``/v1/completions`` with explicit sampling options: some engines take missing ones from the
    checkpoint."""
    sampling = handover.sampling
    body: dict[str, Any] = {"model": handover.target, "prompt": "Once upon a time", "max_tokens": 128}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    if sampling.repetition_penalty != 1:
        body["repetition_penalty"] = sampling.repetition_penalty
    for name in ("presence_penalty", "frequency_penalty"):
        if (value := getattr(sampling, name)) != 0:
            body[name] = value
    return body


def vllm_config(handover: Handover) -> dict[str, Any]:
    """``--speculative-config``; see ``SpeculativeConfig`` in vllm/config/speculative.py."""
    config: dict[str, Any] = {
        "method": "eagle3" if handover.is_head else "draft_model",
        "model": handover.draft,
        "num_speculative_tokens": handover.k,
        "draft_sample_method": handover.setting,
        "rejection_sample_method": "standard",
    }
    if handover.k_by_rows:
        # num_speculative_tokens must be the largest K of the table; the last entry applies to all larger batches.
        firsts = [rows for rows, _ in handover.k_by_rows]
        lasts = [first - 1 for first in firsts[1:]] + [firsts[-1]]
        ks = [k for _, k in handover.k_by_rows]
        table = [list(entry) for entry in zip(firsts, lasts, ks, strict=True)]
        config["num_speculative_tokens"] = max(handover.k, *ks)
        config["num_speculative_tokens_per_batch_size"] = table
    return config


def _vllm(handover: Handover) -> dict[str, str]:
    command = ["vllm", "serve", handover.target, "--max-model-len", str(handover.context)]
    command += ["--speculative-config", '"$(cat speculative.json)"']
    files = {"speculative.json": _json(vllm_config(handover)), "serve.sh": _script(command)}
    return files | {"request.json": _json(_request(handover))}


def _sglang(handover: Handover) -> dict[str, str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", handover.target]
    command += ["--context-length", str(handover.context)]
    algorithm = "EAGLE3" if handover.is_head else "STANDALONE"
    command += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", handover.draft]
    command += ["--speculative-num-steps", str(handover.k), "--speculative-eagle-topk", "1"]
    command += ["--speculative-num-draft-tokens", str(handover.k + 1)]  # counts the last token too
    if handover.setting == "rejection":
        command.append("--speculative-use-rejection-sampling")
    return {"serve.sh": _script(command), "request.json": _json(_request(handover))}


def _llama_cpp(handover: Handover) -> dict[str, str]:
    sampling = handover.sampling
    # Newer builds have another default port.
    command = ["llama-server", "--port", str(_LLAMA_CPP_PORT), "-m", "target.gguf", "-md", "draft.gguf"]
    command += ["--spec-type", "draft-eagle3" if handover.is_head else "draft-simple"]
    command += ["--spec-draft-n-max", str(handover.k), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0.0"]
    command += ["--spec-draft-sampling", handover.setting, "-c", str(handover.context)]
    # Filters after the temperature, as in Transformers; by default it comes last, with other filters enabled.
    command += ["--samplers", "penalties;temperature;top_k;top_p;min_p", "--temp", f"{sampling.temperature:g}"]
    command += ["--top-k", str(sampling.top_k), "--top-p", f"{sampling.top_p:g}", "--min-p", f"{sampling.min_p:g}"]
    # Over the whole sequence, as in Transformers.
    command += ["--repeat-penalty", f"{sampling.repetition_penalty:g}", "--repeat-last-n", str(handover.context)]
    body = {"prompt": "Once upon a time", "max_tokens": 128}
    return {"serve.sh": _script(command), "request.json": _json(body)}


def _tensorrt_llm(handover: Handover) -> dict[str, str]:
    lines = [
        f"max_seq_len: {handover.context}",
        "disable_overlap_scheduler: true",
        "speculative_config:",
        "  decoding_type: Draft_Target",
        f"  max_draft_len: {handover.k}",
        f"  speculative_model: {json.dumps(handover.draft)}",
    ]
    command = ["trtllm-serve", handover.target, "--config", "config.yaml"]
    files = {"config.yaml": "\n".join(lines) + "\n", "serve.sh": _script(command)}
    return files | {"request.json": _json(_request(handover))}


def _openvino(handover: Handover) -> dict[str, str]:
    convert = [
        ["optimum-cli", "export", "openvino", "--model", model, "--weight-format", "fp16", f"openvino-{name}"]
        for name, model in (("target", handover.target), ("draft", handover.draft))
    ]
    program = f"""\
import openvino_genai

draft = openvino_genai.draft_model("openvino-draft", "CPU")
pipeline = openvino_genai.LLMPipeline("openvino-target", "CPU", draft_model=draft)
config = openvino_genai.GenerationConfig()
config.max_new_tokens = 128
config.do_sample = False
config.num_assistant_tokens = {handover.k}
print(pipeline.generate("Once upon a time", config))
"""
    return {"convert.sh": _script(*convert), "generate.py": program}


def transformers_options(handover: Handover) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of ``generate``, and entries of the draft's ``generation_config``."""
    sampling = handover.sampling
    options: dict[str, Any] = {"do_sample": sampling.temperature > 0, "repetition_penalty": sampling.repetition_penalty}
    if sampling.temperature > 0:
        options |= {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
        if sampling.min_p > 0:
            options["min_p"] = sampling.min_p
    if sampling.logit_bias:
        options["sequence_bias"] = [[[token_id], float(bias)] for token_id, bias in sampling.logit_bias.items()]
    # By default a draft ends at low confidence.
    drafting = {"num_assistant_tokens": handover.k, "num_assistant_tokens_schedule": "constant"}
    return options, {**drafting, "assistant_confidence_threshold": 0.0}


def _transformers(handover: Handover) -> dict[str, str]:
    options, drafting = transformers_options(handover)
    program = f"""\
import os

from transformers import AutoModelForCausalLM, AutoTokenizer

os.chdir(os.path.dirname(os.path.abspath(__file__)))
tokenizer = AutoTokenizer.from_pretrained({handover.target!r})
target = AutoModelForCausalLM.from_pretrained({handover.target!r}, dtype="auto", device_map="auto")
draft = AutoModelForCausalLM.from_pretrained({handover.draft!r}, dtype="auto", device_map="auto")
drafting = {_lines(drafting, repr)}
draft.generation_config.update(**drafting)
options = {_lines(options, repr)}
inputs = tokenizer("Once upon a time", return_tensors="pt").to(target.device)
output = target.generate(
    input_ids=inputs.input_ids,
    attention_mask=inputs.attention_mask,
    assistant_model=draft,
    max_new_tokens=128,
    **options,
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""
    return {"generate.py": program}


def _mlx(handover: Handover) -> dict[str, str]:
    sampling = handover.sampling
    command = ["mlx_lm.generate", "--model", handover.target, "--draft-model", handover.draft]
    command += ["--num-draft-tokens", str(handover.k), "--temp", f"{sampling.temperature:g}"]
    command += ["--top-k", str(sampling.top_k), "--top-p", f"{sampling.top_p:g}", "--min-p", f"{sampling.min_p:g}"]
    command += ["--ignore-chat-template", "--max-tokens", "128", "--prompt", "Once upon a time"]
    return {"generate.sh": _script(command)}


_VLLM_NOTES = (
    "`draft_sample_method` is set, since its default is `greedy`, another acceptance rule.",
    "Requests with `min_p` or `logit_bias` are refused by vLLM while a draft is in use.",
)
_LLAMA_CPP_NOTES = (
    "`--spec-draft-sampling` is set, since its default is `greedy`, another acceptance rule. Builds without the option "
    "(such as that of llama-cpp-python 0.3.36) are greedy.",
    "Samplers are explicit: llama.cpp's own defaults are top-k 40, top-p 0.95, min-p 0.05.",
    "A request may override the server's sampling options.",
)
ENGINES = {
    "vllm": ServingEngine(
        name="vLLM",
        version="0.33.0",
        rules={"probabilistic": RATIO_BY_TEMPERATURE, "greedy": GREEDY},
        options=_FILTERS | {"repetition_penalty", "presence_penalty", "frequency_penalty"},
        families=_FAMILIES,
        vocab_gap=0,
        files=_vllm,
        start="sh serve.sh",
        port=8000,
        notes=_VLLM_NOTES,
        heads=Heads({"probabilistic": RATIO_BY_TEMPERATURE, "greedy": GREEDY}, _VLLM_NOTES),
    ),
    "sglang": ServingEngine(
        name="SGLang",
        version="0.5.23",
        rules={"": GREEDY},
        options=_FILTERS,
        families=_FAMILIES,
        vocab_gap=0,
        files=_sglang,
        start="sh serve.sh",
        port=30000,
        notes=(
            "Drafts are greedy: `--speculative-use-rejection-sampling` is refused for STANDALONE.",
            "On the CPU, on XPU and on ROCm a verify is greedy whatever the request's temperature is.",
            "With a draft, `min_p` is not applied, and penalties ignore the tokens of the same round: use neither.",
        ),
        heads=Heads(
            rules={"rejection": RATIO_BY_TEMPERATURE, "greedy": GREEDY},
            notes=(
                "Drafts are greedy by default, another acceptance rule; `--speculative-use-rejection-sampling` samples "
                "them.",
                "On the CPU and on XPU a verify is greedy whatever the request's temperature is.",
                "With a draft, `min_p` is not applied, and penalties ignore the tokens of the same round: use neither.",
                "SGLang counts the target's layers from their outputs, so that `eagle_aux_hidden_state_layer_ids` are "
                "one less than in other layouts.",
            ),
            layout="specforge",
        ),
    ),
    "llama.cpp": ServingEngine(
        name="llama.cpp",
        version="build 11549",
        rules={"probabilistic": RATIO_OF_TEN, "greedy": GREEDY},
        options=_FILTERS | {"min_p", "repetition_penalty"},
        families=_FAMILIES,
        vocab_gap=128,
        files=_llama_cpp,
        start="sh serve.sh",
        port=_LLAMA_CPP_PORT,
        notes=_LLAMA_CPP_NOTES,
        needs_gguf=True,
        heads=Heads(
            rules={"probabilistic": RATIO_OF_TEN, "greedy": GREEDY},
            notes=(
                *_LLAMA_CPP_NOTES,
                "The converter chooses the hidden states by the target's number of layers n: the inputs of layers 2, "
                "n // 2 and n - 3, whatever the head's configuration states (conversion/llama.py).",
            ),
        ),
    ),
    "tensorrt-llm": ServingEngine(
        name="TensorRT-LLM",
        version="1.2.1",
        rules={"": GREEDY},
        options=_FILTERS,
        families=None,
        vocab_gap=None,
        files=_tensorrt_llm,
        start="sh serve.sh",
        port=8000,
        notes=(
            "The default attention backend drafts greedily. With another backend, or a `draft_len_schedule`, drafts "
            "are sampled.",
            "No table of K by load is written: the keys of `draft_len_schedule` changed their meaning between "
            "versions.",
        ),
    ),
    "openvino": ServingEngine(
        name="OpenVINO GenAI",
        version="2026.4.1",
        rules={"": GREEDY},
        options=frozenset({"temperature"}),
        families=None,
        vocab_gap=None,
        files=_openvino,
        start="sh convert.sh && python generate.py",
        notes=("`convert.sh` needs optimum-intel. The weights are converted to float16.",),
        is_exact_sampled=False,
    ),
    "transformers": ServingEngine(
        name="Transformers",
        version="5.23.0",
        rules={"": RATIO},
        options=_FILTERS | {"min_p", "repetition_penalty", "logit_bias"},
        families=_FAMILIES,
        vocab_gap=0,
        files=_transformers,
        start="python generate.py",
        notes=(
            "`assistant_confidence_threshold` is 0: by default (0.4) a draft ends early. The options of the draft are "
            "read from the draft's own `generation_config`.",
            "One prompt at a time: Transformers has no batches with an assistant.",
        ),
    ),
    "mlx": ServingEngine(
        name="mlx-lm",
        version="0.32.2",
        rules={"": EQUALITY},
        options=_FILTERS | {"min_p"},
        families=_FAMILIES,
        vocab_gap=None,
        files=_mlx,
        start="sh generate.sh",
        notes=("With a draft, requests are served one at a time.",),
    ),
}
