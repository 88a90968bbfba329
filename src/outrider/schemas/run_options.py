"""Options that several commands have, as their documents repeat them."""

from __future__ import annotations

from outrider.schemas.notation import Keys, Schema, group, map_of, of, one_of, or_null

_MODELS: Keys = {
    "models": of("string or null", "file with more model names"),
    "device": of("string", "the target's"),
    "dtype": of("string", "the target's"),
}
_PLACEMENT: Keys = {
    "quantize": of("string or null", "quantization of the target"),
    "device_map": of("string or null", "spread over devices"),
    "max_memory": of("string or null", "limits for it"),
    "store": of("string or null", "of weights: `auto` or `plain`"),
}
_RUN: Keys = {
    "threads": of("integer or null", "CPU threads; `null`: the default"),
    "compile": of("boolean or null", "`null`: decided by the amount of work"),
}
ALLOW_PICKLE: Keys = {"allow_pickle": of("boolean", "read pickled weights, too")}
_RULE = one_of("rule", "block", "rejection", "gumbel", "match")
SAMPLING: Keys = {
    "temperature": of("number", "0 is greedy"),
    "top_k": of("integer", "0: off"),
    "top_p": of("number", "1: off"),
    "min_p": of("number", "0: off"),
    "repetition_penalty": of("number", "1: off"),
    "presence_penalty": of("number", "0: off"),
    "frequency_penalty": of("number", "0: off"),
    "min_tokens": of("integer", "before the text may end"),
}
LOGIT_BIAS = of("list of string or null", "like `5=-inf`")
_LATER = "presence_penalty", "frequency_penalty", "min_tokens"  # in logs only where used
END: Keys = {
    "stop": of("list of string", "stop strings"),
    "stop_token_ids": of("list of integer", "stop tokens"),
    "ignore_eos": of("boolean", "continue after an end token"),
}
CONSTRAINT: Keys = {
    "json_schema": of("object or boolean or null", "the schema itself"),
    "regex": of("string or null", "regular expression"),
    "grammar": of("string or null", "the grammar itself"),
}

GROUPS: dict[str, Schema] = {
    "machine_options": group("Of one model and the machine.", {**_MODELS, **_PLACEMENT, **_RUN, **ALLOW_PICKLE}),
    "pair_options": group(
        "Of the models and the machine; `draft_...` are of the draft.",
        {
            "target": of("string", "name, folder or hub id"),
            "acceptance": _RULE,
            **_MODELS,
            **_PLACEMENT,
            **{
                f"draft_{name}": of("string or null", "`null`: as the target's")
                for name in ("device", "dtype", "quantize", "device_map", "max_memory")
            },
            **_RUN,
        },
        {"corpus": of("list of string", "files that `suffix` looks up, where given"), **ALLOW_PICKLE},
    ),
    "sampling_options": group(
        "Of sampling.", {**SAMPLING, "logit_bias": LOGIT_BIAS, "seed": of("integer or null", "`null`: drawn")}
    ),
    "end_options": group("Of the end of a text.", END),
    "constraint_options": group(
        "Constraints of the text.", CONSTRAINT, {"bad_words": of("list of string", "text not to generate, where given")}
    ),
    "chat_options": group(
        "Of chats.",
        {"chat": of("boolean", "whether prompts are messages for the model's chat template")},
        {
            "system": of("string", "system message, where given"),
            "chat_template_kwargs": of("object or string", "for the template, where given"),
        },
    ),
    "own_sampling": group(
        "Sampling options of a prompt or task: those that it has; `null`: none of its own.",
        {},
        {name: or_null(one) for name, one in SAMPLING.items()},
    ),
    "log_sampling": group(
        "Sampling options of a log.",
        {
            **{name: one for name, one in SAMPLING.items() if name not in _LATER},
            "logit_bias": or_null(map_of(of("string"), "by token, as text: JSON has no -inf")),
            "stop": END["stop"],
            "max_new_tokens": of("integer", "limit of output tokens"),
            "ignore_eos": END["ignore_eos"],
        },
        {**{name: SAMPLING[name] for name in _LATER}, "stop_token_ids": END["stop_token_ids"]},
    ),
}
