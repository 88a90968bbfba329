"""Engines that a pair can be exported to: acceptance rules, sampling options, heads, and the folder that each reads.

Facts were read in the sources of the versions named in ``ENGINES`` (docs/guides/engines.md cites the places).
Settings that are not lossless are never written: vLLM's ``fly`` and ``synthetic``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.errors import FileError
from outrider.export.checks import DescribedModel
from outrider.models.registry import ModelSpec
from outrider.options import Sampling
from outrider.system.files import write_text

# The most used text models that Outrider can load, in the registries of the versions below.
FAMILIES = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Granite")
)
_FILTERS = frozenset({"temperature", "top_k", "top_p"})
_LLAMA_CPP_PORT = 8080

# How drafts are sampled and accepted: all lossless, and equal at temperature 0.
RULES = {
    "ratio by temperature": "sum min(p, q): drafts are sampled at the request's temperature, without its filters, and "
    "accepted with probability min(1, p/q)",
    "ratio of ten": "sum min(p, q): drafts are sampled from the draft's ten likeliest tokens at the request's "
    "temperature and accepted with probability min(1, p/q)",
    "greedy": "p at the draft's argmax: drafts are greedy",
}


class InferenceEngine(NamedTuple):
    """An inference engine.

    Attributes:
        name: display name.
        version: the version whose sources were read.
        rules: a key of ``RULES`` for each setting of the engine.
        options: fields of ``Sampling`` that the engine supports exactly with a draft.
        files: (target, draft, k, sampling, setting, context, kind of a head or None) -> the content of each file.
            Target and draft are folders beside the files, or hub ids.
        port: default port of the server.
        notes: for the README; by the kind of a head, those for it alone.
        vocab_gap: largest difference of the vocabulary sizes of a pair.
        needs_gguf: whether the engine reads GGUF files, target.gguf and draft.gguf.
        heads: kinds of heads that it takes as drafts.
    """

    name: str
    version: str
    rules: Mapping[str, str]
    options: frozenset[str]
    files: Callable[[str, str, int, Sampling, str, int, str | None], dict[str, str]]
    port: int
    notes: Mapping[str | None, tuple[str, ...]]
    heads: tuple[str, ...]
    vocab_gap: int = 0
    needs_gguf: bool = False


def _script(*lines: str) -> str:
    """Shell script that runs a command in its own folder; its options are on a line each."""
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', " \\\n  ".join(lines), ""])


def _lines(values: Mapping[str, Any]) -> str:
    entries = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
    return f"{{\n{entries}\n}}\n"


def _vllm_files(
    target: str, draft: str, k: int, sampling: Sampling, setting: str, context: int, head: str | None
) -> dict[str, str]:
    """See ``SpeculativeConfig`` in vllm/config/speculative.py."""
    config = {
        "method": head or "draft_model",
        "model": draft,
        "num_speculative_tokens": k,
        "draft_sample_method": setting,
        "rejection_sample_method": "standard",
    }
    script = _script(
        f"vllm serve {shlex.quote(target)}",
        f"--max-model-len {context}",
        '--speculative-config "$(cat speculative.json)"',
    )
    # All options are explicit: missing ones would be taken from the checkpoint.
    body: dict[str, Any] = {"model": target, "prompt": "Once upon a time", "max_tokens": 128}
    body |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
    if sampling.repetition_penalty != 1:
        body["repetition_penalty"] = sampling.repetition_penalty
    for name in ("presence_penalty", "frequency_penalty"):
        if (value := getattr(sampling, name)) != 0:
            body[name] = value
    return {"speculative.json": _lines(config), "serve.sh": script, "request.json": _lines(body)}


def _llama_cpp_files(
    target: str, draft: str, k: int, sampling: Sampling, setting: str, context: int, head: str | None
) -> dict[str, str]:
    script = _script(
        "llama-server",
        f"--port {_LLAMA_CPP_PORT}",  # newer builds have another default
        "-m target.gguf",
        "-md draft.gguf",
        f"--spec-type draft-{head or 'simple'}",
        f"--spec-draft-n-max {k} --spec-draft-n-min 0",
        "--spec-draft-p-min 0.0",
        f"--spec-draft-sampling {setting}",
        f"-c {context}",
        # Filters after the temperature, as in Transformers; by default it comes last, with other filters enabled.
        "--samplers 'penalties;temperature;top_k;top_p;min_p'",
        f"--temp {sampling.temperature:g}",
        f"--top-k {sampling.top_k} --top-p {sampling.top_p:g} --min-p {sampling.min_p:g}",
        # Over the whole sequence, as in Transformers.
        f"--repeat-penalty {sampling.repetition_penalty:g} --repeat-last-n {context}",
    )
    return {"serve.sh": script, "request.json": _lines({"prompt": "Once upon a time", "max_tokens": 128})}


ENGINES = {
    "vllm": InferenceEngine(
        name="vLLM",
        version="0.33.0",
        rules={"probabilistic": "ratio by temperature", "greedy": "greedy"},
        options=_FILTERS | {"repetition_penalty", "presence_penalty", "frequency_penalty"},
        files=_vllm_files,
        port=8000,
        notes={
            None: (
                "`draft_sample_method` is set, since its default is `greedy`, another acceptance rule.",
                "Requests with `min_p` or `logit_bias` are refused by vLLM while a draft is in use.",
            ),
            "dflash": (
                "A block has K + 1 slots. Outrider feeds all slots of the head, so that what it measures holds for the "
                "largest K, and approximately for others.",
            ),
        },
        heads=("eagle3", "dflash"),
    ),
    "llama.cpp": InferenceEngine(
        name="llama.cpp",
        version="build 11549",
        rules={"probabilistic": "ratio of ten", "greedy": "greedy"},
        options=_FILTERS | {"min_p", "repetition_penalty"},
        files=_llama_cpp_files,
        vocab_gap=128,
        port=_LLAMA_CPP_PORT,
        notes={
            None: (
                "`convert.sh` runs llama.cpp's own converter, in its repository; `--outtype` chooses another type of "
                "weights.",
                "`--spec-draft-sampling` is set, since its default is `greedy`, another acceptance rule. Builds "
                "without the option (such as that of llama-cpp-python 0.3.36) are greedy.",
                "Samplers are explicit: llama.cpp's own defaults are top-k 40, top-p 0.95, min-p 0.05.",
                "A request may override the server's sampling options.",
            ),
            "eagle3": (
                "The converter chooses the hidden states by the target's number of layers n: the inputs of layers 2, "
                "n // 2 and n - 3, whatever the head's configuration states (conversion/llama.py).",
            ),
        },
        heads=("eagle3",),
        needs_gguf=True,
    ),
}


def write_folder(
    output: Path,
    engine: InferenceEngine,
    target: DescribedModel,
    draft: DescribedModel,
    k: int,
    sampling: Sampling,
    setting: str,
    context: int,
) -> list[str]:
    """Write all files. Checkpoints are linked, or referred to by hub id; for llama.cpp a script converts them.

    Args:
        setting: the engine's own name of the acceptance rule, a key of its ``rules``.
        context: maximum length of a sequence.

    Returns:
        The names of the files, links included.

    Raises:
        FileError: the folder cannot be written, or contains other files with these names.
    """
    models = {"target": target.spec, "draft": draft.spec}
    names = [str(spec.hub) if spec.path is None else name for name, spec in models.items()]
    files = engine.files(names[0], names[1], k, sampling, setting, context, draft.kind)
    links = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, spec in models.items():
            if spec.path is not None and not engine.needs_gguf:
                link = output / name
                if link.is_symlink():
                    link.unlink()
                elif link.exists():
                    raise FileError(f"{link} already exists and is not a link: choose another folder, or remove it")
                link.symlink_to(spec.path.resolve(), target_is_directory=True)
                links.append(name)
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}") from None
    if engine.needs_gguf:
        head_of = target.spec if draft.kind is not None else None
        commands = [*_conversion("target", target.spec), *_conversion("draft", draft.spec, head_of)]
        files["convert.sh"] = "\n".join(["#!/bin/sh", "set -eu", *commands, ""])
    written = sorted([*files, "README.md", *links])
    rule = engine.rules[setting]
    tau = "At temperature 0 all lossless acceptance rules are equal."
    if sampling.temperature > 0:
        tau = "This is lossless, but tau (tokens per round) depends on the rule; other engines differ."
    name = f"{draft.spec.name}:greedy" if rule == "greedy" else draft.spec.name
    architectures = {target.architecture} | ({draft.architecture} if draft.kind is None else set())
    known = f"{' and '.join(sorted(architectures))}: known to {engine.name} {engine.version}."
    if unknown := sorted(architectures - FAMILIES):
        known = f"**{' and '.join(unknown)}: not among the architectures checked** in {engine.version}."
    sizes = target.config.vocab_size, draft.config.vocab_size
    checked = [
        f"The head is for a target of {sizes[1]} tokens."
        if draft.kind
        else "Both tokenizers have the same tokens under the same ids.",
        f"vocab_size {sizes[0]} and {sizes[1]}; context {target.context_len} and {draft.context_len}.",
        known,
    ]
    url = f"http://127.0.0.1:{engine.port}/v1/completions"
    lines = [
        f"# {target.spec.name} with the draft {draft.spec.name}, for {engine.name}",
        "",
        f"Written by `outrider export` from the sources of {engine.name} {engine.version}.",
        "",
        "    sh serve.sh",
        f"    curl {url} -H 'Content-Type: application/json' -d @request.json",
        "",
        f"Files: {', '.join(written)}.",
        *(
            ["`target` and `draft` are links to the checkpoints; `cp -rL` copies the folder with them."]
            if links
            else []
        ),
        "",
        "## Acceptance",
        "",
        f"{engine.name} accepts a drafted token with probability {RULES[rule]}.",
        tau,
        f"K = {k}. `outrider replay LOG --draft {name} --acceptance rejection` predicts tau for every K.",
        "",
        "## Checked",
        "",
        *(f"- {line}" for line in checked),
        "",
        "## Notes",
        "",
        *(f"- {note}" for kind in dict.fromkeys((None, draft.kind)) for note in engine.notes.get(kind, ())),
    ]
    files["README.md"] = "\n".join(lines) + "\n"
    for name, text in files.items():
        write_text(output / name, text)
        if name.endswith(".sh"):
            (output / name).chmod(0o755)
    return written


def _conversion(name: str, spec: ModelSpec, target: ModelSpec | None = None) -> list[str]:
    """Shell commands for llama.cpp's own converter, in its repository; of a head with its target."""
    folders = {
        one: f"{one}-checkpoint" if model.path is None else str(model.path.resolve())
        for one, model in (("target", target or spec), (name, spec))
    }
    words = ["python", "convert_hf_to_gguf.py", folders[name], "--outfile", f"{name}.gguf"]
    words += [] if target is None else ["--target-model-dir", folders["target"]]
    fetch = ["hf", "download", str(spec.hub), "--local-dir", folders[name]]
    return [*([] if spec.path is not None else [shlex.join(fetch)]), shlex.join(words)]
