"""Export of a pair to another engine: checks, from configurations and tokenizers alone, and the folder of each engine.

Facts were read in the sources of the versions named in ``ENGINES`` (docs/guides/engines.md cites the places).
Settings that are not lossless are never written: vLLM's ``fly`` and ``synthetic``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from outrider.errors import FileError, OptionError, TokenizerMismatch, UnsupportedModel
from outrider.models.heads.loading import check_runs, find_tensors, kind_of_head
from outrider.models.heads.loading import read_config as read_head_config
from outrider.models.kinds import head_named
from outrider.models.loading import context_len
from outrider.models.reading import load_tokenizer, read_config
from outrider.models.registry import ModelSpec
from outrider.options import Sampling
from outrider.system.files import write_text
from outrider.text.tokenizer import check_same_tokens

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


class DescribedModel(NamedTuple):
    """Model described by its files."""

    spec: ModelSpec
    config: Any  # Hugging Face configuration of the text model
    tokenizer: Any
    architecture: str  # like "LlamaForCausalLM"
    context_len: int
    kind: str | None = None  # of a head, "eagle3" or "dflash"; None for a model
    num_draft_tokens: int | None = None  # K that a head proposes, if stated
    most_drafted: int | None = None  # most tokens that a head drafts in a round, if there is a limit


Pair = tuple[DescribedModel, DescribedModel]
"""Target and draft."""


def describe(spec: ModelSpec) -> DescribedModel:
    """Read configuration and tokenizer. Raises ModelError: the model is not found, or is no causal language model."""
    config = read_config(spec)
    if not config.architectures:
        raise UnsupportedModel(f"{spec.name} does not name its architecture in config.json; add it there")
    text_config = config.get_text_config(decoder=True)
    return DescribedModel(spec, text_config, load_tokenizer(spec), config.architectures[0], context_len(config))


def describe_head(spec: ModelSpec, target: DescribedModel) -> DescribedModel:
    """Read the configuration of a head, whose tokens are the target's. Raises ModelError: the head cannot be found, or
    no engine here takes heads of this kind."""
    stated, names = read_head_config(spec.location), find_tensors(spec.location)
    check_runs(spec.name, names, head_named(stated))
    kind, most = kind_of_head(names.keys()), None
    if kind == "block":
        beyond = "a DFlash 2 head" if any(name.startswith("candidate_selector.") for name in names) else None
        if beyond or stated.get("sample_from_anchor"):
            thing = beyond or "a block head that samples from its anchor"
            raise UnsupportedModel(f"{spec.name} is {thing}: EAGLE-3 and DFlash heads are exported, and no others")
        kind, most = "dflash", stated.get("block_size", (stated.get("dflash_config") or {}).get("block_size", 16)) - 1
    elif kind != "eagle3":
        raise UnsupportedModel(f"{spec.name} is a head in a layout that is not exported: EAGLE-3 and DFlash heads are")
    config = SimpleNamespace(**(stated.get("transformer_layer_config") or stated))
    proposals = (stated.get("speculators_config") or {}).get("proposal_methods") or [{}]
    name, k = "DFlash" if kind == "dflash" else "EAGLE-3", proposals[0].get("speculative_tokens", most)
    return DescribedModel(spec, config, target.tokenizer, name, target.context_len, kind, k, most)


def check_pair(pair: Pair, context: int | None, vocab_gap: int) -> int:
    """Check that an engine can serve the pair. Returns the maximum length of a sequence. Raises TokenizerMismatch,
    UnsupportedModel, OptionError.

    Args:
        context: requested maximum length of a sequence; None for the target's.
        vocab_gap: largest difference of the vocabulary sizes.
    """
    (target, draft), names, sizes = pair, [one.spec.name for one in pair], [one.config.vocab_size for one in pair]
    if draft.kind is not None and sizes[0] != sizes[1]:
        raise UnsupportedModel(f"{names[1]} is for another target: it has {sizes[1]} tokens, and {names[0]} {sizes[0]}")
    check_same_tokens(target.tokenizer, draft.tokenizer, *names)
    if abs(sizes[0] - sizes[1]) > vocab_gap:
        raise TokenizerMismatch(
            f"{names[0]} has a vocab_size of {sizes[0]}, {names[1]} of {sizes[1]}, and this engine requires equal "
            "sizes: choose another draft, or pad the smaller embedding"
        )
    most = target.context_len if context is None else context
    for name, own, remedy in (
        (names[0], target.context_len, ""),
        (names[1], draft.context_len, f": set --context {draft.context_len}"),
    ):
        if most > own:
            raise OptionError("--context", most, f"{name} takes {own} tokens{remedy}")
    return most


class Engine(NamedTuple):
    """An inference engine.

    Attributes:
        files: (target, draft, k, sampling, setting, context, kind of a head or None) -> the content of each file.
            Target and draft are folders beside the files, or hub ids.
    """

    name: str
    version: str  # whose sources were read
    rules: Mapping[str, str]  # a key of RULES for each setting of the engine
    options: frozenset[str]  # fields of Sampling that the engine supports exactly with a draft
    files: Callable[[str, str, int, Sampling, str, int, str | None], dict[str, str]]
    port: int  # default of the server
    notes: Mapping[str | None, tuple[str, ...]]  # for the README; by the kind of a head, those for it alone
    heads: tuple[str, ...]  # kinds of heads that it takes as drafts
    vocab_gap: int = 0  # largest difference of the vocabulary sizes of a pair
    needs_gguf: bool = False  # whether the engine reads GGUF files, target.gguf and draft.gguf


def _script(*lines: str) -> str:
    """Shell script that runs a command in its own folder; its options are on a line each."""
    return "\n".join(["#!/bin/sh", "set -eu", 'cd "$(dirname "$0")"', " \\\n  ".join(lines), ""])


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"


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
    return {"speculative.json": _json(config), "serve.sh": script, "request.json": _json(body)}


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
    return {"serve.sh": script, "request.json": _json({"prompt": "Once upon a time", "max_tokens": 128})}


ENGINES = {
    "vllm": Engine(
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
    "llama.cpp": Engine(
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
    output: Path, engine: Engine, pair: Pair, k: int, sampling: Sampling, setting: str, context: int
) -> list[str]:
    """Write all files, and return their names, links included. Checkpoints are linked, or referred to by hub id; for
    llama.cpp a script converts them. Raises FileError.

    Args:
        setting: the engine's own name of the acceptance rule, a key of its ``rules``.
        context: maximum length of a sequence.
    """
    target, draft = pair
    models = {"target": target.spec, "draft": draft.spec}
    names = [str(spec.hub) if spec.path is None else name for name, spec in models.items()]
    files = engine.files(names[0], names[1], k, sampling, setting, context, draft.kind)
    folders = {name: spec.path for name, spec in models.items() if spec.path is not None and not engine.needs_gguf}
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, path in folders.items():
            link = output / name
            if link.is_symlink():
                link.unlink()
            elif link.exists():
                raise FileError(f"{link} already exists and is not a link: choose another folder, or remove it")
            link.symlink_to(path.resolve(), target_is_directory=True)
    except OSError as error:
        raise FileError(f"cannot write {output}: {error.strerror}") from None
    if engine.needs_gguf:
        head_of = target.spec if draft.kind is not None else None
        commands = [*_conversion("target", target.spec), *_conversion("draft", draft.spec, head_of)]
        files["convert.sh"] = "\n".join(["#!/bin/sh", "set -eu", *commands, ""])
    written = sorted([*files, "README.md", *folders])
    rule, version = engine.rules[setting], f"{engine.name} {engine.version}"
    tau = "At temperature 0 all lossless acceptance rules are equal."
    if sampling.temperature > 0:
        tau = "This is lossless, but tau (tokens per round) depends on the rule; other engines differ."
    name = f"{draft.spec.name}:greedy" if rule == "greedy" else draft.spec.name
    architectures = {target.architecture} | ({draft.architecture} if draft.kind is None else set())
    known = f"{' and '.join(sorted(architectures))}: known to {version}."
    if unknown := sorted(architectures - FAMILIES):
        known = f"**{' and '.join(unknown)}: not among the architectures checked** in {engine.version}."
    sizes, tokens = [one.config.vocab_size for one in pair], "Both tokenizers have the same tokens under the same ids."
    if draft.kind:
        tokens = f"The head is for a target of {sizes[1]} tokens."
    of_links = "`target` and `draft` are links to the checkpoints; `cp -rL` copies the folder with them.\n"
    notes = "".join(f"- {note}\n" for kind in dict.fromkeys((None, draft.kind)) for note in engine.notes.get(kind, ()))
    files["README.md"] = f"""\
# {target.spec.name} with the draft {draft.spec.name}, for {engine.name}

Written by `outrider export` from the sources of {version}.

    sh serve.sh
    curl http://127.0.0.1:{engine.port}/v1/completions -H 'Content-Type: application/json' -d @request.json

Files: {", ".join(written)}.
{of_links if folders else ""}
## Acceptance

{engine.name} accepts a drafted token with probability {RULES[rule]}.
{tau}
K = {k}. `outrider replay LOG --draft {name} --acceptance rejection` predicts tau for every K.

## Checked

- {tokens}
- vocab_size {sizes[0]} and {sizes[1]}; context {target.context_len} and {draft.context_len}.
- {known}

## Notes

{notes}"""
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
