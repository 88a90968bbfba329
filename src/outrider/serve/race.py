"""``/v1/race``: plain and speculative decoding of one prompt side by side, for the page.

A race does not use the serving engine: each arm has an engine and a cache of its own, with the requested draft, K and
rule. The engine thread runs it between rounds, one round of an arm at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.api import load_drafter
from outrider.bench.run import Arm, Case
from outrider.decoder import Decoder
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, LOOKUPS
from outrider.race.events import race_events
from outrider.sampling.rules import RULES
from outrider.serve.completion_json import DONE, KEEP_ALIVE, event
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.prepare import Parsed, Preparer, named_refusal
from outrider.serve.protocol import ParsedRequest, parse_completions

_MOST_K = 16
# Fields of completions that a race does not honour.
_NOT_TAKEN = (
    *("add_special_tokens", "truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output"),
    *("allowed_token_ids", "prompt_logprobs"),
)
_NUM_SEEDS = 2**32  # to draw from: exact as JavaScript numbers


@dataclass(frozen=True, slots=True)
class Race:
    """A race, ready to run."""

    arms: tuple[Arm, Arm]
    case: Case
    options: dict[str, Any]

    def events(self) -> Generator[dict[str, Any]]:
        return race_events(self.arms, self.case, self.options)


def choices(preparer: Preparer) -> dict[str, Any]:
    """Options of a race."""
    decoder = preparer.decoder
    return {
        "target": decoder.target.name,
        "drafts": _drafts(decoder),
        "acceptances": list(RULES),
        "acceptance": decoder.acceptance,
        "num_draft_tokens": min(DEFAULT_NUM_DRAFT_TOKENS, decoder.drafter.most_drafted or DEFAULT_NUM_DRAFT_TOKENS),
        "most_draft_tokens": _MOST_K,
        "max_model_len": preparer.capacity,
    }


def parse_race(preparer: Preparer, body: Mapping[str, Any]) -> Parsed:
    """Parse a body of ``/v1/completions`` with one prompt, and ``drafter``, one of ``choices``; prepares a ``Race``.
    Raises Refusal."""
    name = body.get("drafter")
    ask = parse_completions({field: value for field, value in body.items() if field != "drafter"})
    given = next((field for field in _NOT_TAKEN if body.get(field) is not None), None)
    if given is not None:
        raise Refusal(f"a race does not take {given}: leave it out", param=given)
    return Parsed(ask, lambda: _prepare(preparer, ask, name))


def _prepare(preparer: Preparer, ask: ParsedRequest, name: Any) -> Race:
    """
    Args:
        name: of the drafter.

    Raises:
        Refusal
    """
    [prompt, *others] = ask.prompts
    if others or ask.n != 1 or not isinstance(prompt, str):
        raise Refusal("a race takes one prompt, a string", param="prompt")
    ids = preparer.token_ids(prompt)
    seed = ask.options["seed"]
    max_tokens = ask.max_tokens or 1
    options = {
        **ask.options,
        "logprobs": None,
        "seed": secrets.randbelow(_NUM_SEEDS) if seed is None else seed,
        "max_new_tokens": min(max_tokens, preparer.capacity - len(ids)),
    }
    try:
        decoder = replace(preparer.decoder, acceptance=ask.acceptance or preparer.decoder.acceptance)
        decoder.request(ids, options)  # raises if impossible
        arms = Arm("plain", decoder.plain()), _speculative(decoder, name, ask.num_draft_tokens)
    except Exception as error:
        raise named_refusal(ask, error) from None
    return Race(arms, Case(0, prompt, options.pop("seed")), options)


async def streamed_race(events: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    """Encode events as server-sent events, errors included. Raises Refusal before the first."""
    yield _written(await anext(events))
    try:
        async for one in events:
            yield _written(one)
    except Exception as error:
        yield event(refusal_of(error).to_json())
    yield DONE


def _written(one: dict[str, Any] | None) -> bytes:
    return KEEP_ALIVE if one is None else event(one)


def _speculative(decoder: Decoder, name: Any, k: int | None) -> Arm:
    drafts = _drafts(decoder)
    if name is None:
        name = drafts[0]
    if name not in drafts:
        raise Refusal(f"drafter = {name!r:.60} is not supported: choose one of {', '.join(drafts)}", param="drafter")
    k = DEFAULT_NUM_DRAFT_TOKENS if k is None else k
    if not 1 <= k <= _MOST_K:
        raise Refusal(f"num_draft_tokens = {k} is invalid: give 1 to {_MOST_K}", param="num_draft_tokens")
    if name != decoder.drafter.name:
        decoder = replace(decoder, drafter=load_drafter(decoder, name))
    if name == "none":
        return Arm("plain, again", decoder)
    return Arm(f"{name}, K = {k}", decoder, name, k)


def _drafts(decoder: Decoder) -> list[str]:
    """Names of drafts: the server's own first, then those that need no model."""
    return list(dict.fromkeys((decoder.drafter.name, *LOOKUPS, "none")))
