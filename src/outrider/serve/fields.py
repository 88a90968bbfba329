"""Request fields: OpenAI's, those of other servers that are supported, and those that are refused.

A field that may change the output is honoured or refused by name. Unknown fields are refused too, as OpenAI does;
fields known to be harmless are listed. ``null`` requests nothing.

Sources: OpenAI's API reference (completions, chat completions); vLLM's "extra parameters" of both; the native fields of
SGLang, llama.cpp's server, and Transformers' generation options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.serve.http_errors import Refusal
from outrider.serve.structured import STRUCTURED
from outrider.text.chat import FIELDS as CHAT_FIELDS

# Fields passed to ``Sampling`` under their own names.
SAMPLING = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop_token_ids", "bad_words", "ignore_eos"),
)

# Fields for the chat template.
CHAT = {*CHAT_FIELDS, "reasoning_effort"} - {"tools"}

# Aliases.
_ALSO_CALLED = {
    "max_tokens": ("max_completion_tokens", "max_new_tokens", "n_predict"),
    "min_tokens": ("min_new_tokens",),
    "repetition_penalty": ("repeat_penalty",),
}

# Known but unsupported fields, with the values that request nothing.
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    # OpenAI; some are supported at one endpoint only
    "suffix": ("",),
    "echo": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True, False),
    "separate_reasoning": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    # vLLM
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "prompt_embeds": (),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "spaces_between_special_tokens": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "return_token_ids": (False,),
    "lora_request": (),
    "enable_thinking": (),
    # SGLang
    "lora_path": (),
    "stop_regex": ([],),
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
    "custom_logit_processor": (),
    # llama.cpp
    "repeat_last_n": (-1,),  # the penalty sees the whole sequence
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "xtc_probability": (0,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "min_keep": (0,),
    "n_probs": (0,),
    "n_indent": (0,),
    "samplers": (),
    "lora": ([],),
    # Transformers
    "do_sample": (True,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0,),
    "guidance_scale": (1,),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "bad_words_ids": ([],),
}
# Known fields without effect on the output.
_WITHOUT_EFFECT = {
    # OpenAI
    *("user", "store", "metadata", "service_tier", "prediction", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "moderation"),
    # vLLM, SGLang
    *("request_id", "cache_salt", "stream_reasoning", "rid"),
    # llama.cpp; the last ones belong to samplers of the list above
    *("cache_prompt", "id_slot", "n_keep", "n_discard", "timings_per_token", "return_progress", "use_cache"),
    *("xtc_threshold", "dynatemp_exponent", "mirostat_tau", "mirostat_eta"),
    *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
}
_COMMON = {
    *SAMPLING,
    *_ALSO_CALLED,
    *(other for others in _ALSO_CALLED.values() for other in others),
    *("model", "stream", "stream_options", "n", "best_of", "stop", "seed", "top_k", "logit_bias", "logprobs"),
    *("return_tokens_as_token_ids", "priority", "skip_special_tokens", "truncate_prompt_tokens", "allowed_token_ids"),
    *("prompt_logprobs", "include_stop_str_in_output", "add_special_tokens"),
    *STRUCTURED,
    *("acceptance", "num_draft_tokens", "draft"),
}
_OF_OUTPUT = ("tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "separate_reasoning")
_KNOWN = {
    "completions": {*_COMMON, "prompt", "echo"},
    "chat": {*_COMMON, "messages", "top_logprobs", *CHAT, *_OF_OUTPUT},
    "tokenize": {"model", "prompt", "messages", "add_special_tokens", "return_token_strs", "tools", *CHAT},
    "detokenize": {"model", "tokens"},
}


def check_names(body: Mapping[str, Any], kind: str) -> None:
    """Refuse unsupported fields. Raises Refusal."""
    for name, value in body.items():
        if value is None or name in _KNOWN[kind] or name in _WITHOUT_EFFECT:
            continue
        if name not in _NOT_SERVED:
            raise Refusal(f"unknown field {name!r:.60}: leave it out", param=name)
        if value not in _NOT_SERVED[name]:
            raise Refusal(f"{name} = {value!r:.60} is not supported: leave it out", param=name)


def given_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Map each field to the alias that the body uses. Raises Refusal if two aliases have different values."""
    found = {}
    for name, others in _ALSO_CALLED.items():
        given = [one for one in (name, *others) if body.get(one) is not None]
        for one in given[1:]:
            if body[one] != body[given[0]]:
                raise Refusal(f"{given[0]} and {one} are aliases of one field: give one", param=one)
        found[name] = given[0] if given else name
    return found
