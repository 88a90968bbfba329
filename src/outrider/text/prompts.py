"""Forms of prompts: one or several, as text, token ids, chats, or a tokenizer's output.

A tokenizer's output has an attention mask, which marks padding. Plain ids have none, so padding in them is detected by
its token.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch

from outrider.errors import PromptError
from outrider.text.chat import Chat

FORMS = "text, a list of token ids or a list of chat messages"
_ARRAYS = (torch.Tensor, np.ndarray)
_PIXELS = "pixel_values"
_IDS, _MASK, _TYPES = "input_ids", "attention_mask", "token_type_ids"
_MEDIA = {"image": "an image", "video": "a video", "audio": "a sound"}


def prompts_of(given: Any) -> Iterable[Any]:
    """Prompts of a call, each in a form that ``encode`` takes. A single text, chat or tokenizer's output is one prompt.
    Raises PromptError: there are none in it."""
    if isinstance(given, str) or is_chat(given):
        return [given]
    if isinstance(given, Mapping):
        return [given] if media_of(given) else token_rows(given)
    if isinstance(given, Iterable) and not (isinstance(given, _ARRAYS) and given.ndim == 0):
        return given
    raise PromptError(f"prompts are one or several, each {FORMS}, not {given!r}")


def one_prompt(prompt: Any) -> list[Any]:
    """A list of one prompt, in which a tokenizer's output is token ids. (In a list, a single message of a chat would be
    taken for the chat.) Raises PromptError: a tokenizer's output has several prompts; or see ``token_rows``."""
    if not isinstance(prompt, Mapping) or media_of(prompt):
        return [prompt]
    rows = token_rows(prompt)
    if len(rows) != 1:
        raise PromptError(f"these are {len(rows)} prompts, where one is expected: give them to generate()")
    return rows


def is_chat(prompt: Any) -> bool:
    """Whether it is one chat: a ``Chat``, or its message list."""
    if isinstance(prompt, Chat):
        return True
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def begun_of(prompt: Any) -> str | None:
    """Text that the output of a chat continues, empty if the output answers; None if the prompt is no chat."""
    if isinstance(prompt, Chat):
        return prompt.begun
    return "" if is_chat(prompt) or isinstance(prompt, Mapping) else None


def media_of(prompt: Any) -> dict[str, Any]:
    """Images in a processor's output for one prompt, with all that belongs to them: its entries beside token ids and
    their mask. Empty for prompts of text."""
    if not isinstance(prompt, Mapping) or _PIXELS not in prompt:
        return {}
    return {name: value for name, value in prompt.items() if name not in (_IDS, _MASK)}


def without_media(prompt: Any) -> Any:
    """A prompt without the entries of ``media_of``."""
    return {name: prompt[name] for name in (_IDS, _MASK) if name in prompt} if media_of(prompt) else prompt


def token_rows(encoded: Mapping[str, Any]) -> list[list[int]]:
    """Token ids of a tokenizer's output, one prompt or several, without masked ones. Raises PromptError: it is another
    mapping, or has unsupported entries."""
    if _IDS not in encoded:
        keys = ", ".join(map(repr, encoded))
        raise PromptError(f"a prompt is {FORMS}, or what a tokenizer returns, not a mapping with the keys {keys}")
    for name in encoded:
        if name not in (_IDS, _MASK, _TYPES):
            raise PromptError(f"a prompt has no {name!r} here: give {_IDS!r} and {_MASK!r} alone")
    rows = _lists(encoded[_IDS])
    if any(map(any, _lists(encoded.get(_TYPES, [[]])))):
        raise PromptError(f"a prompt has no {_TYPES!r} here but zeros: leave them out")
    masks = _lists(encoded[_MASK]) if _MASK in encoded else [[1] * len(row) for row in rows]
    if list(map(len, rows)) != list(map(len, masks)) or any(bit not in (0, 1) for mask in masks for bit in mask):
        raise PromptError(f"{_MASK!r} is a 0 or a 1 for each of the {_IDS!r}")
    return [[i for i, bit in zip(row, mask, strict=True) if bit] for row, mask in zip(rows, masks, strict=True)]


def _lists(value: Any) -> list[list[int]]:
    value = value.tolist() if isinstance(value, _ARRAYS) else value
    rows = value if value and isinstance(value[0], Sequence | np.ndarray | torch.Tensor) else [value]
    try:
        return [[operator.index(item) for item in row] for row in rows]
    except TypeError:
        raise PromptError(f"{_IDS!r} and {_MASK!r} are lists of whole numbers, or lists of such lists") from None


def check_padding(tokenizer: Any | None, prompts: Sequence[Any]) -> None:
    """Detect padding in arrays of ids, which have no mask. (In a list of ids every token counts.) Raises PromptError;
    if the padding token also begins or ends sequences, this is a warning."""
    rows = [(i, row.tolist()) for i, row in enumerate(prompts) if isinstance(row, _ARRAYS) and row.ndim == 1]
    if tokenizer is None or tokenizer.pad_token_id is None or not rows:
        return
    pad = tokenizer.pad_token_id
    runs = {i: _num_leading(row, pad) for i, row in rows if set(row) != {pad}}
    num_own = 1 if pad == tokenizer.bos_token_id and min(runs.values(), default=0) else 0
    padded = next((i for i, num in runs.items() if num > num_own), None)
    if padded is None:
        return
    remedy = "give what the tokenizer returns, with its 'attention_mask', or lists of ids without padding"
    message = f"prompt {padded} begins with the padding token ({pad}) and has no mask: {remedy}"
    if pad not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        raise PromptError(message)
    warnings.warn(message, stacklevel=4)


def _num_leading(ids: Sequence[int], token_id: int) -> int:
    return len(list(takewhile(token_id.__eq__, ids)))


def without_second_bos(tokenizer: Any, text: str, ids: list[int]) -> list[int]:
    """Remove the BOS token that the tokenizer has put before a text that begins with it, as chat templates write."""
    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    if not bos or not text.startswith(bos):
        return ids
    own = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    num_own = _num_leading(own, bos_id)
    return ids[_num_leading(ids, bos_id) - num_own :] if num_own else ids


def check_ids(ids: Sequence[int], vocab_size: int, *owners: Any, has_images: bool = False) -> None:
    """Check that all ids are tokens, and none a placeholder of an image that is not there, or of a video or a sound,
    which are not supported. The model's configuration and the tokenizer have the names of such tokens. Images that are
    there do not end the prompt. Raises PromptError."""
    if max(ids) >= vocab_size or min(ids) < 0:
        raise PromptError(f"the prompt has a token id outside 0..{vocab_size - 1}")
    for kind, thing in _MEDIA.items():
        for owner in owners:
            for name in (f"{kind}_token_id", f"{kind}_token_index"):
                token_id = getattr(owner, name, None)
                if has_images and kind == "image":
                    if token_id == ids[-1]:
                        raise PromptError(f"the prompt ends with {thing} (token {token_id}): text must follow it")
                elif isinstance(token_id, int) and token_id in ids:
                    lacks = "which is not given: pass it too" if kind == "image" else "which is not supported"
                    message = f"the prompt has the token {token_id}, the placeholder of {thing}, {lacks}"
                    raise PromptError(f"{message}, or leave the token out")
