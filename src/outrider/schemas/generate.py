"""Schemas of the commands that generate and measure, and of the files of ``generate``."""

from __future__ import annotations

from outrider.schemas.notation import Schema, document, extended, list_of, map_of, of, options, or_null, record

K = of("k")
KS = of("list of k", "each K")
DRAFT = of("string", "its name")
DRAFTS = of("list of string", "names")
BATCH_SIZE = of("integer", "texts at once")
MAX_NEW_TOKENS = of("integer", "limit of output tokens")
IS_INTERRUPTED = of("boolean", "whether Ctrl-C ended the run (exit code 130); completed parts are reported")
BASELINE = of("string", "name of the arm that the others are compared with")
PROMPTS = of("string or null", "file; `null`: built-in prompts")
CONTEXT = of("integer", "tokens of a sequence")

GENERATE: dict[str, Schema] = {
    "generate": document(
        "generate",
        "Completions, or where they are.",
        options(
            ("pair_options", "sampling_options", "end_options", "constraint_options", "chat_options"),
            {
                "draft": DRAFT,
                "num_draft_tokens": K,
                "max_new_tokens": MAX_NEW_TOKENS,
                "logprobs": of("integer or null", "number of most probable tokens to report"),
                "shard": of("string or null", "part of the file; `null`: the whole"),
            },
        ),
        {
            "completions": or_null(
                list_of(
                    extended("", ("completion",)),
                    "of each prompt of this run; `null` with `--output`: they are in that file, and memory need not "
                    "hold them",
                )
            ),
            "num_failed": of(
                "integer",
                "prompts that ended in an error, those of earlier runs with this `--output` too (exit code 1)",
            ),
            "skipped": list_of(
                record(
                    "",
                    {
                        "index": of("integer", "its place among the rows, from 0"),
                        "place": of("string", "`line 4`, or `item 4` of an array"),
                        "error": of("string", "why"),
                    },
                ),
                "with `--skip-invalid`: rows (of this shard) that cannot be continued (exit code 1)",
            ),
            "tokens_per_s": of("number", "prefill included"),
            "stats": of("stats", "sum over the prompts of this run"),
            "time_s": of("times", "with `--prompts` only `total` is known"),
            "is_interrupted": IS_INTERRUPTED,
        },
    ),
    "compare": document(
        "compare",
        "Plain and speculative decoding of one prompt.",
        options(
            ("pair_options", "sampling_options", "end_options", "chat_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": KS,
                "max_new_tokens": MAX_NEW_TOKENS,
                "prompt": of("string", "text"),
                "num_runs": of("integer", "measured runs of each arm"),
            },
        ),
        {
            "arms": of("list of arm", "plain decoding first, then each draft at each K"),
            "baseline": BASELINE,
            "texts": map_of(of("string"), "by arm, in the race that is shown"),
            "same_model_checks": list_of(
                record(
                    "",
                    {
                        "draft": DRAFT,
                        "num_rejected": of("integer", "rejected tokens"),
                        "num_by_rounding": of("integer", "of these, with p/q within rounding of 1"),
                        "worst_ratio": of("number or null", "the p/q farthest from 1"),
                        "is_ok": of("boolean", "rounding explains all"),
                        "message": of("string", "the same in words"),
                    },
                ),
                "of each draft that is the target itself",
            ),
            "is_interrupted": IS_INTERRUPTED,
        },
    ),
    "latency": document(
        "latency",
        "Times of the target alone, the drafts alone, and the pairs.",
        options(
            ("pair_options", "sampling_options", "chat_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": KS,
                "max_new_tokens": MAX_NEW_TOKENS,
                "ignore_eos": of("boolean", "always: all arms generate as many tokens"),
            },
        ),
        {
            "arms": of("list of arm", "the target alone, each draft model alone, then each draft at each K"),
            "baseline": BASELINE,
            "num_prompts": of("integer", "prompts measured"),
            "is_interrupted": IS_INTERRUPTED,
            "peak_memory_bytes": of("integer or null", "of the CUDA device, else of the process"),
        },
    ),
    "compile": document(
        "compile",
        "Programs compiled ahead of time.",
        options(
            ("pair_options", "sampling_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": KS,
                "slots": of("integer", "concurrent sequences"),
                "context": CONTEXT,
            },
        ),
        {
            "programs": list_of(
                record(
                    "",
                    {
                        "step": of("string", "which, and of which model"),
                        "was_found": of("boolean", "on disk"),
                    },
                ),
                "the programs",
            ),
            "seconds": of("number", "for all of them"),
        },
    ),
    "costs": document(
        "costs",
        "Costs of rounds, as measured earlier on this machine.",
        options(
            (),
            {
                "target": of("string or null", "only its"),
                "draft": of("string or null", "only its"),
                "clear": of("boolean", "delete them"),
            },
        ),
        {
            "costs": list_of(
                record(
                    "",
                    {
                        "target": of("string", "name of the model"),
                        "draft": DRAFT,
                        "acceptance": of("string", "rule"),
                        "num_rows": of("integer", "texts at once"),
                        "dtype": of("string", "of the target"),
                        "execution": of("string", "eager, compiled or captured"),
                        "device": of("string", "the target's"),
                        "processor": of("string", "its model"),
                        "num_threads": of("integer", "CPU threads"),
                        "torch": of("string", "version"),
                        "measured_at": of("string", "UTC"),
                        "is_used": of("boolean", "not so once they are 30 days old, or an hour if there is a doubt"),
                        "doubt": of("string or null", "why they cannot be correct"),
                        "load": of("number or null", "average load of the system then"),
                        "by_k": list_of(
                            record(
                                "",
                                {
                                    "k": of("integer", "tokens drafted per round"),
                                    "round_ms": of("number", "a round"),
                                    "spread": of("number or null", "interquartile range over the median"),
                                    "num_rounds": of("integer", "rounds timed"),
                                },
                            ),
                            "of each K",
                        ),
                        "file": of("string", "where they are"),
                    },
                ),
                "of each file",
            ),
            "num_unreadable": of("integer", "files that cannot be read, or of other versions"),
        },
    ),
}
