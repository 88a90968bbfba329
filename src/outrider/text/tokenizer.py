"""Tokenizing, and streaming detokenizing.

This module knows tokenizers of Hugging Face, but no models, rounds or stop strings. A user may give a tokenizer of
Transformers, which is imported for no other.
"""

from __future__ import annotations

import copy
import hashlib
import json
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

from outrider.errors import OptionError, PromptError, TokenizerMismatch
from outrider.text.chat import Chat, chat_text
from outrider.text.fast_tokenizer import FastTokenizer
from outrider.text.prompts import FORMS, one_prompt, without_second_bos

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Chat | Mapping[str, Any]
"""Text; token ids; chat messages, ``{"role": ..., "content": ...}``, or a ``Chat``, which has options beside them; or a
tokenizer's output for one text, with its attention mask."""

_NUM_CONTEXT_TOKENS = 6  # of the prompt, so that the first word keeps its leading space
_MOST_TOKENS = 8  # kept if no character ends between two of them
_MOST_BYTES = 4  # of a character
_UNFINISHED = "\ufffd"  # output of decoders for an incomplete character


def encode(tokenizer: Any | None, prompt: Prompt, *, has_special: bool | None = None) -> list[int]:
    """Token ids of a prompt. ``has_special`` adds the tokenizer's special tokens (BOS, ...), but no second BOS; None
    adds them to text, but not to chats, whose template writes them. Raises PromptError: the prompt is empty, or needs a
    tokenizer or a chat template that is missing; OptionError: the chat template does not read an option of a chat."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise PromptError("a prompt of text needs a tokenizer: load the model with one, or give token ids")
        try:
            prompt.encode("utf-8")
        except UnicodeEncodeError as error:
            raise PromptError(f"the prompt has a lone surrogate at {error.start}") from None
        # verbose=False: for a prompt that is too long we raise an error with a remedy, instead of a warning.
        adds_special = has_special is not False
        ids = [int(i) for i in tokenizer(prompt, add_special_tokens=adds_special, verbose=False).input_ids]
        ids = without_second_bos(tokenizer, prompt, ids) if adds_special else ids
    elif isinstance(prompt, Mapping):
        (ids,) = one_prompt(prompt)
    elif isinstance(prompt, Chat):
        ids = encode(tokenizer, chat_text(tokenizer, prompt), has_special=bool(has_special))
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        return encode(tokenizer, Chat(prompt), has_special=has_special)  # type: ignore[arg-type]
    else:
        try:
            ids = [operator.index(item) for item in prompt]  # type: ignore[arg-type]
        except TypeError:
            raise PromptError(f"a prompt is {FORMS}, not {prompt!r:.200}") from None
    if not ids:
        raise PromptError.empty()
    return ids


def tokenizer_of(given: Any | None) -> Any | None:
    """Tokenizer of a user's argument: itself, one in a processor, or a wrapped ``tokenizers.Tokenizer``. Raises
    OptionError: it is something else."""
    import tokenizers

    if given is None or isinstance(given, FastTokenizer):
        return given
    if isinstance(given, tokenizers.Tokenizer):
        return FastTokenizer(copy.deepcopy(given))
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    if isinstance(given, ProcessorMixin):
        inner, template = getattr(given, "tokenizer", None), given.chat_template
        if isinstance(inner, PreTrainedTokenizerBase) and template and not inner.chat_template:
            inner = copy.copy(inner)
            inner.chat_template = template
        given = type(given).__name__ if inner is None else inner
    if not isinstance(given, PreTrainedTokenizerBase):
        shown = given if isinstance(given, str) else type(given).__name__
        raise OptionError("tokenizer", shown, "a tokenizer of Transformers (AutoTokenizer), or tokenizers.Tokenizer")
    return given


def processor_of(given: Any | None) -> Any | None:
    """A user's argument for a tokenizer if it is a processor."""
    if given is None or isinstance(given, FastTokenizer):
        return None
    from transformers import ProcessorMixin

    return given if isinstance(given, ProcessorMixin) else None


