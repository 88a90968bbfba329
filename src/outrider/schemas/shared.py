"""Definitions that several schemas share."""

from __future__ import annotations

from outrider.schemas.notation import Keys, Schema, anything, group, list_of, of, one_of, pair_of, record

_STATS: Keys = {
    "mean_acceptance_length": of(
        "number or null", "tokens committed per round (tau), correction or bonus included; 1.0 is plain decoding"
    ),
    "draft_acceptance_rate": of("number or null", "accepted / drafted"),
    "acceptance_histogram": of("list of number", "at index i, the rounds with exactly i accepted tokens"),
    "drafted_histogram": of("list of number", "at index i, the rounds with exactly i drafted tokens"),
    "num_rounds": of("number", "draft-verify-commit cycles"),
    "num_truncated_rounds": of("number", "cycles cut short by the end of the sequence"),
    "num_draft_tokens": of("number", "drafted tokens"),
    "num_accepted_draft_tokens": of("number", "accepted drafted tokens"),
    "num_generated_tokens": of("number", "tokens of output"),
}
_ARM: Keys = {
    "name": of("string", "name of the arm"),
    "draft": of("string or null", "`null` for plain decoding"),
    "k": of("k or null", "`null` for plain decoding"),
    "num_cases": of("integer", "prompts or runs measured"),
    "ms_per_token": of("mean_and_spread", "of decoding, without the prefill"),
    "total_ms_per_token": of("mean_and_spread", "the same with the prefill"),
    "prefill_ms": of("mean_and_spread", "of one prompt"),
    "tokens_per_s": of("number", "of decoding, all cases together"),
    "speed_up": of("interval or null", "of decoding, over the baseline on the same cases; `null` for the baseline"),
    "total_speed_up": of("interval or null", "the same with the prefill"),
    "stats": of("stats", "sum over the cases"),
    "time_s": of("times", "sum over the cases"),
}
_POSITION: Keys = {
    "position": of("integer", "i, from 1"),
    "num_drafted": of("number", "rounds that drafted at least i tokens"),
    "num_judged": of("number", "of these, rounds in which all tokens before it were accepted"),
    "num_accepted": of("number", "rounds in which it was accepted too"),
}
_CONDITIONAL, _UNCONDITIONAL = "accepted / judged", "accepted / drafted"
_PROVENANCE: Keys = {
    "outrider": of("string", "version"),
    "commit": of("string or null", "of the checkout; `null` for an installed package"),
    "python": of("string", "version"),
    "torch": of("string", "version"),
    "transformers": of("string", "version"),
    "platform": of("string", "system and architecture"),
    "processor": of("string", "its model"),
    "device": of("string", "on which the target ran"),
    "num_threads": of("integer", "CPU threads"),
    "num_processes": of("integer", "processes that share the target"),
    "argv": of("list of string", "words of the command line"),
    "time": of("string", "UTC"),
}
_DIFFERENCE: Keys = {
    "only_first": of("integer", "problems solved by plain decoding alone; documents in which it had the higher number"),
    "only_second": of("integer", "the same of the other arm"),
    "difference": of("interval", "the other arm minus plain"),
    "margin": of("number", "differences below it do not matter"),
    "tost_p": of("number", "p of two one-sided tests against a difference of at least the margin"),
    "difference_p": of("number", "p against no difference at all"),
    "is_equivalent": of("boolean", "whether `tost_p` is below 0.05"),
}
_COMPLETION: Keys = {
    "index": of("integer", "place of the prompt in the file, from 0, with `--shard` too"),
    "prompt_ids": of("list of integer", "its tokens"),
    "text": of("string", "without special tokens and stop string; empty after an error"),
    "token_ids": of("list of integer", "output, with its end token"),
    "origins": list_of(one_of("", "accepted", "correction", "bonus"), "of each token"),
    "finish_reason": one_of("`null` if interrupted", "eos", "stop", "length", "error", None),
    "stats": of("stats"),
    "seed": of("integer or null", "given or drawn"),
}
_COMPLETION_OPTIONAL: Keys = {
    "prompt": of("string", "text of the prompt"),
    "messages": of("list of object", "in place of `prompt`: the chat"),
    "tools": of("list of object", "of the chat, where given"),
    "documents": of("list of object", "of the chat, where given"),
    "chat_template_kwargs": of("object", "of the chat, where given"),
    "continue_final_message": of("boolean", "of the chat, where given"),
    "add_generation_prompt": of("boolean", "of the chat, where given"),
    "category": of("string", "as in the file of prompts"),
    "id": anything("as in the file of prompts"),
    "custom_id": anything("as in the file of prompts"),
    "logprobs": of("list of logprob", "with `--logprobs`: of each token"),
    "error": of("string", "why the prompt failed. A resumed run keeps the line; remove it to try again"),
}
_STATISTICAL: Keys = {
    "num_tokens": of("integer", "tokens tested"),
    "num_texts": of("integer", "texts that they are of"),
    "num_forbidden": of("integer", "tokens that the target does not allow"),
    "num_at_edge": of("integer", "tokens allowed or not, depending on rounding; not tested"),
    "alpha": of("number or null", "mean of sum min(p, q)"),
    "detectable": of(
        "number or null",
        "total variation, towards the draft, detected with a probability of 0.99; `null` if not even the draft's own "
        "distribution would be",
    ),
    "wanted": of("number or null", "the same, as asked for by `--detect-tv`"),
    "num_tokens_needed": of("integer or null", "to detect that, or the draft's own distribution, where more are"),
    "estimate": of(
        "number or null",
        "estimated deviation towards the draft, in total variation; `null` where no token distinguishes the two",
    ),
    "estimate_std": of("number or null", "its standard error"),
    "surprise_excess": of("number or null", "mean of -log p less the entropy, nats"),
    "tests": of("list of test"),
    "pit_histogram": of("list of integer", "tokens in twenty equal bins"),
    "pit_excess": of("list of number", "share of tokens whose transform is at most u, less u, at u = 0, 0.01 ... 1"),
    "is_ok": of("boolean", "no alarm, and enough tokens"),
}
_STATISTICAL_OPTIONAL: Keys = {
    "dependence": list_of(
        record(
            "",
            {
                "test": of("string", "test that these pairs are a part of"),
                "pairs": of("string", "their kind"),
                "num_pairs": of("integer", "their number"),
                "z": of("number or null", "of the products of their ranks"),
                "detectable": of(
                    "number or null",
                    "share of tokens drawn with their partner's random number that is detected with a probability of "
                    "0.99",
                ),
            },
        ),
        "one entry for each kind of pairs of tokens; older documents lack it",
    ),
    "places": list_of(
        record("", {"num_tokens": of("integer", "tokens there"), "z": of("number or null", "of the score")}),
        "of a certificate: one entry for each place in a round",
    ),
}
_DIVERGENCE: Keys = {
    "prompt": of("integer", "its index; of samples, the number of the line"),
    "position": of("integer", "index in the output"),
    "plain_id": of("integer or null", "token of plain decoding; `null`: the text has ended"),
    "other_id": of("integer or null", "the other token"),
    "margin": of("number or null", "difference of their scores; `null` where a text has ended"),
    "gap": of("number or null", "change of the two scores, together, when the text is fed in blocks"),
    "verdict": one_of("whether rounding explains it", "numerics", "bug"),
}
GREEDY: Keys = {
    "num_texts": of("integer", "texts compared"),
    "num_tokens": of("integer", "tokens of plain decoding"),
    "differences": list_of(record("", _DIVERGENCE), "the first difference of each pair of texts"),
    "has_noise": of("boolean", "both were sampled, by `gumbel` with the same seeds"),
    "is_ok": of("boolean", "rounding explains each difference"),
}

