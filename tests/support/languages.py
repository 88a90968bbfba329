"""Constraints for toys: a language of token ids that is known whole, and a tokenizer of a few letters."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from reference import Law


class Remainders:
    """A text may go on with a token unless the sum of its ids would leave a remainder of 1 divided by 3."""

    error: str | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.ids: list[int] = []

    def effect(self) -> np.ndarray:
        return (sum(self.ids) + np.arange(self.vocab_size)) % 3 != 1

    def push(self, token_id: int) -> bool:
        if (sum(self.ids) + token_id) % 3 == 1:
            return False
        self.ids.append(token_id)
        return True

    def pop(self, num_tokens: int) -> None:
        del self.ids[len(self.ids) - num_tokens :]


def letters_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Each piece is a token that stands for itself; the last ends a text."""
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([pieces[-1]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=pieces[-1])


def masked_law(
    table: torch.Tensor, last: int, pieces: Sequence[str], language: Iterable[str], num_tokens: int, temperature: float
) -> Law:
    """The law of a Markov chain that may say only beginnings of these texts, after the token ``last``."""
    texts, end = set(language), len(pieces) - 1
    beginnings = {text[:n] for text in texts for n in range(len(text) + 1)}
    law: Law = {(): 1.0}
    for _ in range(num_tokens):
        longer: Law = {}
        for ids, mass in law.items():
            if ids and ids[-1] == end:
                longer[ids] = mass
                continue
            said = "".join(pieces[i] for i in ids)
            may = [said + piece in beginnings for piece in pieces[:-1]] + [said in texts]
            logits = table[ids[-1] if ids else last].masked_fill(~torch.tensor(may), -torch.inf)
            for token, prob in enumerate((logits / temperature).softmax(-1).tolist()):
                if prob > 0:
                    longer[(*ids, token)] = mass * prob
        law = longer
    return law
