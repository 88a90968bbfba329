"""Checks ``-n`` against the context length of a model."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.cli.shared.wrapping import say


def report_context_limit(model: str, context_len: int, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Warn on standard error if the context ends outputs before ``-n``.

    Args:
        model: the target.
        prompts: token ids of each.
    """
    longest = max(map(len, prompts))
    if longest + max_new_tokens > context_len:
        prompt = "prompt" if len(prompts) == 1 else "longest prompt"
        say(
            f"-n {max_new_tokens} exceeds the context of {model}, {context_len} tokens: "
            f"with {longest} in the {prompt}, at most {context_len - longest} are generated"
        )


def report_num_limited(target: str, num_cut: int) -> None:
    """Warn on standard error about prompts of a file, which may have limits of their own.

    Args:
        num_cut: number of prompts whose limit exceeds the context.
    """
    if num_cut:
        prompts = "1 prompt" if num_cut == 1 else f"{num_cut} prompts"
        say(f"-n exceeds the context of {target} for {prompts}: generation stops there")
