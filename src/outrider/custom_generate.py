"""Speculative sampling inside ``model.generate`` of Transformers.

model.generate(**inputs, max_new_tokens=64, custom_generate=outrider.assisted("path/of/draft"))

The caller keeps the model, its ``GenerationConfig``, logits processors and stopping criteria, and gets what its
``generate`` returns. ``generate`` of this module is the same with all arguments in sight: to a callable Transformers
does not pass its own ``streamer``, ``assistant_model``, ``tokenizer`` and ``synced_gpus``.

Source: ``GenerationMixin.generate`` and ``_sample`` of Transformers 5.22 to 5.24.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from outrider.api import load, load_drafter
from outrider.decoder import Decoder
from outrider.errors import OptionError, PromptError, UnsupportedModel
from outrider.models.registry import Placement
from outrider.options import DEFAULT_ACCEPTANCE, DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens
from outrider.requests.engine_loop import RequestState
from outrider.requests.logits_processors import Criteria, ProcessedRow, as_options, of_row, process
from outrider.runtime.modules import CACHE_NAMES

# Fields of GenerationConfig that ask for another mode, with what to use instead.
_OTHER_MODES = {
    "prompt_lookup_num_tokens": "give the draft 'ngram' to assisted()",
    "assistant_early_exit": "give a draft to assisted()",
    "use_mtp": "give the draft 'mtp' to assisted()",
    "is_assistant": "this model is the target: leave it out",
    **dict.fromkeys(("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "num_beams", "num_beam_groups")),
}
CustomGenerate = Callable[..., Any]
_KEPT = "_outrider_decoders"  # attribute of a model


class _Key:
    """Stands for a function of ``assisted``, which refers to its key: a function that knew itself would stay alive."""


class _Kept:
    """Decoders of one model; not part of its copies."""

    def __init__(self) -> None:
        self.decoders: WeakKeyDictionary[_Key, tuple[Any, Decoder]] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def assisted(
    draft: str | Path | Any | None,
    *,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS,
    acceptance: str = DEFAULT_ACCEPTANCE,
    streamer: Any | None = None,
    stop_strings: str | Sequence[str] | None = None,
    allow_pickle: bool = False,
) -> CustomGenerate:
    """Argument ``custom_generate`` of ``model.generate``. Keep the function: draft and model are prepared once for it.
    The call raises OptionError, PromptError or UnsupportedModel (not possible here) and NumericsError.

    Args:
        draft: see ``outrider.load``.
        tokenizer: of the model: to compare it with the draft's, and for ``stop_strings``.
        draft_tokenizer: of a draft in memory.
        num_draft_tokens, acceptance: see ``outrider.load``.
        streamer: of Transformers, for batches of one row.
        stop_strings: in place of those of ``generate``, which needs its own tokenizer for them.
        allow_pickle: for the draft; see ``Placement``.

    Raises:
        OptionError
    """
    if stop_strings and tokenizer is None:
        raise OptionError("stop_strings", stop_strings, "they need the tokenizer: assisted(..., tokenizer=...)")

    key = _Key()

    def decoder_of(model: Any) -> Decoder:
        """The decoder of this model, kept as long as both key and model are alive."""
        kept = model.__dict__.setdefault(_KEPT, _Kept()).decoders
        place = model.device, model.dtype
        if key not in kept or kept[key][0] != place:
            # Without the generation config: all tokens that have logits, as in ``generate``.
            # Eager: between calls the caller may train the model, whose weights a graph would know by address.
            options: Any = {"num_draft_tokens": num_draft_tokens, "acceptance": acceptance}
            plain = load(model, generation_config="none", execution="eager", **options)
            known = replace(plain, tokenizer=tokenizer)
            placement = Placement(device=str(model.device), allow_pickle=allow_pickle, execution="eager")
            drafter = load_drafter(known, draft, tokenizer=draft_tokenizer, placement=placement)
            kept[key] = place, replace(plain, drafter=drafter, eos_ids=frozenset(), turn_ids=frozenset())
        decoder: Decoder = kept[key][1]
        return decoder

    def own(
        model: Any,
        input_ids: Tensor,  # [B, N]
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``generate``. Returns ids [B, N + new tokens], or GenerateDecoderOnlyOutput."""
        _check(model, generation_config)
        num_padding = _padding(input_ids, model_kwargs)
        if stop_strings:
            from transformers import StoppingCriteriaList, StopStringCriteria

            ends: Any = StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer)
            stopping_criteria = StoppingCriteriaList([*stopping_criteria, ends])
        if streamer is not None:
            if len(input_ids) > 1:
                raise OptionError("streamer", type(streamer).__name__, f"for one row, not {len(input_ids)}")
            streamer.put(input_ids.cpu())
        decoder = decoder_of(model)
        rows = _Rows(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        states = _requests(decoder, rows, num_padding, do_sample=bool(generation_config.do_sample))
        loop, open_rows = decoder.loop(len(states)), set(range(len(states)))
        for chunk in loop.chunks(states):
            errors = getattr(states[chunk.row].request.constraint, "errors", {})
            rows.extend(chunk.row, chunk.token_ids, chunk.logits, errors)
            ended = rows.take_ended()
            loop.cancel(states[index] for index in ended)
            open_rows -= {*ended, *([] if chunk.finish_reason is None else [chunk.row])}
            if not open_rows:
                break
        if streamer is not None:
            streamer.end()
        return rows.output()

    return own


def generate(
    model: Any,
    inputs: Tensor | None = None,
    generation_config: Any | None = None,
    *,
    draft: str | Path | Any | None = None,
    tokenizer: Any | None = None,
    assistant_model: Any | None = None,
    assistant_tokenizer: Any | None = None,
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS,
    acceptance: str = DEFAULT_ACCEPTANCE,
    streamer: Any | None = None,
    allow_pickle: bool = False,
    synced_gpus: bool | None = None,
    custom_generate: Any | None = None,
    **options: Any,
) -> Any:
    """``model.generate`` with a draft. Arguments, results: see there and ``assisted``; ``assistant_model`` is another
    name of ``draft``. Nothing is dropped.

    Raises:
        OptionError: an argument is not possible here; see also ``assisted``.
    """
    if draft is not None and assistant_model is not None:
        raise OptionError("assistant_model", type(assistant_model).__name__, "give it or draft, not both")
    if custom_generate is not None:
        raise OptionError("custom_generate", custom_generate, "this function is one: leave it out")
    if synced_gpus:
        raise OptionError("synced_gpus", synced_gpus, "rows end at different times: leave it out")
    config = model.generation_config if generation_config is None else generation_config
    stop_strings = options.pop("stop_strings", None) or config.stop_strings
    if config.stop_strings:
        generation_config = copy.deepcopy(config)
        generation_config.stop_strings = None
    own = assisted(
        assistant_model if draft is None else draft,
        tokenizer=tokenizer,
        draft_tokenizer=assistant_tokenizer,
        num_draft_tokens=num_draft_tokens,
        acceptance=acceptance,
        streamer=streamer,
        stop_strings=stop_strings,
        allow_pickle=allow_pickle,
    )
    return model.generate(inputs, generation_config=generation_config, custom_generate=own, **options)


def _check(model: Any, config: Any) -> None:
    """Raises OptionError, UnsupportedModel."""
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{type(model).__name__} is an encoder-decoder: only decoders are supported")
    if model.training:
        raise OptionError("model.training", True, "dropout changes the distribution: call model.eval()")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise OptionError(name, True, "they are not returned: leave it out")
    if config.cache_implementation in ("quantized", "offloaded"):
        raise OptionError("cache_implementation", config.cache_implementation, "this cache is another: leave it out")
    mode = config.get_generation_mode()
    given = {one: getattr(config, one, None) for one in _OTHER_MODES}
    asked = [one for one, value in given.items() if value and not (one.startswith("num_beam") and value == 1)]
    if asked or mode not in ("greedy_search", "sample"):
        (name, *_) = (*asked, "do_sample")
        remedy = _OTHER_MODES.get(name) or f"there is no {mode.replace('_', ' ')} here: leave it out"
        raise OptionError(name, getattr(config, name), remedy)


def _padding(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Number of padding tokens before each row. Raises OptionError, PromptError."""
    for name in CACHE_NAMES:  # mostly made by ``generate``, and empty
        if getattr(cache := model_kwargs.pop(name, None), "_is_user_defined", False):
            raise OptionError(name, type(cache).__name__, "caches are not taken over: give the whole prompt")
    mask, positions = model_kwargs.pop("attention_mask", None), model_kwargs.pop("position_ids", None)
    for name, value in model_kwargs.items():
        has_effect = name not in ("use_cache", "logits_to_keep", "cache_position")
        if has_effect and value is not None and value is not False:
            raise OptionError(name, type(value).__name__, "the models read token ids alone: leave it out")
    if input_ids.shape[1] == 0:
        raise OptionError("input_ids", list(input_ids.shape), "there are no ids (are there inputs_embeds?): give some")
    if mask is None:
        mask = torch.ones_like(input_ids)
    is_known = mask.bool()
    if not (is_known == is_known.cummax(dim=1).values).all() or not is_known[:, -1].all():
        raise PromptError("the attention mask has zeros after a one: pad on the left, and mask nothing else")
    expected = (is_known.long().cumsum(-1) - 1).clamp_min(0)
    if positions is not None and not ((positions == expected) | ~is_known).all():
        raise OptionError("position_ids", positions.tolist(), "positions are counted from a row's first token")
    return [int(num) for num in (~is_known).sum(dim=1)]


def _requests(decoder: Decoder, rows: _Rows, num_padding: Sequence[int], *, do_sample: bool) -> list[RequestState]:
    # Drawn from the caller's generator, so that torch.manual_seed governs the output.
    seed = int(torch.randint(2**62, ())) if do_sample else 0
    states = []
    for index, (ids, num) in enumerate(zip(rows.prompts, num_padding, strict=True)):
        options, others = as_options(rows.processors[index], ids, num)
        options |= {"seed": seed + index, "max_new_tokens": rows.num_new, "ignore_eos": True}
        if not do_sample:
            options["temperature"] = 0.0
        state = decoder.request(ids[num:], options)
        if state.num_prompt_tokens + rows.num_new > decoder.target.context_len:
            remedy = f"the context of the model is {decoder.target.context_len}: ask for fewer"
            raise OptionError("max_length", rows.num_new + len(ids), remedy)
        constraint = ProcessedRow(others, ids, rows.device, rows.criteria.ends) if others else None
        own = replace(state.request, stop=None, constraint=constraint, reports_logits=rows.needs_logits)
        states.append(replace(state, request=own))
    return states


class _Rows:
    """The batch as ``generate`` returns it, of prompts with padding. Criteria, which end a row, and streamer see each
    row token by token. ``needs_logits``: whether ``extend`` needs them."""

    def __init__(self, input_ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any | None) -> None:
        self.device = input_ids.device
        self.prompts: list[list[int]] = input_ids.tolist()
        self.processors = [[of_row(one, i) for one in processors] for i in range(len(input_ids))]
        self.criteria = Criteria(criteria, len(input_ids))
        self._streamer, self._config = streamer, config
        most = criteria.max_length or config.max_length
        self._num_given = input_ids.shape[1]
        self.num_new = most - self._num_given
        pad = getattr(config, "_pad_token_tensor", None)
        self._pad_id = 0 if pad is None else int(pad)
        self._ids = torch.full((len(input_ids), most), self._pad_id, device=self.device)
        self._ids[:, : self._num_given] = input_ids
        self._lengths = [self._num_given] * len(input_ids)
        self._ends: list[int | None] = [None] * len(input_ids)  # lengths at which the criteria were met
        self._left = set(range(len(input_ids)))
        self._is_padded = any(hasattr(one, "eos_token_id") for one in criteria)
        is_dict = bool(config.return_dict_in_generate)
        self._has_scores, self._has_logits = is_dict and bool(config.output_scores), is_dict and config.output_logits
        self.needs_logits = bool(self._has_scores or self._has_logits)
        self._logits: list[list[Tensor]] = [[] for _ in self.prompts]
        self._scores: list[list[Tensor]] = [[] for _ in self.prompts]

    def extend(
        self, row: int, token_ids: Sequence[int], logits: Tensor | None, errors: Mapping[int, Exception]
    ) -> None:
        """Append tokens to a row, up to its end, with logits [N, V]. Raises the error, by position, of the row's
        processors at a position that it gets to."""
        for place, token_id in enumerate(token_ids):
            length = self._lengths[row]
            if row not in self._left or (self._ends[row] is not None and length >= self._longest):
                return
            if length in errors:
                raise errors[length]
            if logits is not None:
                own = logits[place].to(self.device, torch.float32, copy=True)
                self._logits[row].append(own)
                if self._has_scores:
                    self._scores[row].append(process(self.processors[row], self._ids[row : row + 1, :length], own))
            self._ids[row, length] = token_id
            self._lengths[row] = length = length + 1
            if self._streamer is not None:
                self._streamer.put(torch.tensor([token_id]))
            scores = tuple(one[None] for one in self._scores[row]) if self._has_scores else None
            if self._ends[row] is None and self.criteria.is_met(self._ids[row : row + 1, :length], scores):
                self._ends[row] = length
                if self._is_padded:
                    return

    def take_ended(self) -> list[int]:
        """Rows that have ended since the last call. Without end tokens ``generate`` pads nothing: a row goes on until
        the criteria are met in all."""
        if self._is_padded:
            ended = {row for row in self._left if self._ends[row] is not None}
        elif None in self._ends:
            return []
        else:
            ended = {row for row in self._left if self._lengths[row] >= self._longest}
        self._left -= ended
        return sorted(ended)

    @property
    def _longest(self) -> int:
        """Length at which the batch ends, if that is known; else the most that it may have."""
        return max(end or self._ids.shape[1] for end in self._ends)

    def output(self) -> Any:
        longest = max(end or length for end, length in zip(self._ends, self._lengths, strict=True))
        ids = self._ids[:, :longest].clone()
        if not self._config.return_dict_in_generate:
            return ids
        from transformers.generation import GenerateDecoderOnlyOutput

        num_new = longest - self._num_given
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=self._steps(self._scores, num_new, -torch.inf) if self._has_scores else None,
            logits=self._steps(self._logits, num_new, 0.0) if self._has_logits else None,
        )

    def _steps(self, rows: list[list[Tensor]], num_new: int, value: float) -> tuple[Tensor, ...]:
        """[B, V] for each new token. After the end of a row padding alone has a score."""
        filler = torch.full_like(rows[0][0], value)
        filler[self._pad_id] = 0.0
        return tuple(torch.stack([row[i] if i < len(row) else filler for row in rows]) for i in range(num_new))
