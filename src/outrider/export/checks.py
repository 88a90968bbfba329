"""Checks of a pair before export, from configurations and tokenizers: no weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outrider.errors import OptionError, TokenizerMismatch, UnsupportedModel
from outrider.models.loading import context_len, load_tokenizer, read_config
from outrider.models.registry import ModelSpec
from outrider.text.tokenizer import check_same_tokens


@dataclass(frozen=True, slots=True)
class DescribedModel:
    """Model described by its files.

    Attributes:
        config: Hugging Face configuration of the text model.
        architecture: like "LlamaForCausalLM".
    """

    spec: ModelSpec
    config: Any
    tokenizer: Any
    architecture: str
    context_len: int

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding included."""
        size: int = self.config.vocab_size
        return size


def describe(spec: ModelSpec) -> DescribedModel:
    """Read configuration and tokenizer of a model.

    Raises:
        ModelError: the model cannot be found, or is not a causal language model.
    """
    config = read_config(spec)
    architectures = config.architectures or ()
    if not architectures:
        raise UnsupportedModel(f"{spec.name} does not name its architecture in config.json; add it there")
    text_config = config.get_text_config(decoder=True)
    return DescribedModel(spec, text_config, load_tokenizer(spec), architectures[0], context_len(config))


def check_pair(target: DescribedModel, draft: DescribedModel, context: int | None, vocab_gap: int | None) -> int:
    """Check that an engine can serve the pair.

    Args:
        context: requested maximum length of a sequence; None for the target's.
        vocab_gap: largest difference of the vocabulary sizes; None for any.

    Returns:
        The maximum length of a sequence.

    Raises:
        TokenizerMismatch, OptionError: it cannot.
    """
    names = target.spec.name, draft.spec.name
    check_same_tokens(target.tokenizer, draft.tokenizer, *names)
    if vocab_gap is not None and abs(target.vocab_size - draft.vocab_size) > vocab_gap:
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
