"""Engines that a pair can be exported to: acceptance rules, supported sampling options, and the heads that they take.

Facts were read in the sources of the versions named in ``ENGINES`` (docs/reference/engines.md cites the places).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.export.engine_files import (
    LLAMA_CPP_PORT,
    Handover,
    llama_cpp_files,
    sglang_files,
    transformers_files,
    vllm_files,
)
from outrider.export.engine_rules import GREEDY, RATIO, RATIO_BY_TEMPERATURE, RATIO_OF_TEN, EngineRule
from outrider.models.heads.saving import convert_to_specforge, convert_to_zlab

# The most used text models that Outrider can load, in the registries of the versions below.
_FAMILIES = frozenset(
    f"{name}ForCausalLM"
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3", "Olmo2", "Granite")
)
_FILTERS = frozenset({"temperature", "top_k", "top_p"})


Converter = Callable[[str, int, Path, str], None]
"""(location of a head, number of the target's layers, folder to write, name for messages)"""


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads of a kind in an engine, where they differ from draft models.

    Attributes:
        rules, notes, convert: see ``ServingEngine``.
    """

    rules: Mapping[str, EngineRule]
    notes: tuple[str, ...] = ()
    convert: Converter | None = None


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """An inference engine.

    Attributes:
        name: display name.
        version: whose sources were read.
        rules: acceptance rules, by the engine's own setting; the key is "" if there is no choice.
        options: fields of ``Sampling`` that it supports exactly with a draft.
        families: architectures that it is known to serve.
        vocab_gap: largest difference of the vocabulary sizes of a pair.
        files: returns name -> content.
        start: command that starts it, in the folder.
        port: default port of its server; None for a script.
        notes: for the README.
        needs_gguf: needs GGUF files, target.gguf and draft.gguf.
        heads: by kind, "eagle3" or "dflash".
        convert: writes a head in the speculators layout anew, as the engine reads it; None if it reads that.
    """

    name: str
    version: str
    rules: Mapping[str, EngineRule]
    options: frozenset[str]
    families: frozenset[str]
    vocab_gap: int
    files: Callable[[Handover], dict[str, str]]
    start: str
    port: int | None = None
    notes: tuple[str, ...] = ()
    needs_gguf: bool = False
    heads: Mapping[str, Heads] = field(default_factory=dict)
    convert: Converter | None = None

    def with_head(self, kind: str) -> ServingEngine:
        """The engine with a head of this kind as draft."""
        heads = self.heads[kind]
        return replace(self, rules=heads.rules, notes=heads.notes, convert=heads.convert)


_VLLM_NOTES = (
    "`draft_sample_method` is set, since its default is `greedy`, another acceptance rule.",
    "Requests with `min_p` or `logit_bias` are refused by vLLM while a draft is in use.",
)
_NARROW_BLOCKS = (
    "A block has K + 1 slots. Outrider feeds all slots of the head, so that its prediction holds for the largest K, "
    "and approximately for others."
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
        files=vllm_files,
        start="sh serve.sh",
        port=8000,
        notes=_VLLM_NOTES,
        heads={
            "eagle3": Heads({"probabilistic": RATIO_BY_TEMPERATURE, "greedy": GREEDY}, _VLLM_NOTES),
            "dflash": Heads({"probabilistic": RATIO_BY_TEMPERATURE, "greedy": GREEDY}, (*_VLLM_NOTES, _NARROW_BLOCKS)),
        },
    ),
    "sglang": ServingEngine(
        name="SGLang",
        version="0.5.23",
        rules={"": GREEDY},
        options=_FILTERS,
        families=_FAMILIES,
        vocab_gap=0,
        files=sglang_files,
        start="sh serve.sh",
        port=30000,
        notes=(
            "Drafts are greedy: `--speculative-use-rejection-sampling` is refused for STANDALONE.",
            "On the CPU, on XPU and on ROCm a verify is greedy whatever the request's temperature is.",
            "With a draft, `min_p` is not applied, and penalties ignore the tokens of the same round: use neither.",
        ),
        heads={
            "eagle3": Heads(
                rules={"rejection": RATIO_BY_TEMPERATURE, "greedy": GREEDY},
                notes=(
                    "Drafts are greedy by default, another acceptance rule; `--speculative-use-rejection-sampling` "
                    "samples them.",
                    "On the CPU and on XPU a verify is greedy whatever the request's temperature is.",
                    "With a draft, `min_p` is not applied, and penalties ignore the tokens of the same round: use "
                    "neither.",
                    "SGLang counts the target's layers from their outputs, so that `eagle_aux_hidden_state_layer_ids` "
                    "are one less than in other layouts.",
                ),
                convert=convert_to_specforge,
            ),
            "dflash": Heads(
                rules={"": GREEDY},
                notes=(
                    "Where SGLang's sampling kernel is not available (on the CPU, XPU and ROCm), a verify is greedy "
                    "whatever the request's temperature is; SGLang logs a warning.",
                    "`min_p` is not applied: do not use it.",
                    _NARROW_BLOCKS,
                ),
                convert=convert_to_zlab,
            ),
        },
    ),
    "llama.cpp": ServingEngine(
        name="llama.cpp",
        version="build 11549",
        rules={"probabilistic": RATIO_OF_TEN, "greedy": GREEDY},
        options=_FILTERS | {"min_p", "repetition_penalty"},
        families=_FAMILIES,
        vocab_gap=128,
        files=llama_cpp_files,
        start="sh serve.sh",
        port=LLAMA_CPP_PORT,
        notes=_LLAMA_CPP_NOTES,
        needs_gguf=True,
        heads={
            "eagle3": Heads(
                rules={"probabilistic": RATIO_OF_TEN, "greedy": GREEDY},
                notes=(
                    *_LLAMA_CPP_NOTES,
                    "The converter chooses the hidden states by the target's number of layers n: the inputs of layers "
                    "2, n // 2 and n - 3, whatever the head's configuration states (conversion/llama.py).",
                ),
            ),
        },
    ),
    "transformers": ServingEngine(
        name="Transformers",
        version="5.23.0",
        rules={"": RATIO},
        options=_FILTERS | {"min_p", "repetition_penalty", "logit_bias"},
        families=_FAMILIES,
        vocab_gap=0,
        files=transformers_files,
        start="python generate.py",
        notes=(
            "`assistant_confidence_threshold` is 0: by default (0.4) a draft ends early. The options of the draft are "
            "read from the draft's own `generation_config`.",
            "One prompt at a time: Transformers has no batches with an assistant.",
        ),
    ),
}
