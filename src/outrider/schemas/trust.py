"""Schemas of certificates and evaluations."""

from __future__ import annotations

from outrider.schemas.generate import BATCH_SIZE, CONTEXT, DRAFTS, IS_INTERRUPTED, MAX_NEW_TOKENS, PROMPTS, K
from outrider.schemas.notation import (
    Keys,
    Schema,
    document,
    extended,
    list_of,
    map_of,
    of,
    one_of,
    options,
    or_null,
    record,
)
from outrider.schemas.run_options import LOGIT_BIAS
from outrider.schemas.shared import GREEDY

_VERDICT = one_of("`inconclusive`: too little data", "passed", "failed", "inconclusive")
_NEEDED = of("integer or null", "about how many tokens would decide, where some number would")
_SIGNIFICANCE = of("number", "probability that a correct rule fails")
_DETECT_TV = of("number or null", "total variation to detect")
_OTHER = "speculative", "against"  # names of the arm beside plain decoding


def _of_other(one: Schema) -> Keys:
    """Keys of the other arm, which has one of two names."""
    return dict(
        zip(_OTHER, (one, one | {"description": "in place of it with `--against`: of that target"}), strict=True)
    )


_EXACT: Keys = {
    "num_contexts": of("integer", "contexts"),
    "num_rows": of("integer", "pairs of rows on which the identity was computed"),
    "identity": of("number or null", "largest deviation of a probability"),
    "round_law": of("number or null", "the same after a round; `gumbel`: share of noises that gave another token"),
    "distance": of("number or null", "mean total variation of p and q there"),
    "forcing": of(
        "number or null",
        "largest total variation between a token's distribution under teacher forcing and under a plain forward",
    ),
    "forcing_tolerance": of("number", "allowed for `forcing`"),
    "tolerance": of("number", "allowed for the others"),
    "is_ok": of("boolean", "all are within it"),
}
_TWO_ROUNDS: Keys = {
    "two_rounds": of(
        "number or null",
        "the same after two rounds; `gumbel`: share of the noise that is not a function of its position; older "
        "documents lack it",
    )
}
_CONTROL: Keys = {
    "name": of("string", "the mistake"),
    "about": of("string", "in words"),
    "excuse": of("string or null", "why it is ineffective here"),
    "is_caught": of("boolean", "whether it was detected"),
    "num_tokens": of("integer", "after as many"),
    "by": of("string or null", "test with the smallest p; `null` where texts were compared"),
    "p": of("number or null", "that p"),
    "num_tokens_needed": of("integer or null", "about as many would detect it, where it was not"),
}
_SCORE: Keys = {
    "num_solved": of("integer", "problems solved"),
    "num_prompts": of("integer", "problems"),
    "wald": of("interval", "the rate, with Wald's interval"),
    "wilson": of("interval", "the rate, with Wilson's interval"),
    "stats": of("stats"),
    "time_s": of("times"),
}
_PAIRED = extended(
    "the other arm minus plain, document by document; `null` where there is only one arm, or no number per document",
    ("difference",),
    {"is_different": of("boolean", "by Holm's procedure over all entries that are compared")},
)

