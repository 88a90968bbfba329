"""Options for models and their placement."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from outrider.cli.shared.options import MACHINE_PANEL, MODELS_PANEL, OPTION, SamplingOptions, field_of, parse_k
from outrider.cli.shared.output import as_read, log_to_stderr
from outrider.cli.shared.progress import progress
from outrider.errors import OptionError
from outrider.options import AUTO, DEFAULT_ACCEPTANCE, DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens, reads_corpus
from outrider.system.files import short_name
from outrider.system.resources import useful_threads

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.drafters.base import Drafter
    from outrider.models.registry import Placement


_model, _machine = partial(field_of, MODELS_PANEL), partial(field_of, MACHINE_PANEL)
_PLACED = "device", "dtype", "device_map", "max_memory", "store", "allow_pickle", "execution"


def set_threads(threads: int | None) -> None:
    """Set CPU threads. None: those of ``OMP_NUM_THREADS``, or PyTorch's choice up to the cores that are worth one."""
    import torch

    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        useful = useful_threads()
        threads = useful if useful is not None and useful < torch.get_num_threads() else None
    if threads is not None:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class PairOptions:
    """Options of target, drafts and machine."""

    target: str = _model("fable", "Known name, folder or hub id. 'outrider models' lists the names.")
    draft: list[str] | None = _model(
        None,
        "Model, head, mtp, self, ngram, suffix, auto or none. A model or a head for the target is a known "
        "name, folder or hub id; mtp is the target's own MTP layer; self is the target, which reads the last "
        "tokens; ngram and suffix look up the text so far; auto is the first available of mtp, a known draft on "
        "this machine, and suffix. NAME:greedy drafts the most probable tokens, NAME:min-prob=P ends drafts "
        "before unlikely tokens, NAME:vocab=N drafts the N most frequent tokens (vocab=FILE: a log's), "
        "NAME:window=W reads the last tokens, suffix+NAME looks tokens up where that promises more. Repeatable "
        "where drafts are compared. Default: auto; fable-draft for fable.",
        metavar="NAME",
    )
    acceptance: str = _model(DEFAULT_ACCEPTANCE, "Rule: block, rejection or gumbel.")
    models: Path | None = _model(None, "TOML file with more model names.")
    corpus: list[Path] | None = _model(
        None,
        "Text that the draft 'suffix' looks up, too: plain, or JSON lines with prompt and text, as 'outrider "
        "generate --output' writes them. Repeatable.",
        metavar="FILE",
    )
    device: str = _machine("auto", "auto, cpu, cuda, cuda:1 or mps.")
    dtype: str = _machine(
        "auto", "auto, float64, float32, bfloat16, float16. auto: float32 on the CPU, else the checkpoint's."
    )
    quantize: str | None = _machine(
        None,
        "int8, int4, 8bit, nf4 or none, of the target's weights. Or the arithmetic of a GGUF file on the CPU: a8, a15 "
        "or a32. A name ending in :int8 does the same.",
    )
    device_map: str | None = _machine(
        None,
        "Spread the target's layers over devices: auto, balanced, none, or a JSON file that maps modules to devices.",
    )
    max_memory: str | None = _machine(
        None, "Memory limits for --device-map: 0=20GiB,1=20GiB,cpu=60GiB.", metavar="SIZES"
    )
    store: str | None = _machine(
        None,
        "On the CPU: auto keeps large matrices in the checkpoint's dtype and converts them when read; plain "
        "converts them on loading. Default: auto.",
    )
    draft_device: str | None = _machine(None, "The draft's device. Default: the target's.")
    draft_dtype: str | None = _machine(None, "The draft's dtype. Default: the target's.")
    draft_quantize: str | None = _machine(None, "--quantize for the draft.")
    threads: int | None = _machine(
        None,
        "CPU threads. Default: OMP_NUM_THREADS; else one for each physical core, without efficiency cores.",
        min=1,
        metavar="N",
    )
    allow_pickle: bool = _machine(
        False,
        "Read weights from pickled files (pytorch_model.bin), too, if you trust their authors.",
        "--allow-pickle",
    )
    execution: str = _machine(
        "auto",
        "How forwards run: auto, eager, native (CPU) or captured (CUDA graphs). auto takes the fastest that "
        "the model and its device allow.",
    )

    @property
    def draft_names(self) -> list[str]:
        """Unique names of the drafts. Raises OptionError: a corpus was given, and no draft reads it."""
        default = "suffix" if self.corpus else "fable-draft" if self.target == "fable" else AUTO
        names = list(dict.fromkeys(self.draft or [default]))
        if self.corpus and not any(map(reads_corpus, names)):
            raise OptionError("--corpus", str(self.corpus[0]), "only the draft 'suffix' reads one: add --draft suffix")
        return names

    @property
    def single_draft(self) -> str:
        """Draft of a command that takes one. Raises OptionError: several were given."""
        if len(self.draft_names) > 1:
            raise OptionError("--draft", ", ".join(self.draft_names), "this command takes one draft")
        return self.draft_names[0]

    def check_compared(self) -> None:
        """Raises OptionError: the only draft is 'none', and the command compares drafts with plain decoding."""
        if self.draft_names == ["none"]:
            raise OptionError("--draft", "none", "there is nothing to compare: choose a model or suffix")

    def load(self, *, generation_config: str = "none") -> Decoder:
        """Load the target, without a draft. ``generation_config``: see ``outrider.load``. Commands state all sampling
        options; the server's clients do not."""
        with progress(f"loading libraries, for {short_name(self.target)}"):
            from outrider import load

            set_threads(self.threads)
        log_to_stderr("outrider.kernels")
        log_to_stderr("outrider.decoding")
        how: dict[str, Any] = asdict(self.placement) | {"acceptance": self.acceptance, "models_file": self.models}
        with progress(f"loading {short_name(self.target)}"):
            return load(self.target, generation_config=generation_config, **how)

    @property
    def placement(self) -> Placement:
        from outrider.models.registry import Placement

        shared = {name: getattr(self, name) for name in _PLACED}
        return Placement(**shared, quantization=self.quantize)

    @property
    def draft_placement(self) -> Placement:
        from outrider.models.registry import Placement

        return Placement(
            device=self.draft_device or self.device,
            dtype=self.draft_dtype or self.dtype,
            quantization=self.draft_quantize,
            store=self.store,
            allow_pickle=self.allow_pickle,
            execution="eager" if self.execution == "eager" else "auto",
        )

    def load_draft(self, decoder: Decoder, name: str) -> Drafter:
        return self.load_named(decoder, name)[1]

    def load_named(self, decoder: Decoder, name: str) -> tuple[str, Drafter]:
        """A draft for the target, and its name: of 'auto', that of the draft that it chose."""
        from outrider.api import load_auto, load_drafter

        log_to_stderr("outrider.draft")
        with progress(f"loading the draft {short_name(name)}"):
            if name == AUTO:
                return load_auto(decoder, self.draft_placement, self.models)
            corpus = (self.corpus or ()) if reads_corpus(name) else ()
            options: dict[str, Any] = {"placement": self.draft_placement, "models_file": self.models}
            return name, load_drafter(decoder, name, corpus=corpus, **options)

    def load_drafts(self, decoder: Decoder) -> dict[str, Drafter]:
        """Load all drafts but 'none', by name; that of 'auto' is the name of the draft that it chose."""
        return dict(self.load_named(decoder, name) for name in self.draft_names if name != "none")


