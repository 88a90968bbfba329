"""One call of a decoder: makes its requests, schedule and engine, and runs them."""

from __future__ import annotations

import math
import numbers
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.decoding.batch import final_room
from outrider.decoding.engine import Engine, decode
from outrider.decoding.pair_state import PairState
from outrider.decoding.schedule import AdaptiveSchedule, ConstantSchedule, Schedule
from outrider.drafters.base import Drafter
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens, Sampling, check_num_slots
from outrider.records import Chunk, Completion, Request, Round, Timing
from outrider.requests.row_options import check_names, rows_of, seed_of
from outrider.requests.state import RequestState
from outrider.runtime.lm import LM
from outrider.sampling.rules import Rule
from outrider.system.ranks import current_ranks
from outrider.text.prompts import check_ids, check_padding, is_chat, prompts_of
from outrider.text.row_text import RowText
from outrider.text.structure import structure_of
from outrider.text.tokenizer import Detokenizer, Prompt, encode


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The models of a call, and the options that all its rows share. See ``Decoder`` for the arguments."""

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    drafter: Drafter
    pair_state: PairState
    num_draft_tokens: NumDraftTokens
    rule: Rule
    is_repeatable: bool = True
    reports_drafts: bool = False

    @property
    def _constant_k(self) -> int:
        """K of rows whose K is constant."""
        k = DEFAULT_NUM_DRAFT_TOKENS if self.num_draft_tokens == "auto" else self.num_draft_tokens
        most = self.drafter.most_drafted
        return k if most is None else min(k, most)

    def engine(self, num_slots: int, capacity: int) -> Engine:
        schedule = self._schedule(num_slots, capacity)
        return Engine(self.target, self.drafter, self.rule, num_slots=num_slots, capacity=capacity, schedule=schedule)

    def _schedule(self, num_slots: int, num_tokens: int) -> Schedule:
        if self.num_draft_tokens == "auto" and self.drafter.most_drafted != 0:
            return AdaptiveSchedule(self.pair_state.estimates(self.rule, num_slots, num_tokens))
        return ConstantSchedule(self._constant_k)

    def _room(self, state: RequestState) -> int:
        return final_room(self.target, state.request, self._constant_k)

    def chunks(self, states: Sequence[RequestState], num_slots: int) -> Iterator[Chunk]:
        """Generate for all requests. Errors of options are raised by the call, others by the iterator."""
        check_num_slots(num_slots)
        if not states:
            return iter(())
        num_slots = min(num_slots, len(states))
        schedule = self._schedule(num_slots, max(map(self._room, states)))
        requests = [state.request for state in states]
        rounds = decode(self.target, self.drafter, requests, self.rule, num_draft_tokens=schedule, num_slots=num_slots)
        return self._chunks(rounds, states)

    @staticmethod
    def _chunks(rounds: Iterator[Round], states: Sequence[RequestState]) -> Iterator[Chunk]:
        for round_ in rounds:
            # The first chunk of a round carries its timing, so that the timings of all chunks add up.
            timing = round_.timing
            for row in round_.rows:
                yield states[row.row].chunk(row, timing)
                timing = Timing()

    def completions(
        self, prompts: Iterable[Any], num_slots: int, options: dict[str, Any]
    ) -> Iterator[tuple[int, Completion | OutriderError]]:
        """See ``Decoder.complete``."""
        unread = enumerate(prompts)
        waiting: deque[tuple[int, RequestState]] = deque()
        engine: Engine | None = None
        capacity = 0
        running: dict[int, tuple[int, RequestState]] = {}
        while True:
            while len(waiting) < num_slots and (item := next(unread, None)) is not None:
                number, prompt = item
                own: Mapping[str, Any] = {}
                if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                    prompt, own = (prompt, own) if is_chat(prompt) else prompt
                own = options | {"seed": seed_of(options.get("seed"), number)} | dict(own)
                try:
                    check_padding(self.tokenizer, [prompt])
                    waiting.append((number, self.state(prompt, own)))
                except (OptionError, PromptError) as error:
                    yield number, error
            if not running and waiting:
                longest = max(self._room(state) for _, state in waiting)
                if engine is None or longest > capacity:
                    # A longer sequence than any before: all rows have ended, so a larger cache replaces the old one.
                    engine, capacity = None, min(max(longest, 2 * capacity), self.target.context_len)
                    engine = self.engine(num_slots, capacity)
            if engine is None:
                return
            while waiting and len(running) < 2 * num_slots and self._room(waiting[0][1]) <= capacity:
                number, state = waiting.popleft()
                running[engine.submit(state.request)] = number, state
            round_ = engine.step()
            if round_ is None and not waiting:
                return
            for row in () if round_ is None else round_.rows:
                number, state = running[row.row]
                if row.error is not None:
                    del running[row.row]
                    yield number, NumericsError(row.error)
                    continue
                state.chunks.append(state.chunk(row, Timing()))
                if row.finish_reason is not None:
                    del running[row.row]
                    yield number, state.completion

    def states(
        self,
        given: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        changes: Mapping[str, Any],
        resume_ids: Sequence[Sequence[int]] | None,
    ) -> list[RequestState]:
        """A request for each prompt."""
        prompts = list(prompts_of(given))
        check_padding(self.tokenizer, prompts)
        if resume_ids is not None and len(resume_ids) != len(prompts):
            raise OptionError("resume_ids", len(resume_ids), f"one list for each of the {len(prompts)} prompts")
        states = []
        for index, (prompt, own) in enumerate(zip(prompts, rows_of(sampling, changes, len(prompts)), strict=True)):
            try:
                states.append(self.state(prompt, own, () if resume_ids is None else resume_ids[index]))
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return states

    def state(self, prompt: Prompt, options: Mapping[str, Any], resume_ids: Sequence[int] = ()) -> RequestState:
        """A checked request.

        Args:
            options: fields of ``Sampling``, one value each.
        """
        check_names(options)
        ids = checked_ids(self.target, self.tokenizer, prompt)
        has_seed = options.get("seed") is not None
        # 53 bits: JSON numbers are float64 in other languages.
        seed = options["seed"] if has_seed else current_ranks().shared(secrets.randbits(53))
        stop = options.get("stop")
        stop_ids = options.get("stop_token_ids")
        lists = {"stop": () if stop is None else stop, "stop_token_ids": () if stop_ids is None else stop_ids}
        sampling = Sampling(**{**options, "seed": seed, **lists})
        check_tokens(sampling, self.target.vocab_size, self.eos_ids)
        if sampling.stop and self.tokenizer is None:
            raise OptionError("stop", sampling.stop, "stop strings need a tokenizer")
        constraint = structure_of(sampling, self.tokenizer, self.target.vocab_size, self.eos_ids)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, ids)
        eos_ids = () if sampling.ignore_eos else self.eos_ids
        text = RowText(detokenizer, eos_ids, sampling.stop, sampling.stop_token_ids, sampling.min_tokens)
        _check_list(resume_ids)
        if len(resume_ids) >= sampling.max_new_tokens or len(ids) + len(resume_ids) >= self.target.context_len:
            raise OptionError(
                "resume_ids", f"{len(resume_ids)} tokens", "the output is complete: nothing is left to generate"
            )
        if resume_ids and not 0 <= min(resume_ids) <= max(resume_ids) < self.target.vocab_size:
            raise OptionError("resume_ids", list(resume_ids)[:8], f"token ids from 0 to {self.target.vocab_size - 1}")
        for token_id in resume_ids:
            if text.push(token_id) is not None:
                raise OptionError("resume_ids", token_id, "the output ended with this token")
            if constraint is not None and not constraint.push(token_id):
                raise OptionError("resume_ids", token_id, "the constraint forbids this token")
        text.take()  # emitted before the cut
        # The output for a given seed must not depend on what is compiled. If it depends on K, it must not depend on the
        # load either, so that under "auto" K is constant. With a constant K it must not depend on its own end, since a
        # drawn seed is reported and may be given.
        is_repeatable, is_auto = has_seed and self.is_repeatable, self.num_draft_tokens == "auto"
        depends_on_k = self.drafter.most_drafted != 0 and self.rule.name != "gumbel" and sampling.temperature > 0
        request = Request(
            [*ids, *resume_ids],
            sampling.with_ends(self.eos_ids),
            text,
            num_draft_tokens=self._constant_k if is_auto and is_repeatable and depends_on_k else None,
            reports_drafts=self.reports_drafts,
            is_repeatable=is_repeatable,
            drafts_beyond_end=depends_on_k and (is_repeatable or not is_auto),
            num_resumed=len(resume_ids),
            constraint=constraint,
        )
        return RequestState(request, text, len(ids), len(resume_ids))


def _check_list(resume_ids: Any) -> None:
    is_list = isinstance(resume_ids, Sequence) and not isinstance(resume_ids, str | bytes)
    if not is_list or not all(isinstance(i, numbers.Integral) for i in resume_ids):
        raise OptionError("resume_ids", resume_ids, "a list of token ids for each prompt")


def checked_ids(target: LM, tokenizer: Any | None, prompt: Prompt) -> list[int]:
    """Token ids of a prompt. Raises PromptError: see ``Decoder.encode``."""
    ids = encode(tokenizer, prompt)
    if len(ids) >= target.context_len:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, but {target.name} can take {target.context_len} in all, "
            "prompt and output together: shorten it"
        )
    check_ids(ids, target.vocab_size, target.model.config, tokenizer)
    return ids


def check_tokens(sampling: Sampling, vocab_size: int, eos_ids: frozenset[int]) -> None:
    """Check that the vocabulary has the tokens that the options name, and that one may be generated. Raises
    OptionError."""
    bias = sampling.logit_bias or {}
    for name, ids in (("logit_bias", bias), ("stop_token_ids", sampling.stop_token_ids)):
        if max(ids, default=0) >= vocab_size:
            raise OptionError(name, max(ids), f"token ids are below {vocab_size}")
    forbidden = {token_id for token_id, value in bias.items() if value == -math.inf}
    if len(forbidden) == vocab_size:
        raise OptionError("logit_bias", -math.inf, "it forbids every token")
    if sampling.min_tokens and len(forbidden.union(sampling.stop_token_ids, eos_ids)) == vocab_size:
        raise OptionError("min_tokens", sampling.min_tokens, "no token is left that does not end the output")