SHARED: dict[str, Schema] = {
    "k": {"anyOf": [{"type": "integer"}, {"const": "auto"}], "description": "tokens drafted per round"},
    "stats": record(
        "Counts of rounds and tokens, under vLLM's names where vLLM has the number. A round cut short by the end of "
        "its sequence counts only in `num_generated_tokens` and `num_truncated_rounds`. Expected counts (`replay`) "
        "need not be whole.",
        _STATS,
    ),
    "times": record(
        "Seconds. `null` where only the total is known.",
        {
            "prefill": of("number or null", "of the prompts"),
            "draft": of("number or null", "drafting"),
            "verify": of("number or null", "the target's forwards"),
            "rest": of("number or null", "sampling, acceptance, bookkeeping"),
            "total": of("number", "their sum, or wall clock"),
        },
    ),
    "interval": record(
        "An estimate with its confidence interval; the ends are `null` where one value has none.",
        {
            "value": of("number or null", "estimate"),
            "low": of("number or null", "lower end"),
            "high": of("number or null", "upper end"),
            "level": of("number", "confidence"),
        },
    ),
    "mean_and_spread": record(
        "Over the cases.",
        {"mean": of("number", "mean"), "std": of("number or null", "standard deviation of a sample")},
    ),
    "arm": record("One way to generate, over all cases.", _ARM),
    "position": record(
        "The i-th drafted token of a round.",
        {
            **_POSITION,
            "conditional": of("number or null", _CONDITIONAL),
            "unconditional": of("number or null", _UNCONDITIONAL),
        },
    ),
    "position_with_intervals": record(
        "The same with Wilson's intervals, which treat the rounds as independent.",
        {
            **_POSITION,
            "conditional": of("interval or null", _CONDITIONAL),
            "unconditional": of("interval or null", _UNCONDITIONAL),
        },
    ),
    "provenance": record("Origin of the result.", _PROVENANCE, {"dtype": of("string", "of the target, where one ran")}),
    "difference": group("Two arms compared, problem by problem or document by document.", _DIFFERENCE),
    "logprob": record(
        "Of the target's own logits, natural logarithm.",
        {
            "logprob": of("number or null", "of the token"),
            "top": list_of(pair_of("integer", "number or null", ""), "the N most probable: id and log-probability"),
        },
    ),
    "completion": group("A prompt and its output.", _COMPLETION, _COMPLETION_OPTIONAL),
    "test": record(
        "A statistical test.",
        {
            "name": of("string", "what it looks for: [certify](../guides/certify.md)"),
            "statistic": of(
                "number or null", "a z, a distance, a chi-square; of tests named `by`, the logarithm of the wealth"
            ),
            "p": of("number or null", "its p-value"),
            "threshold": of("number", "Holm's; 0 after the first test without an alarm"),
            "is_alarm": of("boolean", "whether p is below it"),
        },
    ),
    "statistical": record("Tokens against the target's distribution.", _STATISTICAL, _STATISTICAL_OPTIONAL),
    "greedy": group("Texts against those of plain decoding, token by token.", GREEDY),
    "prediction": record(
        "Speed of one K, over plain decoding.",
        {
            "k": of("integer", "tokens drafted per round"),
            "tau": of("number", "tokens per round"),
            "speed_up": of("number", "in time"),
            "operations": of("number", "in arithmetic"),
        },
    ),
    "choice": record(
        "A draft and K with its predicted speed.",
        {
            "draft": of("string", "its name"),
            "k": of("integer", "tokens drafted per round"),
            "tau": of("interval", "tokens per round, over the texts"),
            "speed_up": of("interval", "over plain decoding, over the texts"),
            "tokens_per_s": of("number", "of all rows"),
            "if_free": of("number", "speed-up if the draft took no time"),
            "if_agreeing": of("number", "speed-up if every drafted token were accepted"),
            "round_ms": of("number", "a round"),
            "draft_ms": of("number", "its drafting"),
            "verify_ms": of("number", "its verification"),
        },
    ),
    "check": record(
        "An evaluation of a draft during its training.",
        {
            "step": of("integer", "of training"),
            "seconds": of("number", "of training"),
            "loss": of("number or null", "mean since the previous check"),
            "alpha": of("interval", "of the weights as stored, over the held-out texts"),
            "alphas": of("list of interval", "of a head: of the first drafted token of a round, the second, ..."),
            "k": of("integer", "the best"),
            "tokens_per_s": of("number", "expected with it"),
        },
    ),
}
