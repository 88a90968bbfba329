"""``/v1/race``: plain and speculative decoding of one prompt side by side, for the page.

A race does not use the serving engine: each arm has an engine and a cache of its own, with the requested draft, K and
rule. The engine thread runs it between rounds, one round of an arm at a time.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Generator
from dataclasses import replace
from typing import Any, NamedTuple

from outrider.api import load_drafter
from outrider.decoder import Decoder
from outrider.measure.arms import Arm, Case
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, LOOKUPS
from outrider.race.events import race_events
from outrider.sampling.rules import RULES
from outrider.serve.answers import DONE, KEEP_ALIVE, event_of
from outrider.serve.bodies import RaceBody
from outrider.serve.generation_body import ParsedRequest
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.prepare import Preparer

_MOST_K = 16
_NUM_SEEDS = 2**32  # to draw from: exact as JavaScript numbers


class Race(NamedTuple):
    """A race, ready to run."""

    arms: tuple[Arm, Arm]
    case: Case
    options: dict[str, Any]

    def events(self) -> Generator[dict[str, Any]]:
        return race_events(self.arms, self.case, self.options)


def choices(preparer: Preparer) -> dict[str, Any]:
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


def prepare_race(preparer: Preparer, ask: ParsedRequest) -> Race:
    """Prepare a race. Raises Refusal."""
    assert isinstance(ask.body, RaceBody)
    [prompt, *others] = ask.prompts
    if others or not isinstance(prompt, str):
        raise Refusal("a race takes one prompt, a string", param="prompt")
    seed = secrets.randbelow(_NUM_SEEDS) if ask.options["seed"] is None else ask.options["seed"]
    try:
        ids = preparer.token_ids(prompt)
        max_tokens = min(ask.max_tokens or 1, preparer.capacity - len(ids))
        options = {**ask.options, "seed": seed, "max_new_tokens": max_tokens}
        decoder = replace(preparer.decoder, acceptance=ask.body.acceptance or preparer.decoder.acceptance)
        decoder.request(ids, options)  # raises if impossible
        arms = Arm("plain", decoder.plain()), _speculative(decoder, ask.body.drafter, ask.num_draft_tokens)
    except Exception as error:
        raise ask.refusal_of(error) from None
    return Race(arms, Case(0, prompt, options.pop("seed")), options)


async def race_stream(events: AsyncIterator[dict[str, Any] | None]) -> AsyncIterator[bytes]:
    """Encode events as server-sent events, errors included. Raises Refusal before the first."""
    first = await anext(events)
    yield KEEP_ALIVE if first is None else event_of(first)
    try:
        async for one in events:
            yield KEEP_ALIVE if one is None else event_of(one)
    except Exception as error:
        yield event_of(refusal_of(error).to_json())
    yield DONE


def _speculative(decoder: Decoder, name: str | None, k: int | None) -> Arm:
    drafts = _drafts(decoder)
    name = drafts[0] if name is None else name
    if name not in drafts:
        raise Refusal(f"drafter = {name!r:.60} is not supported: choose one of {', '.join(drafts)}", param="drafter")
    k = DEFAULT_NUM_DRAFT_TOKENS if k is None else k
    if not 1 <= k <= _MOST_K:
        raise Refusal(f"num_draft_tokens = {k} is invalid: give 1 to {_MOST_K}", param="num_draft_tokens")
    if name != decoder.drafter.name:
        decoder = replace(decoder, drafter=load_drafter(decoder, name))
    return Arm("plain, again", decoder) if name == "none" else Arm(f"{name}, K = {k}", decoder, name, k)


def _drafts(decoder: Decoder) -> list[str]:
    """Names of drafts: the server's own first, then those that need no model."""
    return list(dict.fromkeys((decoder.drafter.name, *LOOKUPS, "none")))
