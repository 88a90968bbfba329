"""The end of a turn, as a chat template writes it: a chat ends there, too, if the checkpoint names another end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_ANSWER = "A short answer."
_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "a"}}}
# Parts of an answer besides its content: a token that ends these, too, is no end of a turn.
_PARTS = (dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "A thought."), {"tool_calls": [_CALL]})


def turn_end(tokenizer: Any | None) -> int | None:
    """Token that a tokenizer's chat template writes after an answer; None if it writes none, or there is none."""
    if tokenizer is None or not tokenizer.chat_template:
        return None
    text = _chat(tokenizer, {})
    if _ANSWER not in text:
        return None
    added: dict[str, int] = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
    after = text.rpartition(_ANSWER)[2].lstrip()
    end = max((name for name in added if after.startswith(name)), key=len, default=None)
    if end is None:
        return None
    others = [other for part in _PARTS if _ANSWER in (other := _chat(tokenizer, part))]
    return None if any(other.count(end) > text.count(end) for other in others) else added[end]


def _chat(tokenizer: Any, part: Mapping[str, Any]) -> str:
    """Text of a chat whose answer has another part; empty if the template does not take it."""
    messages = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": _ANSWER, **part}]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # templates raise what they like, and may want other messages
        return ""
    return text


def ends_text(name: str, tokenizer: Any | None, eos_ids: Collection[int], turn_ids: Collection[int]) -> str:
    """The line that names a model's ends."""

    def names_of(ids: Collection[int]) -> str:
        words = [str(i) if tokenizer is None else f"{i} {tokenizer.convert_ids_to_tokens(i)}" for i in sorted(ids)]
        return ", ".join(words) or "no token"

    of_turns = {*turn_ids} - {*eos_ids}
    return f"{name}: texts end with {names_of(eos_ids)}" + (
        f"; chats also with {names_of(of_turns)}" if of_turns else ""
    )
