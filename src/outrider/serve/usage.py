"""Statistics in responses: tokens, times and acceptance.

Sources: OpenAI's API reference (``usage``); vLLM, docs/features/per_request_metrics and
docs/features/speculative_decoding/acceptance_metrics (``metrics``); llama.cpp, tools/server (``timings``).
"""

from __future__ import annotations

from typing import Any

from outrider.records import Completion
from outrider.serve.metrics import num_spec_steps
from outrider.serve.pending import TicketRow


def usage_of(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def metrics_of(completion: Completion, row: TicketRow, max_k: int) -> dict[str, Any]:
    """Metrics of one sequence, in vLLM's form. Times in milliseconds.

    Args:
        max_k: maximum tokens drafted per round for this sequence.
    """
    num_tokens = len(completion.token_ids)
    decode_s, whole_s = row.last_s - row.first_s, row.last_s - row.begun_s
    return {
        "time_to_first_token_ms": 1e3 * (row.first_s - row.begun_s),
        "generation_time_ms": 1e3 * decode_s,
        "queue_time_ms": 1e3 * (row.begun_s - row.submitted_s),
        "mean_itl_ms": 1e3 * decode_s / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / whole_s,
        "speculative_decoding": _drafts(completion, max_k),
    }


def _drafts(completion: Completion, max_k: int) -> dict[str, Any] | None:
    """Draft statistics; None without drafts. Leaves out the last round if tokens after the end were dropped."""
    stats = completion.stats
    num_steps = num_spec_steps(stats)
    if num_steps == 0:
        return None
    histogram = [*stats.acceptance_histogram, *[0] * (max_k + 1 - len(stats.acceptance_histogram))]
    histogram[0] -= stats.num_rounds - num_steps
    return {
        "mean_acceptance_length": 1 + stats.num_accepted_draft_tokens / num_steps,
        "draft_acceptance_rate": stats.draft_acceptance_rate,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": max_k,
    }


def timings_of(completion: Completion, row: TicketRow) -> dict[str, Any]:
    """Timings of one sequence, in llama.cpp's form: prompt time ends with the first tokens."""
    stats, num_cached = completion.stats, completion.num_cached_tokens
    num_fed, num_tokens = completion.num_prompt_tokens - num_cached, len(completion.token_ids)
    prompt_s, decode_s = row.first_s - row.begun_s, row.last_s - row.first_s
    timings = {
        "cache_n": num_cached,
        "prompt_n": num_fed,
        "prompt_ms": 1e3 * prompt_s,
        "prompt_per_token_ms": 1e3 * prompt_s / num_fed,
        "prompt_per_second": num_fed / prompt_s,
        "predicted_n": num_tokens,
        "predicted_ms": 1e3 * decode_s,
        "predicted_per_token_ms": 1e3 * decode_s / num_tokens,
        # A sequence of one round has no time after its first tokens.
        "predicted_per_second": num_tokens / decode_s if decode_s > 0 else None,
    }
    if stats.num_draft_tokens:
        timings |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_draft_tokens}
    return timings
