"""Checks of a pair before export, from configurations and tokenizers: no weights are loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from outrider.errors import OptionError, TokenizerMismatch, UnsupportedModel
from outrider.models.heads.loading import check_runs, find_tensors, kind_of_head
from outrider.models.heads.loading import read_config as read_head_config
from outrider.models.kinds import head_named
from outrider.models.loading import context_len
from outrider.models.reading import load_tokenizer, read_config
from outrider.models.registry import ModelSpec
from outrider.text.tokenizer import check_same_tokens


class DescribedModel(NamedTuple):
    """Model described by its files.

    Attributes:
        config: Hugging Face configuration of the text model.
        architecture: like "LlamaForCausalLM".
        kind: of a head, "eagle3" or "dflash"; None for a model.
        num_draft_tokens: K that a head proposes; None if it proposes none.
        most_drafted: most tokens that a head drafts in a round; None for any number.
    """

    spec: ModelSpec
    config: Any
    tokenizer: Any
    architecture: str
    context_len: int
    kind: str | None = None
    num_draft_tokens: int | None = None
    most_drafted: int | None = None


def describe(spec: ModelSpec) -> DescribedModel:
    """Read configuration and tokenizer of a model. Raises ModelError: the model cannot be found, or is not a causal
    language model."""
    config = read_config(spec)
    architectures = config.architectures or ()
    if not architectures:
        raise UnsupportedModel(f"{spec.name} does not name its architecture in config.json; add it there")
    text_config = config.get_text_config(decoder=True)
    return DescribedModel(spec, text_config, load_tokenizer(spec), architectures[0], context_len(config))


def describe_head(spec: ModelSpec, target: DescribedModel) -> DescribedModel:
    """Read the configuration of a head. Its tokens are the target's.

    Raises:
        ModelError: the head cannot be found.
        UnsupportedModel: no engine here takes heads of this kind.
    """
    stated = read_head_config(spec.location)
    names = find_tensors(spec.location)
    check_runs(spec.name, names, head_named(stated))
    kind = kind_of_head(names.keys())
    most = None
    if kind == "block":
        beyond = "a DFlash 2 head" if any(name.startswith("candidate_selector.") for name in names) else None
        if beyond or stated.get("sample_from_anchor"):
            thing = beyond or "a block head that samples from its anchor"
            raise UnsupportedModel(f"{spec.name} is {thing}: EAGLE-3 and DFlash heads are exported, and no others")
        most = stated.get("block_size", (stated.get("dflash_config") or {}).get("block_size", 16)) - 1
    elif kind != "eagle3":
        raise UnsupportedModel(f"{spec.name} is a head in a layout that is not exported: EAGLE-3 and DFlash heads are")
    proposals = (stated.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return DescribedModel(
        spec,
        SimpleNamespace(**(stated.get("transformer_layer_config") or stated)),
        target.tokenizer,
        "DFlash" if kind == "block" else "EAGLE-3",
        target.context_len,
        kind="dflash" if kind == "block" else kind,
        num_draft_tokens=proposals[0].get("speculative_tokens", most),
        most_drafted=most,
    )


def check_pair(target: DescribedModel, draft: DescribedModel, context: int | None, vocab_gap: int) -> int:
    """Check that an engine can serve the pair.

    Args:
        context: requested maximum length of a sequence; None for the target's.
        vocab_gap: largest difference of the vocabulary sizes.

    Returns:
        The maximum length of a sequence.

    Raises:
        TokenizerMismatch, OptionError: it cannot.
    """
    names, sizes = (target.spec.name, draft.spec.name), (target.config.vocab_size, draft.config.vocab_size)
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
