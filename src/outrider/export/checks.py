"""Checks of a pair before export, from configurations and tokenizers: no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from outrider.errors import OptionError, TokenizerMismatch, UnsupportedModel
from outrider.models.heads.loading import find_tensors, kind_of_head
from outrider.models.heads.loading import read_config as read_head_config
from outrider.models.loading import context_len
from outrider.models.reading import load_tokenizer, read_config
from outrider.models.registry import ModelSpec
from outrider.text.tokenizer import check_same_tokens

_HEADS = {"eagle3": "EAGLE-3", "dflash": "DFlash"}
# Parts that DFlash heads do not have.
_BEYOND_DFLASH = {
    "markov_head.": "a DSpark head",
    "confidence_head.": "a DSpark head",
    "candidate_selector.": "a DFlash 2 head",
    "lilicorr.": "a LiLiCorr head",
}


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """Model described by its files.

    Attributes:
        config: Hugging Face configuration of the text model.
        architecture: like "LlamaForCausalLM".
        head: the config.json of a head; None for a model.
        kind: of a head, "eagle3" or "dflash".
    """

    spec: ModelSpec
    config: Any
    tokenizer: Any
    architecture: str
    context_len: int
    head: Mapping[str, Any] | None = None
    kind: str | None = None

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        size: int = self.config.vocab_size
        return size

    @property
    def num_draft_tokens(self) -> int | None:
        """K that a head proposes."""
        proposals = ((self.head or {}).get("speculators_config") or {}).get("proposal_methods") or [{}]
        num: int | None = proposals[0].get("speculative_tokens", self.most_drafted)
        return num

    @property
    def most_drafted(self) -> int | None:
        """Most tokens that a head drafts in a round; None for any number."""
        return self.head["block_size"] - 1 if self.head is not None and self.kind == "dflash" else None


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
    kind = kind_of_head(names.keys())
    if kind == "block":
        beyond = (thing for part, thing in _BEYOND_DFLASH.items() if any(name.startswith(part) for name in names))
        thing = next(beyond, None)
        if stated.get("sample_from_anchor"):
            thing = "a block head that samples from its anchor"
        if thing is not None:
            raise UnsupportedModel(f"{spec.name} is {thing}: EAGLE-3 and DFlash heads are exported, and no others")
        inner = stated.get("dflash_config") or {}
        stated = {**stated, "block_size": stated.get("block_size", inner.get("block_size", 16))}
        kind = "dflash"
    if kind is None:
        raise UnsupportedModel(f"{spec.name} is a head in a layout that is not known here")
    config = SimpleNamespace(**(stated.get("transformer_layer_config") or stated))
    return DescribedModel(spec, config, target.tokenizer, _HEADS[kind], target.context_len, stated, kind)


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
    names = target.spec.name, draft.spec.name
    if draft.head is not None and draft.config.vocab_size != target.vocab_size:
        raise UnsupportedModel(
            f"{names[1]} is for another target: it has {draft.config.vocab_size} tokens, and {names[0]} "
            f"{target.vocab_size}"
        )
    check_same_tokens(target.tokenizer, draft.tokenizer, *names)
    if abs(target.vocab_size - draft.vocab_size) > vocab_gap:
        raise TokenizerMismatch(
            f"{names[0]} has a vocab_size of {target.vocab_size}, {names[1]} of {draft.vocab_size}, and this engine "
            "requires equal sizes: choose another draft, or pad the smaller embedding"
        )
    most = target.context_len if context is None else context
    if most > target.context_len:
        raise OptionError("--context", most, f"{names[0]} takes {target.context_len} tokens")
    if most > draft.context_len:
        raise OptionError(
            "--context", most, f"{names[1]} takes {draft.context_len} tokens: set --context {draft.context_len}"
        )
    return most