MachineOptions = Annotated[PairOptions, (*_PLACED, "models", "quantize", "threads")]
"""Of commands without a draft."""
DRAFT_OPTIONS = "draft", "acceptance", "models", "corpus", "device", "dtype", "threads", "allow_pickle"
DraftOnlyOptions = Annotated[PairOptions, DRAFT_OPTIONS]
"""Of commands without a target."""
_OPTIONS = {one.name: one.metadata[OPTION] for one in fields(PairOptions)}
TargetOption = Annotated[str, _OPTIONS["target"]]
AllowPickleOption = Annotated[bool, _OPTIONS["allow_pickle"]]
DeviceOption = Annotated[str, _OPTIONS["device"]]
ThreadsOption = Annotated[int | None, _OPTIONS["threads"]]


def single_k(text: str | None, pair: PairOptions, sampling: SamplingOptions, seed: int | None) -> NumDraftTokens:
    """K of a command that takes one. The default is "auto"; with a seed it is a number, since most rules repeat an
    output only with constant K. Raises OptionError."""
    if text is None:
        is_free = seed is None or sampling.temperature == 0 or pair.acceptance == "gumbel"
        return "auto" if is_free else DEFAULT_NUM_DRAFT_TOKENS
    return parse_k(text, "this command takes one number")[0]


def options_json(pair: PairOptions, sampling: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Options of a command, as they read back from its document."""
    options = {**asdict(pair), "draft": pair.draft_names, **sampling, **more}
    if sampling.get("logit_bias") is not None:
        options["logit_bias"] = [f"{token_id}={float(bias)!r}" for token_id, bias in sampling["logit_bias"].items()]
    return as_read(options)
