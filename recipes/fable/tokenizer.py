"""The tokenizer of the embedded pair: byte-level BPE, digits one by one, one special token.

python recipes/fable/tokenizer.py CORPUS.txt FOLDER [--vocab-size 4096]
"""

import argparse
from pathlib import Path

from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"  # begin, end and padding; id 0


def train(corpus: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer for this text; any other text can be written in it too, since every byte is a token."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(corpus)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vocab-size", type=int, default=4096)
    arguments = parser.parse_args()
    train(arguments.corpus, arguments.vocab_size).save_pretrained(arguments.folder)
