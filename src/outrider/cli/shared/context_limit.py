"""Whether the tokens that ``-n`` asks for fit into the context of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outrider.errors import PromptError

if TYPE_CHECKING:
    from outrider.decoder import Decoder


def encode_all(decoder: Decoder, texts: Iterable[str]) -> list[list[int]]:
    """Token ids of prompts. Raises PromptError: names the prompt."""
    prompts = []
    for index, text in enumerate(texts):
        try:
            prompts.append(decoder.encode(text))
        except PromptError as error:
            raise PromptError(f"prompt {index}: {error}") from None
    return prompts


def report_context_limit(model: str, context_len: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Report on standard error that texts may end before the limit that was given.

    Args:
        model: the one whose context is the shortest.
        prompts: token ids of each.
    """
    longest = max(map(len, prompts))
    if longest + max_new_tokens > context_len:
        prompt = "prompt" if len(prompts) == 1 else "longest prompt"
        print(
            f"-n {max_new_tokens} goes beyond the context of {model}, which takes {context_len} tokens in all: "
            f"{longest} of the {prompt} and {context_len - longest} of the text",
            file=sys.stderr,
        )


def tell_num_cut(target: str, num_cut: int) -> None:
    """Report the same of a file of prompts, which may have limits of their own.

    Args:
        num_cut: prompts whose limit the context does not allow.
    """
    if num_cut:
        their = "1 prompt: its text ends" if num_cut == 1 else f"{num_cut} prompts: their texts end"
        print(f"-n goes beyond the context of {target} for {their} there", file=sys.stderr)