DEFINED_BY_TRUST: dict[str, Schema] = {"score": record("Problems solved in one arm.", _SCORE)}
TRUST: dict[str, Schema] = {
    "certify": document(
        "certify",
        "A certificate ([certify](../guides/certify.md)); the exit code is 0 (passed), 1 (failed) or 3.",
        options(
            ("pair_options", "sampling_options", "constraint_options", "chat_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": K,
                "max_new_tokens": MAX_NEW_TOKENS,
                "prompts": PROMPTS,
                "significance": _SIGNIFICANCE,
                "budget": of("string or null", "time to spend"),
                "detect_tv": _DETECT_TV,
                "num_tokens": of("integer", "tokens to test, as used"),
                "batch_size": BATCH_SIZE,
            },
        ),
        {
            "verdict": _VERDICT,
            "is_certified": of("boolean", "whether it is `passed`"),
            "num_tokens_needed": _NEEDED,
            "is_idle": of(
                "boolean",
                "no drafted token was accepted, or no control can be effective with these options: then there was "
                "nothing to certify",
            ),
            "weights": record(
                "SHA-256 of the weights in memory",
                {"target": of("string", "the target's"), "draft": of("string or null", "`null` for a look-up")},
            ),
            "prompts_sha256": of("string", "of the token ids of the prompts"),
            "exact": record("deviations from the law, computed", _EXACT, _TWO_ROUNDS),
            "statistical": of("statistical or null", "`null` at temperature 0"),
            "controls": list_of(record("", _CONTROL), "deliberate mistakes, which must be detected"),
            "greedy": list_of(
                extended("", ("greedy",)), "one entry at temperature 0, and for `gumbel` one with its noise"
            ),
        },
    ),
    "certify-samples": document(
        "certify-samples",
        "Samples of another system against a target.",
        options(
            ("pair_options", "sampling_options"),
            {
                "draft": DRAFTS,
                "file": of("string", "the samples"),
                "significance": _SIGNIFICANCE,
                "detect_tv": _DETECT_TV,
                "batch_size": BATCH_SIZE,
            },
        ),
        {
            "verdict": _VERDICT,
            "is_consistent": of("boolean", "whether it is `passed`"),
            "num_tokens_needed": _NEEDED,
            "is_text": of("boolean", "whether texts had to be tokenized again"),
            "shared_options": extended(
                "sampling options that are the same for all texts; others differ",
                ("own_sampling",),
                {},
                {"logit_bias": LOGIT_BIAS},
            ),
            "num_repeats": of("integer", "sampled texts equal to an earlier one of the same prompt"),
            "statistical": of("statistical or null", "of the sampled texts, if any"),
            "greedy": list_of(extended("", ("greedy",)), "of the texts of temperature 0"),
        },
    ),
    "divergence": document(
        "divergence",
        "Where speculative and plain decoding diverge.",
        options(
            ("pair_options", "sampling_options", "chat_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": K,
                "max_new_tokens": MAX_NEW_TOKENS,
                "prompts": PROMPTS,
                "batch_size": BATCH_SIZE,
            },
        ),
        GREEDY,
    ),
    "eval-multiplication": document(
        "eval-multiplication",
        "Problems solved with and without a draft.",
        options(
            ("pair_options", "sampling_options"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": K,
                "num_prompts": of("integer", "problems"),
                "batch_size": BATCH_SIZE,
                "margin": of("number", "of equivalence"),
            },
        ),
        {
            "scores": record(
                "of both arms",
                {"plain": of("score", "without a draft"), "speculative": of("score", "with it")},
            ),
            "difference": extended("speculative minus plain", ("difference",)),
            "num_to_decide": of(
                "integer",
                "problems at which arms that differ in as large a share of them, and in no direction, are found "
                "equivalent with a probability of about 0.95",
            ),
            "problems": list_of(
                record(
                    "",
                    {
                        "a": of("integer", "first factor"),
                        "b": of("integer", "second factor"),
                        "plain": of("string", "text without a draft"),
                        "speculative": of("string", "text with it"),
                    },
                ),
                "of each problem",
            ),
        },
    ),
    "eval-harness": document(
        "eval-harness",
        "Tasks of lm-evaluation-harness ([evals](../guides/evals.md)).",
        options(
            ("pair_options", "chat_options", "own_sampling"),
            {
                "draft": DRAFTS,
                "num_draft_tokens": K,
                "logit_bias": LOGIT_BIAS,
                "max_new_tokens": of("integer or null", "limit; `null`: the task's own"),
                "seed": of("integer", "seed"),
                "tasks": of("list of string", "names"),
                "include_path": of("string or null", "folder with more tasks"),
                "limit": of("integer or null", "documents of each task"),
                "num_fewshot": of("integer or null", "examples; `null`: the task's own"),
                "batch_size": BATCH_SIZE,
                "margin": of("number", "of equivalence"),
                "against": of("string or null", "another target, to compare with"),
            },
        ),
        {
            "scores": list_of(
                record(
                    "",
                    {
                        "task": of("string", "task or group"),
                        "weighting": one_of("of the tasks in a group; `null` for a task", "size", "equal", None),
                        "metric": of("string", "the harness's name"),
                        "filter": of("string", "with which the harness extracts the answer"),
                        "num_documents": of("integer", "documents"),
                        "plain": of("number", "the harness's own score"),
                        "paired": or_null(_PAIRED),
                    },
                    _of_other(of("number or null", "the harness's own score; `null` without a draft")),
                    either=_OTHER,
                ),
                "of each task or group, metric and filter; groups last",
            ),
            "verdict": or_null(
                record(
                    "of all entries that are compared; each claim errs with a probability of at most 5%; `null` if "
                    "none is compared",
                    {
                        "num_compared": of("integer", "entries compared"),
                        "num_equivalent": of("integer", "each by itself"),
                        "num_different": of("integer", "by Holm's procedure"),
                        "is_equivalent": of("boolean", "all are"),
                        "is_different": of("boolean", "any is"),
                    },
                )
            ),
            "tasks": list_of(
                record(
                    "",
                    {
                        "task": of("string", "name"),
                        "output_type": of("string", "the harness's name"),
                        "num_fewshot": of("integer or null", "examples"),
                        "plain": of("stats or null", "of its generation"),
                    },
                    _of_other(of("stats or null", "the same with a draft")),
                    either=_OTHER,
                ),
                "of each task",
            ),
            "groups": list_of(
                record("", {"group": of("string", "name"), "tasks": of("list of string", "in it")}),
                "of each requested group and subgroup",
            ),
            "documents": list_of(
                record(
                    "",
                    {
                        "task": of("string", "name"),
                        "doc_id": of("integer", "the harness's number"),
                        "texts": or_null(map_of({}, "by arm: text generated for each request; `null` with one arm")),
                        "numbers": list_of(
                            record(
                                "",
                                {
                                    "metric": of("string", "the harness's name"),
                                    "filter": of("string", "the harness's name"),
                                    "plain": of("number or null", "its number"),
                                },
                                _of_other(of("number or null", "the same with a draft")),
                            ),
                            "of each metric and filter",
                        ),
                    },
                ),
                "of each document of each task",
            ),
            "is_interrupted": IS_INTERRUPTED,
        },
    ),
    "eval-perplexity": document(
        "eval-perplexity",
        "Perplexity of a text.",
        options(
            ("pair_options",),
            {
                "draft": DRAFTS,
                "file": of("string", "the text"),
                "context": CONTEXT,
                "stride": of("integer", "tokens from window to window"),
                "batch_size": BATCH_SIZE,
            },
        ),
        {
            "perplexities": list_of(
                record(
                    "",
                    {
                        "model": of("string", "its name"),
                        "nats_per_token": of("interval", "mean of -log p"),
                        "perplexity": of("interval", "its exponential"),
                        "byte_perplexity": of("interval", "the same over bytes"),
                        "bits_per_byte": of("interval", "bits"),
                    },
                ),
                "of the target, then of the draft, if it is a model",
            ),
            "agreement": of("interval or null", "share of tokens before which both have the same most probable token"),
            "alpha": of("interval or null", "mean of sum min(p, q) at temperature 1; `null` without a draft model"),
            "num_windows": of("integer", "windows that the intervals are over"),
            "num_tokens": of("integer", "scored tokens: all but the first"),
            "num_bytes": of("integer", "their UTF-8 bytes"),
        },
    ),
}
