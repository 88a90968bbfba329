"""Schemas of the commands that help to choose a draft, and of logs and rounds."""

from __future__ import annotations

from outrider.schemas.files import NUM_PROBS
from outrider.schemas.generate import (
    BATCH_SIZE,
    CONTEXT,
    DRAFT,
    DRAFTS,
    IS_INTERRUPTED,
    KS,
    MAX_NEW_TOKENS,
    PROMPTS,
)
from outrider.schemas.notation import (
    Keys,
    Schema,
    document,
    extended,
    group,
    list_of,
    of,
    one_of,
    options,
    or_null,
    record,
)
from outrider.schemas.run_options import ALLOW_PICKLE

_FORM = of("string", "type of the weights")
_KNOWN: Keys = {
    "name": of("string", "name"),
    "location": of("string", "folder or hub id"),
    "source": of("string", "where the name was defined"),
    "about": of("string", "in a few words"),
    "dtype": _FORM,
    "quantization": of("string or null", "as defined"),
    "device": of("string or null", "as defined"),
}
_SIZES: Keys = {  # where they are known
    "num_params": of("integer", "parameters"),
    "context_len": of("integer", "longest sequence"),
    "weights_bytes": of("integer", "size of the weights"),
    "cache_bytes": of("integer", "of `cache_tokens`, eager"),
    "cache_bytes_compiled": of("integer", "the same, compiled"),
    "cache_tokens": of("integer", "tokens of the cache"),
}
_PREDICTED: Keys = {
    "name": of("string", "name"),
    "dtype": _FORM,
    "quantization": of("string", "form of the weights"),
    "num_devices": of("integer", "devices that share it"),
    "weights_bytes": of("integer", "for each device"),
    "cache_bytes": of("integer", "for each device"),
    "prefill_bytes": of(
        "integer or null", "the most that such a step needs; `null` for heads, and if it depends on numbers"
    ),
    "verify_bytes": of("integer or null", "the same"),
    "total_bytes": of("integer", "with the larger of both"),
    "fits_here": of("boolean or null", "whether that is free on this machine's devices"),
}
_PAIR: Keys = {
    "target": of("string", "name"),
    "form": of("string", "its dtype, or a quantization"),
    "draft": DRAFT,
    "size_ratio": of("number", "draft over target"),
    "total_bytes": of("integer", "both, with caches"),
}
_MODELS_OPTIONS: Keys = {
    "models": of("string or null", "file with more names"),
    "batch_size": BATCH_SIZE,
    "dtype": of("string", "where a model has none of its own"),
    "context": CONTEXT,
}
_EXPECTED: Keys = {
    "tau": of("interval or null", "tokens per round, over the prompts"),
    "stats": of("stats", "expected counts"),
    "positions": of("list of position"),
}
_ANALYSIS = group(
    "Rounds of some prompts.",
    {
        "num_prompts": of("integer", "prompts with rounds of it"),
        "tau": of("interval or null", "tokens per round, over all rounds; interval over the prompts"),
        "prompt_tau": of("number or null", "mean of the prompts' own"),
        "stats": of("stats"),
        "positions": of("list of position_with_intervals"),
    },
)