class Detokenizer:
    """Incremental detokenizer that never returns incomplete characters. Special tokens have no text, but those shown.

    Tokens cannot be decoded one by one: a character may span several, and a leading space may depend on earlier tokens.
    So the last few tokens are decoded together, and the characters already returned are counted. A push never decodes
    more than these few tokens."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], shown_ids: Collection[int] = ()) -> None:
        self._decode = _decoder_of(tokenizer)
        self._textless = set(special_ids(tokenizer) - {*shown_ids})  # tokens known to have no text
        ids = prompt_ids[-_NUM_CONTEXT_TOKENS:]
        self._ids = [token_id for token_id in ids if token_id not in self._textless]  # the last tokens
        self._text = self._decode(self._ids)
        self._num_given = len(self._text)  # characters of it already returned
        self._num_new = 0  # tokens since the text had no incomplete character
        self._num_waiting = 0  # tokens since a character was completed

    def push(self, token_id: int) -> str:
        """Add a token; return the text that has become final, possibly empty."""
        if token_id in self._textless:
            return ""
        text = self._decode([*self._ids, token_id])
        if text == self._text and self._has_no_text(token_id):
            self._textless.add(token_id)  # a run of them would displace the context
            return ""
        self._ids.append(token_id)
        self._text, self._num_new = text, self._num_new + 1
        num_certain = len(text.rstrip(_UNFINISHED))
        self._num_waiting = 0 if num_certain > self._num_given else self._num_waiting + 1
        if num_certain < len(text) and self._num_waiting >= _MOST_BYTES:
            # The first of them cannot be part of a character that is still incomplete.
            num_certain = len(self._decode(self._ids[: 1 - _MOST_BYTES]))
        piece = text[self._num_given : num_certain]
        self._num_given = max(self._num_given, num_certain)
        if num_certain == len(text):
            self._keep(self._num_new)
        elif len(self._ids) > _MOST_TOKENS:
            self._keep(_NUM_CONTEXT_TOKENS)
        return piece

    def flush(self) -> str:
        """Return the remaining text at the end, including incomplete characters."""
        piece = self._text[self._num_given :]
        self._num_given = len(self._text)
        return piece

    def _keep(self, num_tokens: int) -> None:
        """Drop all but the last tokens, if these have text. Text not yet returned is at the end, and has the same
        length there."""
        ids = self._ids[-num_tokens:]
        text, num_held = self._decode(ids), max(0, len(self._text) - self._num_given)
        if text:
            self._ids, self._text, self._num_given = ids, text, max(0, len(text) - num_held)
            self._num_new = self._num_new if num_held else 0

    def _has_no_text(self, token_id: int) -> bool:
        """Whether the decoder skips the token (like special tokens) everywhere: alone, where an incomplete character
        would show, and between two tokens with text, where a space would show that is dropped at the beginning."""
        around = [next((i for i in reversed(self._ids) if self._decode([i])), token_id)]
        alone, between = self._decode([token_id]), self._decode([*around, token_id, *around])
        return alone == "" and between == self._decode(around * 2) != ""


def pieces_of(tokenizer: Any, token_ids: Sequence[int], text: str) -> list[str]:
    """Split a prompt's text, as decoded or as encoded, into those of its tokens."""
    shown_ids = [i for i in special_ids(tokenizer).intersection(token_ids) if tokenizer.decode([i]) in text]
    detokenizer = Detokenizer(tokenizer, (), shown_ids)
    pieces = [detokenizer.push(token_id) for token_id in token_ids[:-1]]
    # The last one has the rest, also where the tokenizer has changed the text.
    return [*pieces, text[sum(map(len, pieces)) :]]


def _decoder_of(tokenizer: Any) -> Callable[[list[int]], str]:
    """A tokenizer's ``decode``, special tokens included; where a class of Transformers adds nothing to that of the Rust
    tokenizer inside, the latter, since the layers between take ten times as long."""
    if isinstance(tokenizer, FastTokenizer):
        return tokenizer.decode
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    if isinstance(tokenizer, PreTrainedTokenizerFast):
        own = type(tokenizer).decode, type(tokenizer)._decode
        if own == (PreTrainedTokenizerBase.decode, PreTrainedTokenizerFast._decode):
            return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


@lru_cache(maxsize=8)
def special_ids(tokenizer: Any) -> frozenset[int]:
    """Special tokens, which have no text in output."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = marked.union(tokenizer.all_special_ids)
    return frozenset(i for i in ids if tokenizer.decode([i], skip_special_tokens=True) == "")


def has_token(tokenizer: Any, token_id: int) -> bool:
    """Whether a tokenizer is known to have an id; False for some that are slow to ask."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and backend.id_to_token(token_id) is not None


def vocab_size(tokenizer: Any) -> int:
    return int(max(tokenizer.get_vocab().values())) + 1


def fingerprint(tokenizer: Any) -> str:
    """Checksum of the mapping from ids to tokens: two are equal if and only if ``check_same_tokens`` passes."""
    tokens = sorted((i, token) for token, i in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def check_same_tokens(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Compare two tokenizers by the tokens of their ids. Raises TokenizerMismatch: an id has different tokens; the
    message shows some."""
    if differing := differing_tokens(target, draft):
        found = f"{len(differing)} of {len(target.get_vocab())} tokens differ ({examples_of(differing)})"
        remedy = "choose a draft of the same family, or the draft 'ngram', which needs none"
        raise TokenizerMismatch(f"{target_name} and {draft_name} have different tokenizers: {found}; {remedy}")


def differing_tokens(target: Any, draft: Any) -> dict[int, tuple[str, str]]:
    """The ids whose tokens differ, in order, with both tokens."""
    ours, theirs = ({i: token for token, i in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    ids = sorted(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    return {i: (ours.get(i, "nothing"), theirs.get(i, "nothing")) for i in ids}


def examples_of(differing: Mapping[int, tuple[str, str]]) -> str:
    return ", ".join(f"id {i} is {one!r} / {other!r}" for i, (one, other) in [*differing.items()][:3])
