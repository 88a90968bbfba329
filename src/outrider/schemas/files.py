"""Schemas of files other than the documents of commands: prompts, lines of output, rounds, logs."""

from __future__ import annotations

from outrider.schemas.generate import DRAFT
from outrider.schemas.notation import Keys, Schema, extended, of, one_of, or_null, record
from outrider.schemas.run_options import CONSTRAINT, END
from outrider.schemas.titles import title_of

NUM_PROBS = of("integer or null", "N probabilities of each token; `null`: none")
_ROUNDS: Keys = {
    "index": of("integer", "of the prompt"),
    "category": of("string or null", "of the prompt"),
    "draft": DRAFT,
    "k": of("integer", "tokens drafted per round"),
    "acceptance": of("string", "rule"),
    "num_drafted": of("list of integer", "of each whole round"),
    "num_accepted": of("list of integer", "of each whole round"),
    "num_truncated_rounds": of("integer", "rounds cut short by the end"),
    "num_generated_tokens": of("integer", "tokens of output"),
}

FILES: dict[str, Schema] = {
    "prompts": {
        "description": "An object of a file of `--prompts`: JSON lines or an array. (A file may have plain prompts "
        "instead, a line each; the first line that is not blank decides; blank lines are ignored.) Fields of "
        "Spec-Bench, MT-bench, HumanEval, MBPP, GSM8K and HellaSwag are not read; all others are errors. `null` means "
        "none. Commands other than `generate` refuse sampling options here. Under `-k auto` a prompt with a `seed` "
        "keeps K = 4, so that its text does not depend on the others.",
        "type": "object",
        "properties": {
            "prompt": of("string", "text to continue"),
            "turns": of("list of string", "in place of it: the first is used (Spec-Bench)"),
            "messages": of("list of object", "in place of it: a chat, for the model's chat template"),
            "tools": of("list of object or null", "of a chat"),
            "documents": of("list of object or null", "of a chat"),
            "chat_template_kwargs": of("object or null", "of a chat; they go before the command's"),
            "continue_final_message": of("boolean or null", "of a chat"),
            "add_generation_prompt": of("boolean or null", "of a chat"),
            "category": of("string or null", "kind of prompt, repeated in the output"),
            "id": {"description": "any value, repeated in the output"},
            **{name: or_null(one) for name, one in {**END, **CONSTRAINT}.items()},
            "logit_bias": of("object or null", '`{"42": -5, "43": "-inf"}`'),
            "stop": of("string or list of string or null", "stop strings"),
            "bad_words": of("list of string or null", "text not to generate"),
            "seed": of("integer or null", "seed of this prompt"),
            "max_new_tokens": of("integer or null", "limit of output tokens"),
            "logprobs": of("integer or null", "number of most probable tokens to report"),
            "custom_id": {"description": "of OpenAI's batch form, repeated in the output"},
            "method": of("string", "of that form: `POST`"),
            "url": one_of("of that form", "/v1/chat/completions", "/v1/completions"),
            "body": of(
                "object",
                "of that form: read as [the server](../guides/serve.md) reads it, with one prompt and one text; "
                "options that it lacks are the command's, `max_tokens` included; `model` must be `--target`",
            ),
            "metadata": {"description": "your own notes, not read"},
        },
        "allOf": [of("own_sampling")],
        "anyOf": [{"required": [name]} for name in ("prompt", "turns", "messages", "body")],
    },
    "generate-output": extended(
        "A line of `generate --output FILE`, in the order in which prompts finish. "
        "[Long jobs](../guides/long-jobs.md#what-you-can-rely-on) says how a run is resumed.",
        ("completion",),
        {
            "settings": of("object", "options that the text depends on, the prompt's own too: `options` of `generate`"),
        },
    ),
    "rounds": record("A line of `replay --output FILE`: of a prompt, draft and K.", _ROUNDS),
    "log": record(
        "The header `log.json` of [a recording](logs.md).",
        {
            "schema": {"const": title_of("log"), "description": "name and version of the format"},
            "target": of("string", "its name"),
            "sampling": extended("options but the seed", ("log_sampling",)),
            "num_probs": NUM_PROBS,
            "vocab_size": of("integer", "V"),
            "context_len": of("integer", "of the target"),
            "eos_ids": of("list of integer", "end tokens"),
            "tokenizer": of("string or null", "SHA-256 of the JSON list of pairs [id, token] in order"),
            "settings": of("object", "other options that the output depends on"),
            "provenance": of("object", "[origin](#provenance) of the recording, where known"),
            "sha256": of("string", "of the rest as JSON with sorted keys"),
        },
    ),
    "log-index": record(
        "A line of `index.jsonl` of [a recording](logs.md).",
        {
            "index": of("integer", "of the prompt"),
            "prompt": of("string", "its text"),
            "category": of("string or null", "of the prompt"),
            "seed": of("integer", "`--seed` + index"),
            "finish_reason": one_of("why the text ended", "eos", "stop", "length"),
            "num_prompt_tokens": of("integer", "tokens of the prompt"),
            "num_tokens": of("integer", "tokens of output"),
            "shard": of("integer", "file of its tensors"),
            "sha256": of("string", "of the other fields and the tensors: [logs](logs.md)"),
        },
    ),
}