DEFINED_BY_CHOOSE: dict[str, Schema] = {
    "known_model": record("A model that has a name.", _KNOWN, _SIZES),
    "analysis": _ANALYSIS,
    "expected": group("Rounds of a draft and K, expected.", _EXPECTED),
    "predicted_model": record("Predicted memory of a model in one form.", _PREDICTED),
}
CHOOSE: dict[str, Schema] = {
    "models": {
        "description": "Known models; with `--target`, predicted memory; with `--memory`, pairs that fit.",
        "oneOf": [
            document(
                "models",
                "Known models, or with `--target` one entry for each model, quantization and number of devices.",
                options(
                    (),
                    _MODELS_OPTIONS,
                    {
                        "target": of("string", "with `--target`"),
                        "draft": of("string or null", "with `--target`"),
                        "num_draft_tokens": of("integer", "with `--target`"),
                        "devices": of("list of integer", "with `--target`: numbers of devices"),
                    },
                ),
                {
                    "models": list_of(of("known_model or predicted_model"), "of each name"),
                },
            ),
            document(
                "models",
                "With `--memory`.",
                options(
                    (),
                    {
                        **_MODELS_OPTIONS,
                        "target": of("string or null", "only its pairs"),
                        "memory": of("string", "size, like 24GiB"),
                    },
                ),
                {"pairs": list_of(record("", _PAIR), "pairs that fit")},
            ),
        ],
    },
    "plan": {
        "description": "Predicted speed of each draft and K.",
        "oneOf": [
            document(
                "plan",
                "From measured costs and acceptance.",
                options(
                    ("pair_options", "sampling_options", "chat_options"),
                    {
                        "draft": DRAFTS,
                        "num_draft_tokens": KS,
                        "max_new_tokens": MAX_NEW_TOKENS,
                        "prompts": PROMPTS,
                        "log": of("string or null", "recording that the acceptance is of"),
                        "batch_size": of("list of integer", "texts at once"),
                        "context": of("list of integer", "tokens of a sequence"),
                    },
                ),
                {
                    "settings": list_of(
                        record(
                            "",
                            {
                                "num_rows": of("integer", "texts at once"),
                                "context": CONTEXT,
                                "prefill_ms": of("number", "of all rows"),
                                "plain_ms": of("number", "a round without drafts"),
                                "target_ms": list_of(
                                    record(
                                        "", {"num_tokens": of("integer", "in a row"), "ms": of("number", "its forward")}
                                    ),
                                    "the target's forwards",
                                ),
                                "draft_ms": list_of(
                                    record("", {"draft": DRAFT, "ms": of("number", "of a drafted token")}),
                                    "the drafts' steps",
                                ),
                                "choices": of("list of choice", "the fastest first"),
                                "best": of(
                                    "choice or null", "the first; `null` where none is faster than plain decoding"
                                ),
                            },
                        ),
                        "of each batch size and context",
                    ),
                    "measured": of(
                        "list of arm", "with `--measure`: plain decoding, each draft at K = 1, 2, 4, 8, and the best"
                    ),
                    "predicted": of(
                        "list of choice", "with `--measure`: again, from rounds timed between those prompts"
                    ),
                    "is_interrupted": IS_INTERRUPTED,
                },
            ),
            document(
                "plan",
                "From numbers (`--what-if`).",
                options(
                    (),
                    {
                        "what_if": record(
                            "the numbers",
                            {
                                "alpha": of("number", "mean acceptance probability"),
                                "c": of("number", "cost of a draft step over one of the target"),
                                "v": of("number", "cost of a verification over one step of the target"),
                                "c_ops": of("number", "as c, in arithmetic"),
                            },
                        ),
                        "num_draft_tokens": KS,
                    },
                ),
                {
                    "predictions": of("list of prediction", "of each K"),
                    "best": of("prediction or null", "the fastest; `null` where none is faster than plain decoding"),
                    "limits": record(
                        "the best",
                        {
                            "free": of("prediction or null", "if the draft took no time"),
                            "agreeing": of("prediction or null", "if it always agreed"),
                        },
                    ),
                },
            ),
        ],
    },
    "alpha": document(
        "alpha",
        "Agreement of target and drafts on texts.",
        options(
            ("pair_options", "chat_options"),
            {
                "draft": DRAFTS,
                "temperatures": of("list of number", "each temperature"),
                "top_ps": of("list of number", "each top-p"),
                "prompts": PROMPTS,
                "batch_size": BATCH_SIZE,
            },
        ),
        {
            "alphas": list_of(
                record(
                    "",
                    {
                        "draft": DRAFT,
                        "temperature": of("number", "of both"),
                        "top_p": of("number", "of both"),
                        "alpha": of("interval", "mean of sum min(p, q), over the texts"),
                        "num_tokens": of("integer", "tokens scored"),
                        "by_offset": of(
                            "list of interval or null", "of the first, second ... token of a round, where these differ"
                        ),
                    },
                ),
                "of each draft and setting",
            )
        },
    ),
    "replay": document(
        "replay",
        "Acceptance of drafts, expected given a log's texts ([record and replay](../guides/record-and-replay.md)).",
        options(
            (),
            {
                "target": of("string or null", "loaded for heads"),
                "draft": DRAFTS,
                "acceptance": of("string", "rule"),
                "num_draft_tokens": KS,
                "models": of("string or null", "file with more model names"),
                "corpus": of("list of string or null", "files that `suffix` looks up"),
                "device": of("string", "the drafts'"),
                "dtype": of("string", "the drafts'"),
                "threads": of("integer or null", "CPU threads"),
                **ALLOW_PICKLE,
                "log": of("string", "its folder or file"),
                "format": one_of("of the log", "outrider", "tensors"),
                "prompts": of("string or null", "of a log of tensors"),
                "tokenizer_of": of("string or null", "of a log of tensors"),
                "batch_size": BATCH_SIZE,
                "seed": of("integer", "of `--output`"),
            },
        ),
        {
            "target": of("string", "of the log"),
            "num_prompts": of("integer", "in the log"),
            "log_options": extended("of the log", ("log_sampling",), {"num_probs": NUM_PROBS}),
            "drafts": list_of(
                record(
                    "",
                    {
                        "draft": DRAFT,
                        "alpha": or_null(
                            record(
                                "`null` without probabilities",
                                {
                                    "low": of("interval", "bound, given the recorded part of p"),
                                    "high": of("interval", "bound"),
                                    "estimate": of("interval", "from the tokens' own probabilities alone"),
                                },
                            )
                        ),
                    },
                ),
                "of each draft",
            ),
            "arms": list_of(
                extended(
                    "",
                    ("expected",),
                    {
                        "draft": DRAFT,
                        "k": of("integer", "tokens drafted per round"),
                        "acceptance": of("string", "rule"),
                        "upper": or_null(
                            extended(
                                "where the log gives only bounds (`gumbel`): the upper ones, and those beside are the "
                                "lower",
                                ("expected",),
                            )
                        ),
                    },
                ),
                "of each draft and K",
            ),
        },
    ),
    "analyze": document(
        "analyze",
        "Acceptance in files of rounds.",
        options(
            (),
            {
                "file": of("string", "the rounds"),
                "tokens_per_prompt": of("integer or null", "of every prompt, where the file does not say"),
                "num_draft_tokens": of("integer or null", "K, where the file does not say"),
            },
        ),
        {
            "arms": list_of(
                extended(
                    "",
                    ("analysis",),
                    {
                        "draft": of("string or null", "`null` where unknown"),
                        "k": of("k or null", "`null` where unknown"),
                        "acceptance": of("string or null", "rule; `null` where unknown"),
                        "categories": list_of(
                            extended("", ("analysis",), {"category": of("string", "of the prompts")}),
                            "the same of each",
                        ),
                        "prompts": list_of(
                            record(
                                "",
                                {
                                    "index": of("integer", "of the prompt"),
                                    "category": of("string or null", "of the prompt"),
                                    "stats": of("stats"),
                                },
                            ),
                            "of each prompt",
                        ),
                    },
                ),
                "of each draft, K and rule in the file",
            ),
            "notes": of("list of string", "assumptions that had to be made"),
        },
    ),
    "shapes": document(
        "shapes",
        "Shapes of drafts, before they are trained.",
        options(
            ("machine_options",),
            {
                "target": of("string", "name, folder or hub id"),
                "shape": of("list of string or null", "like 2x192"),
                "budget_ms": of("number or null", "limit of a drafted token"),
                "batch_size": BATCH_SIZE,
                "context": CONTEXT,
            },
        ),
        {
            "shapes": list_of(
                record(
                    "",
                    {
                        "layers": of("integer", "number of layers"),
                        "hidden_size": of("integer", "width"),
                        "intermediate_size": of("integer or null", "of the feed-forward part; `null`: in proportion"),
                        "num_params": of("integer", "parameters"),
                        "draft_ms": of("number", "a drafted token"),
                        "break_even_alpha": of(
                            "number or null", "least alpha at which it is as fast as plain decoding; `null`: none is"
                        ),
                        "is_worth_training": of("boolean", "whether no shape as large is faster, within the budget"),
                    },
                ),
                "of each shape",
            )
        },
    ),
}
