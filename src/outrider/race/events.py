"""Race events, for the page of ``outrider serve`` and the file of ``outrider compare --html``.

An event is a JSON object, made by a method of ``RaceEvents``: one at the start, one per round of an arm, one at the
end. This module knows neither HTTP nor the page.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from outrider.measure.arms import Arm, Case, race_arms
from outrider.records import Chunk, Stats, Timing
from outrider.system.files import short_names
from outrider.text.chat import Chat
from outrider.text.tokenizer import Detokenizer


def race_events(arms: Sequence[Arm], case: Case, options: dict[str, Any]) -> Generator[dict[str, Any]]:
    """Run a race and yield its events. Options are those of ``Decoder.stream``."""
    teller = RaceEvents(arms, case, options)
    yield teller.start()
    with closing(race_arms(arms, case, {**options, "reports_drafts": True})) as chunks:
        for which, chunk in chunks:
            yield teller.round(which, chunk)
    yield teller.end()


class RaceEvents:
    """Converts the chunks of a race into events. The chunks must report their drafts."""

    def __init__(self, arms: Sequence[Arm], case: Case, options: dict[str, Any]) -> None:
        self._arms, self._case, self._options = arms, case, options
        self._tokenizer = arms[0].decoder.tokenizer
        prompt_ids = arms[0].decoder.encode(case.prompt)
        self._progress = [_ArmProgress(list(prompt_ids), Detokenizer(self._tokenizer, prompt_ids)) for _ in arms]

    def start(self) -> dict[str, Any]:
        decoder, prompt = self._arms[0].decoder, self._case.prompt
        target, *names = short_names([decoder.target.name, *(arm.name for arm in self._arms)])
        named = zip(names, self._arms, strict=True)
        return {
            "type": "start",
            "target": target,
            "prompt": prompt.asked if isinstance(prompt, Chat) else prompt,
            "seed": self._case.seed,
            "acceptance": decoder.acceptance,
            "temperature": {**decoder.sampling_defaults, **self._options}.get("temperature", 1.0),
            "max_new_tokens": self._options["max_new_tokens"],
            "arms": [{"name": name, "draft": arm.draft, "k": arm.num_draft_tokens} for name, arm in named],
        }

    def round(self, which: int, chunk: Chunk) -> dict[str, Any]:
        arm, drafted = self._progress[which], chunk.drafted or ()
        guesses = Detokenizer(self._tokenizer, arm.token_ids)
        drafted_json = [{"id": i, "text": guesses.push(i), "p": p, "q": q} for i, p, q in drafted]
        texts = [arm.detokenizer.push(token_id) for token_id in chunk.token_ids]
        if chunk.finish_reason is not None and texts:
            texts[-1] += arm.detokenizer.flush()
        arm.token_ids += chunk.token_ids
        arm.stats += chunk.stats
        arm.timing += chunk.timing
        tokens = zip(chunk.token_ids, texts, chunk.origins, strict=True)
        return {
            "type": "round",
            "arm": which,
            "seconds": arm.timing.total_s,
            "tokens": [{"id": i, "text": text, "origin": origin} for i, text, origin in tokens],
            "drafted": drafted_json,
            "is_truncated": chunk.stats.num_truncated_rounds > 0,
            "finish_reason": chunk.finish_reason,
        }

    def end(self, measured: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Event for the end. ``measured``: documents of the arms, if measured apart from the race."""
        arms = [{"stats": arm.stats.to_json(), "time_s": arm.timing.to_json()} for arm in self._progress]
        return {"type": "end", "arms": arms, "measured": list(measured)}


@dataclass(slots=True)
class _ArmProgress:
    """Progress of an arm; the token ids are those of prompt and output."""

    token_ids: list[int]
    detokenizer: Detokenizer
    stats: Stats = field(default_factory=Stats)
    timing: Timing = field(default_factory=Timing)
