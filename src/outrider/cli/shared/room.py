"""Whether the tokens that ``-n`` asks for fit into the context of the target."""

from __future__ import annotations

import sys


def tell_room(target: str, context_len: int, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Report on standard error that texts may end before the limit that was given.

    Args:
        num_prompt_tokens: of the longest prompt.
    """
    if num_prompt_tokens + max_new_tokens > context_len:
        print(
            f"-n {max_new_tokens} goes beyond the context of {target}, which takes {context_len} tokens in all: "
            f"{num_prompt_tokens} of the prompt and {context_len - num_prompt_tokens} of the text",
            file=sys.stderr,
        )
