"""Prompts with images: read once by the model's own code, and then prefilled by its text decoder.

The model's forward runs up to its text decoder, and is stopped there: it has placed the images' embeddings among those
of the text, and has built the masks if image tokens see each other. The decoder is then run with these, once for the
whole prompt, on the cache of the row. All later tokens are text, for which the rounds need nothing of this.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from outrider.errors import PromptError
from outrider.records import MediaPrompt
from outrider.runtime.attention_mask import Visibility
from outrider.runtime.cache import SlotCache
from outrider.runtime.lm import LM
from outrider.runtime.modules import CACHE_NAMES, cache_argument, recorded_states
from outrider.system.ranks import in_all_processes
from outrider.system.resources import memory_errors

_OWN = ("inputs_embeds", "attention_mask", "position_ids", "use_cache", "cache_position", *CACHE_NAMES)
_FAILURES = (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError)  # of modelling code
_ONCE = ("visual_pos_masks", "deepstack_visual_embeds")  # added at the prompt's own tokens
_SWITCHES = (type(None), bool, str, int, float)
_READING = threading.Lock()  # one prompt at a time: modelling code may keep on the model what it has found


def takes_images(model: Any) -> bool:
    return "image" in (getattr(model, "input_modalities", None) or ())


class _Reached(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments


@in_all_processes
@torch.inference_mode()
def read_media(lm: LM, ids: Sequence[int], inputs: Mapping[str, Any]) -> MediaPrompt:
    """Run the parts of a model that come before its text decoder, on a prompt of P ids with a placeholder for each
    image token, and what the model's processor returned beside them. Rounds of other threads go on meanwhile, unless
    they may be recording a graph. Raises PromptError: the model has no images, or the inputs do not fit; or it
    continues from images in a way that the rounds do not know."""
    model, who = lm.model, f"{lm.name} ({lm.model.config.model_type})"
    if not takes_images(model):
        raise PromptError(f"{who} takes no images: give text")
    if any(shape.states for shape in lm.layer_shapes):
        raise PromptError(f"{who} keeps states, which images are not supported with")
    given = {
        name: value.to(lm.device, lm.dtype if value.is_floating_point() else None)
        if isinstance(value, Tensor)
        else value
        for name, value in inputs.items()
    }
    fed = torch.tensor([list(ids)], device=lm.device)
    arguments: dict[str, Any] = {}
    me = threading.get_ident()

    def stop(_: Any, __: Any, its_arguments: dict[str, Any]) -> None:
        if threading.get_ident() == me:
            raise _Reached(its_arguments)

    with _READING, lm.lock if lm.execution.is_prepared else nullcontext():
        hook = model.get_decoder().register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with memory_errors():  # for which the prompt is not to blame
                model(input_ids=fed, attention_mask=torch.ones_like(fed), use_cache=False, **given)
        except _Reached as reached:
            arguments = reached.arguments
        except torch.OutOfMemoryError:  # nor for this
            raise
        except _FAILURES as error:
            reason = " ".join(str(error).split())[:200]
            raise PromptError(f"{lm.name} cannot read this prompt with its images: {reason}") from None
        finally:
            hook.remove()
    if arguments.get("inputs_embeds") is None:
        raise PromptError(f"{who} reads images in a way that is not supported: give text")
    position_ids, counted = arguments.get("position_ids"), torch.arange(len(ids), device=lm.device)
    if position_ids is not None and bool((position_ids == counted.to(position_ids.device)).all()):
        position_ids = None
    # Axes of an image are the last three; another one before them counts tokens.
    offset = 0 if position_ids is None else int(position_ids[-3:].amax()) + 1 - len(ids)
    if position_ids is not None and not any(shape.has_offset for shape in lm.layer_shapes):
        raise PromptError(f"{who} counts the places of an image in a way that is not supported: give text")
    more = {name: value for name, value in arguments.items() if name not in _OWN}
    unknown = sorted(
        name
        for name, value in more.items()
        if name not in _ONCE and (not isinstance(value, _SWITCHES) or (name in inputs and value is not None))
    )
    if unknown:
        raise PromptError(f"{lm.name} passes {unknown[0]!r} to its decoder for images, which is not supported here")
    visible = _visible(lm, arguments.get("attention_mask"), len(ids))
    return MediaPrompt(arguments["inputs_embeds"], position_ids, offset, visible, more)


def _visible(lm: LM, masks: Any, num_tokens: int) -> dict[str, Tensor]:
    """Keys that tokens see, by layer type, from masks of the model's own: bool, or added to scores."""
    by_type = masks if isinstance(masks, dict) else dict.fromkeys(Visibility.of(lm.model).layer_types, masks)
    found = {}
    for layer_type, mask in by_type.items():
        if isinstance(mask, Tensor) and mask.dim() == 4:
            found[layer_type] = (mask if mask.dtype == torch.bool else mask == 0)[0, 0, :num_tokens, :num_tokens]
    return found


@in_all_processes
@torch.inference_mode()
def prefill_media(lm: LM, media: MediaPrompt, cache: SlotCache, features: Sequence[int] = ()) -> Tensor | None:
    """Put all tokens of a prompt with images into the cache of one row. -> hidden states of ``features`` (see
    ``LM.forward_with_features``) [1, P, F]"""
    positions = torch.arange(media.num_tokens, device=lm.device)[None]
    view_len = lm.view_len(media.num_tokens, cache)
    cache.at(positions, view_len, is_single=media.num_tokens == 1)
    masks = Visibility.of(lm.model).masks(positions, view_len, lm.dtype)
    for layer_type, visible in media.visible.items():
        mask = masks[layer_type] if isinstance(masks, dict) else masks  # [1, 1, P, view_len]
        mask.fill_(torch.finfo(mask.dtype).min)[..., : media.num_tokens].masked_fill_(visible, 0)
    model = lm.model
    decoder = model.get_decoder()
    with lm.lock, recorded_states(model, features) as states:
        decoder(
            inputs_embeds=media.embeddings,
            attention_mask=masks,
            position_ids=positions if media.position_ids is None else media.position_ids,
            **{**media.more, cache_argument(decoder): cache.argument, "use_cache": True},
        )
    return torch.cat([states[i] for i in features], dim=-1) if features else None
