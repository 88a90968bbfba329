"""Text to ids and back, in a form that can be streamed.

This module knows tokenizers of Hugging Face, but no models, rounds or stop strings.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.errors import PromptError, TokenizerMismatch

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text; or token ids; or the messages of a chat, ``{"role": ..., "content": ...}``."""

_NUM_CONTEXT_TOKENS = 6  # of the prompt, so that the first word keeps its leading space
_UNFINISHED = "\ufffd"  # decoders' output for half a character


def encode(tokenizer: Any | None, prompt: Prompt, *, has_special: bool = True) -> list[int]:
    """Token ids of a prompt.

    Args:
        tokenizer: None if the prompt is ids already.
        has_special: of text, with the tokens that the tokenizer adds (BOS, ...).

    Raises:
        PromptError: the prompt is empty, or needs a tokenizer or a chat template that is missing.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("a prompt of text needs a tokenizer: load the model with one, or give token ids")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt has half a character at {error.start} (a lone surrogate)") from None
        # verbose=False: a prompt that is too long is an error of ours, with a remedy, not a warning.
        ids = [int(i) for i in tokenizer(prompt, add_special_tokens=has_special, verbose=False).input_ids]
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        ids = _encode_chat(tokenizer, prompt)
    else:
        try:
            ids = [operator.index(item) for item in prompt]  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(
                f"a prompt is text, a list of token ids or a list of chat messages, not {prompt!r}"
            ) from None
    if not ids:
        raise PromptError("the prompt is empty: give at least one token of text to start from")
    return ids


def _encode_chat(tokenizer: Any | None, messages: Any) -> list[int]:
    if tokenizer is None or not tokenizer.chat_template:
        raise PromptError("this model has no chat template: give the prompt as text")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except (TemplateError, TypeError, ValueError) as error:  # a template computes with what it finds in a message
        raise PromptError(f"the model's chat template does not accept these messages: {error}") from None
    return encode(tokenizer, text, has_special=False)


class Detokenizer:
    """Turns tokens into text one by one, never giving half a character.

    Tokens do not decode on their own: a character may be spread over several, and a leading space may depend on the
    tokens before. So the new token is decoded together with the tokens before it, and their own text is removed.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt_ids[-_NUM_CONTEXT_TOKENS:])  # tokens whose text has been emitted
        self._pending: list[int] = []  # tokens whose text has not been emitted in full
        self._num_given = 0  # emitted characters of the pending tokens

    def push(self, token_id: int) -> str:
        """The text that has become certain; may be empty."""
        self._pending.append(token_id)
        text = self._new_text()
        certain = text.rstrip(_UNFINISHED)
        piece = certain[self._num_given :]
        if certain == text != "":
            self._settle()
        else:
            self._num_given = len(certain)
        return piece

    def flush(self) -> str:
        """The remainder at the end, including half characters."""
        piece = self._new_text()[self._num_given :]
        self._settle()
        return piece

    def _settle(self) -> None:
        self._context, self._pending, self._num_given = self._pending or self._context, [], 0

    def _new_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def vocab_size(tokenizer: Any) -> int:
    """One more than the largest token id."""
    largest: int = max(tokenizer.get_vocab().values())
    return largest + 1


def fingerprint(tokenizer: Any) -> str:
    """A checksum of the meaning of ids: the same for two tokenizers if and only if ``check_same_tokens`` passes."""
    tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def check_same_tokens(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Compare two tokenizers by the meaning of their ids.

    Raises:
        TokenizerMismatch: an id stands for different tokens; the message shows some.
    """
    target_tokens = {i: token for token, i in target.get_vocab().items()}
    draft_tokens = {i: token for token, i in draft.get_vocab().items()}
    differing = sorted(
        i for i in target_tokens.keys() | draft_tokens.keys() if target_tokens.get(i) != draft_tokens.get(i)
    )
    if differing:
        examples = ", ".join(
            f"id {i} is {target_tokens.get(i, 'nothing')!r} / {draft_tokens.get(i, 'nothing')!r}" for i in differing[:3]
        )
        raise TokenizerMismatch(
            f"{target_name} and {draft_name} have different tokenizers: {len(differing)} of {len(target_tokens)} "
            f"tokens differ ({examples}); choose a draft of the same family, or the draft 'ngram', which needs none"
        )
