"""Engines that a pair can be exported to: acceptance rules, sampling options, heads, and the files that each reads.

Facts were read in the sources of the versions named in ``ENGINES`` (docs/reference/engines.md cites the places).
Settings that are not lossless are never written: SGLang's thresholds below 1, vLLM's ``fly`` and ``synthetic``, an
``assistant_ensemble_weight``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.models.heads.saving import convert_to_specforge, convert_to_zlab
from outrider.options import Sampling

# The most used text models that Outrider can load, in the registries of the versions below.
FAMILIES = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Granite")
)
_FILTERS = frozenset({"temperature", "top_k", "top_p"})
_LLAMA_CPP_PORT = 8080

# How drafts are sampled and accepted: all lossless, and equal at temperature 0.
RULES = {
    "ratio": "sum min(p, q): drafts are sampled under the request's options and accepted with probability min(1, p/q)",
    "ratio by temperature": "sum min(p, q): drafts are sampled at the request's temperature, without its filters, and "
    "accepted with probability min(1, p/q)",
    "ratio of ten": "sum min(p, q): drafts are sampled from the draft's ten likeliest tokens at the request's "
    "temperature and accepted with probability min(1, p/q)",
    "greedy": "p at the draft's argmax: drafts are greedy",
}


@dataclass(frozen=True, slots=True)
class Handover:
    """A pair and its options for an engine.

    Attributes:
        target, draft: folders beside the files, or hub ids.
        k: drafted tokens per round.
        setting: the engine's own name of the acceptance rule, a key of its ``rules``.
        context: maximum length of a sequence.
        head: kind of the draft if it is a head, "eagle3" or "dflash"; None for a model.
    """

    target: str
    draft: str
    k: int
    sampling: Sampling
    setting: str
    context: int
    head: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """An inference engine, with drafts of one kind.

    Attributes:
        name: display name.
        version: the version whose sources were read.
        rules: a key of ``RULES`` for each setting of the engine; the setting is "" if there is no choice.
        options: fields of ``Sampling`` that the engine supports exactly with a draft.
        vocab_gap: largest difference of the vocabulary sizes of a pair.
        files: function from a handover to the content of each file.
        start: command that starts the engine, in the folder.
        port: default port of the server; None for a script.
        notes: for the README.
        needs_gguf: whether the engine reads GGUF files, target.gguf and draft.gguf.
        convert: writes a head in the speculators layout anew, as the engine reads heads (location of the head, number
            of the target's layers, folder, name for messages); None if the engine reads that layout.
        heads: the same engine with a head as draft, by its kind: "eagle3" or "dflash".
    """

    name: str
    version: str
    rules: Mapping[str, str]
    options: frozenset[str]
    files: Callable[[Handover], dict[str, str]]
    start: str = "sh serve.sh"
    vocab_gap: int = 0
    port: int | None = None
    notes: tuple[str, ...] = ()
    needs_gguf: bool = False
    convert: Callable[[str, int, Path, str], None] | None = None
    heads: Mapping[str, Engine] = field(default_factory=dict)


def _script(command: Sequence[str]) -> str:
    """Shell script that runs a command in its own folder, with each option and its value on a line."""
    lines = [command[0]]
    for word in command[1:]:
        quoted = word if word.startswith('"$(') else shlex.quote(word)
        is_option = word.startswith("-") and not word[1:].isdigit()
        if is_option:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', " \\\n  ".join(lines), ""])


def _lines(values: Mapping[str, Any], show: Callable[[Any], str] = json.dumps) -> str:
    """Format an object with one entry per line."""
    entries = ",\n".join(f"  {show(key)}: {show(value)}" for key, value in values.items())
    return f"{{\n{entries}\n}}"


def _request(handover: Handover) -> str:
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
    return _lines(body) + "\n"


def _vllm_files(handover: Handover) -> dict[str, str]:
    """See ``SpeculativeConfig`` in vllm/config/speculative.py."""
    config = {
        "method": handover.head or "draft_model",
        "model": handover.draft,
        "num_speculative_tokens": handover.k,
        "draft_sample_method": handover.setting,
        "rejection_sample_method": "standard",
    }
    command = ["vllm", "serve", handover.target, "--max-model-len", str(handover.context)]
    command += ["--speculative-config", '"$(cat speculative.json)"']
    files = {"speculative.json": _lines(config) + "\n", "serve.sh": _script(command)}
    return files | {"request.json": _request(handover)}


def _sglang_files(handover: Handover) -> dict[str, str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", handover.target]
    command += ["--context-length", str(handover.context)]
    algorithm = "STANDALONE" if handover.head is None else handover.head.upper()
    command += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", handover.draft]
    if handover.head != "dflash":  # it has no steps
        command += ["--speculative-num-steps", str(handover.k), "--speculative-eagle-topk", "1"]
    command += ["--speculative-num-draft-tokens", str(handover.k + 1)]  # counts the last token too
    if handover.setting == "rejection":
        command.append("--speculative-use-rejection-sampling")
    return {"serve.sh": _script(command), "request.json": _request(handover)}


def _llama_cpp_files(handover: Handover) -> dict[str, str]:
    sampling = handover.sampling
    # Newer builds have another default port.
    command = ["llama-server", "--port", str(_LLAMA_CPP_PORT), "-m", "target.gguf", "-md", "draft.gguf"]
    command += ["--spec-type", "draft-simple" if handover.head is None else f"draft-{handover.head}"]
    command += ["--spec-draft-n-max", str(handover.k), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0.0"]
    command += ["--spec-draft-sampling", handover.setting, "-c", str(handover.context)]
    # Filters after the temperature, as in Transformers; by default it comes last, with other filters enabled.
    command += ["--samplers", "penalties;temperature;top_k;top_p;min_p", "--temp", f"{sampling.temperature:g}"]
    command += ["--top-k", str(sampling.top_k), "--top-p", f"{sampling.top_p:g}", "--min-p", f"{sampling.min_p:g}"]
    # Over the whole sequence, as in Transformers.
    command += ["--repeat-penalty", f"{sampling.repetition_penalty:g}", "--repeat-last-n", str(handover.context)]
    body = {"prompt": "Once upon a time", "max_tokens": 128}
    return {"serve.sh": _script(command), "request.json": _lines(body) + "\n"}


def _transformers_files(handover: Handover) -> dict[str, str]:
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
    drafting |= {"assistant_confidence_threshold": 0.0}
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


_NARROW_BLOCKS = (
    "A block has K + 1 slots. Outrider feeds all slots of the head, so that what it measures holds for the largest K, "
    "and approximately for others."
)
_VLLM = Engine(
    name="vLLM",
    version="0.33.0",
    rules={"probabilistic": "ratio by temperature", "greedy": "greedy"},
    options=_FILTERS | {"repetition_penalty", "presence_penalty", "frequency_penalty"},
    files=_vllm_files,
    port=8000,
    notes=(
        "`draft_sample_method` is set, since its default is `greedy`, another acceptance rule.",
        "Requests with `min_p` or `logit_bias` are refused by vLLM while a draft is in use.",
    ),
)
_SGLANG = Engine(
    name="SGLang",
    version="0.5.23",
    rules={"": "greedy"},
    options=_FILTERS,
    files=_sglang_files,
    port=30000,
    notes=(
        "Drafts are greedy: `--speculative-use-rejection-sampling` is refused for STANDALONE.",
        "On the CPU, on XPU and on ROCm a verify is greedy whatever the request's temperature is.",
        "With a draft, `min_p` is not applied, and penalties ignore the tokens of the same round: use neither.",
    ),
)
_SGLANG_EAGLE3 = replace(
    _SGLANG,
    rules={"rejection": "ratio by temperature", "greedy": "greedy"},
    convert=convert_to_specforge,
    notes=(
        "Drafts are greedy by default, another acceptance rule; `--speculative-use-rejection-sampling` samples them.",
        "On the CPU and on XPU a verify is greedy whatever the request's temperature is.",
        _SGLANG.notes[2],
        "SGLang counts the target's layers from their outputs, so that `eagle_aux_hidden_state_layer_ids` are one less "
        "than in other layouts.",
    ),
)
_SGLANG_DFLASH = replace(
    _SGLANG,
    convert=convert_to_zlab,
    notes=(
        "Where SGLang's sampling kernel is not available (on the CPU, XPU and ROCm), a verify is greedy whatever the "
        "request's temperature is; SGLang logs a warning.",
        "`min_p` is not applied: do not use it.",
        _NARROW_BLOCKS,
    ),
)
_LLAMA_CPP = Engine(
    name="llama.cpp",
    version="build 11549",
    rules={"probabilistic": "ratio of ten", "greedy": "greedy"},
    options=_FILTERS | {"min_p", "repetition_penalty"},
    files=_llama_cpp_files,
    vocab_gap=128,
    port=_LLAMA_CPP_PORT,
    notes=(
        "`convert.sh` runs llama.cpp's own converter, in its repository; `--outtype` chooses another type of weights.",
        "`--spec-draft-sampling` is set, since its default is `greedy`, another acceptance rule. Builds without the "
        "option (such as that of llama-cpp-python 0.3.36) are greedy.",
        "Samplers are explicit: llama.cpp's own defaults are top-k 40, top-p 0.95, min-p 0.05.",
        "A request may override the server's sampling options.",
    ),
    needs_gguf=True,
)
_LLAMA_CPP_EAGLE3 = replace(
    _LLAMA_CPP,
    notes=(
        *_LLAMA_CPP.notes,
        "The converter chooses the hidden states by the target's number of layers n: the inputs of layers 2, n // 2 "
        "and n - 3, whatever the head's configuration states (conversion/llama.py).",
    ),
)
ENGINES = {
    "vllm": replace(_VLLM, heads={"eagle3": _VLLM, "dflash": replace(_VLLM, notes=(*_VLLM.notes, _NARROW_BLOCKS))}),
    "sglang": replace(_SGLANG, heads={"eagle3": _SGLANG_EAGLE3, "dflash": _SGLANG_DFLASH}),
    "llama.cpp": replace(_LLAMA_CPP, heads={"eagle3": _LLAMA_CPP_EAGLE3}),
    "transformers": Engine(
        name="Transformers",
        version="5.23.0",
        rules={"": "ratio"},
        options=_FILTERS | {"min_p", "repetition_penalty", "logit_bias"},
        files=_transformers_files,
        start="python generate.py",
        notes=(
            "`assistant_confidence_threshold` is 0: by default (0.4) a draft ends early. The options of the draft are "
            "read from the draft's own `generation_config`.",
            "One prompt at a time: Transformers has no batches with an assistant.",
        ),
    ),
}
