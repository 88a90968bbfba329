"""Configuration files and scripts of engines: pure functions of a handover; nothing is loaded here.

Settings that are not lossless are never written: SGLang's thresholds below 1, vLLM's ``fly`` and ``synthetic``, an
``assistant_ensemble_weight``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.options import Sampling

LLAMA_CPP_PORT = 8080


@dataclass(frozen=True, slots=True)
class Handover:
    """A pair and its options for an engine.

    Attributes:
        target, draft: folders beside the files, or hub ids.
        k: drafted tokens per round.
        setting: the engine's, a key of its acceptance rules.
        context: maximum length of a sequence.
        k_by_rows: (rows, K), ascending: the best K from this number of running requests on; empty if not measured.
        head: kind of the draft if it is a head, "eagle3" or "dflash"; None for a model.
    """

    target: str
    draft: str
    k: int
    sampling: Sampling
    setting: str
    context: int
    k_by_rows: Sequence[tuple[int, int]] = ()
    head: str | None = None


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
        "method": handover.head or "draft_model",
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


def vllm_files(handover: Handover) -> dict[str, str]:
    command = ["vllm", "serve", handover.target, "--max-model-len", str(handover.context)]
    command += ["--speculative-config", '"$(cat speculative.json)"']
    files = {"speculative.json": _json(vllm_config(handover)), "serve.sh": _script(command)}
    return files | {"request.json": _json(_request(handover))}


def sglang_files(handover: Handover) -> dict[str, str]:
    command = ["python", "-m", "sglang.launch_server", "--model-path", handover.target]
    command += ["--context-length", str(handover.context)]
    algorithm = "STANDALONE" if handover.head is None else handover.head.upper()
    command += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", handover.draft]
    if handover.head != "dflash":  # it has no steps
        command += ["--speculative-num-steps", str(handover.k), "--speculative-eagle-topk", "1"]
    command += ["--speculative-num-draft-tokens", str(handover.k + 1)]  # counts the last token too
    if handover.setting == "rejection":
        command.append("--speculative-use-rejection-sampling")
    return {"serve.sh": _script(command), "request.json": _json(_request(handover))}


def llama_cpp_files(handover: Handover) -> dict[str, str]:
    sampling = handover.sampling
    # Newer builds have another default port.
    command = ["llama-server", "--port", str(LLAMA_CPP_PORT), "-m", "target.gguf", "-md", "draft.gguf"]
    command += ["--spec-type", "draft-simple" if handover.head is None else f"draft-{handover.head}"]
    command += ["--spec-draft-n-max", str(handover.k), "--spec-draft-n-min", "0", "--spec-draft-p-min", "0.0"]
    command += ["--spec-draft-sampling", handover.setting, "-c", str(handover.context)]
    # Filters after the temperature, as in Transformers; by default it comes last, with other filters enabled.
    command += ["--samplers", "penalties;temperature;top_k;top_p;min_p", "--temp", f"{sampling.temperature:g}"]
    command += ["--top-k", str(sampling.top_k), "--top-p", f"{sampling.top_p:g}", "--min-p", f"{sampling.min_p:g}"]
    # Over the whole sequence, as in Transformers.
    command += ["--repeat-penalty", f"{sampling.repetition_penalty:g}", "--repeat-last-n", str(handover.context)]
    body = {"prompt": "Once upon a time", "max_tokens": 128}
    return {"serve.sh": _script(command), "request.json": _json(body)}


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


def transformers_files(handover: Handover) -> dict[str, str]:
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
