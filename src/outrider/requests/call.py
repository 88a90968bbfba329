"""One call of a decoder: makes its requests, schedule and engine, and runs them."""

from __future__ import annotations

import math
import numbers
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from outrider.decoding.batch import final_room
from outrider.decoding.engine import Engine
from outrider.decoding.prefill import PREFILL_CHUNK
from outrider.decoding.schedule import AdaptiveSchedule, ConstantSchedule, PairState, Schedule
from outrider.drafters.base import Drafter
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, NumDraftTokens, Sampling, check_n, check_num_slots
from outrider.records import Chunk, Completion, MediaPrompt, Request
from outrider.requests.hooks import constraint_of
from outrider.requests.row_options import LISTS, check_names, rows_of, seed_of
from outrider.requests.shared_engine import Item, RowStream, SharedEngine
from outrider.requests.state import RequestState
from outrider.runtime.lm import LM
from outrider.runtime.media import read_media
from outrider.sampling.rules import Rule
from outrider.system.ranks import current_ranks
from outrider.text.chat_images import chat_inputs, has_images
from outrider.text.output_parser import ThoughtSplitter
from outrider.text.prompts import check_ids, check_padding, is_chat, media_of, prompts_of, without_media
from outrider.text.row_text import RowText
from outrider.text.tokenizer import Detokenizer, Prompt, encode


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt that is checked, and whose images the model has read; for any number of requests.

    Attributes:
        ids: with the placeholders of images.
        media: None for text.
    """

    ids: Sequence[int]
    media: MediaPrompt | None


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The models of a call, and the options that all its rows share. See ``Decoder`` for the arguments."""

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    turn_ids: frozenset[int]
    drafter: Drafter
    pair_state: PairState
    num_draft_tokens: NumDraftTokens
    rule: Rule
    sampling_defaults: Mapping[str, Any]
    is_repeatable: bool = True
    reports_drafts: bool = False
    processor: Any | None = None

    @property
    def _constant_k(self) -> int:
        """K of rows whose K is constant."""
        k = DEFAULT_NUM_DRAFT_TOKENS if self.num_draft_tokens == "auto" else self.num_draft_tokens
        most = self.drafter.most_drafted
        return k if most is None else min(k, most)

    def engine(self, num_slots: int, capacity: int, prefill_chunk: int | None = PREFILL_CHUNK) -> Engine:
        """An engine for the requests of calls with these models, rule and K."""
        return Engine(
            self.target,
            self.drafter,
            self.rule,
            num_slots=num_slots,
            capacity=capacity,
            schedule=self._schedule(),
            prefill_chunk=prefill_chunk,
        )

    def _schedule(self) -> Schedule:
        if self.num_draft_tokens == "auto" and self.drafter.most_drafted != 0:
            return AdaptiveSchedule(self.pair_state.estimates(self.rule))
        return ConstantSchedule(self._constant_k)

    def shared_engine(self, num_slots: int, *, prefill_chunk: int | None = PREFILL_CHUNK) -> SharedEngine:
        """An engine for several streams, whose cache grows up to the context length."""
        make = partial(self.engine, num_slots, prefill_chunk=prefill_chunk)
        return SharedEngine(make, most_capacity=self.target.context_len)

    def room(self, state: RequestState) -> int:
        """The most tokens that the rounds of a request may commit, prompt included."""
        return final_room(self.target, state.request, self._constant_k)

    def with_drafts(self, num_tokens: int) -> int:
        """The room of the longest request of so many tokens."""
        return min(num_tokens + self._constant_k, self.target.context_len)

    def chunks(self, states: Sequence[RequestState], num_slots: int) -> Iterator[Chunk]:
        """Generate for all requests, on an engine of their own. Errors of options are raised by the call, others by the
        iterator."""
        check_num_slots(num_slots)
        return self.chunks_on(self.shared_engine(min(num_slots, len(states)), prefill_chunk=None), states)

    def chunks_on(self, engine: SharedEngine, states: Sequence[RequestState]) -> Iterator[Chunk]:
        """Generate for all requests."""
        rows = RowStream(engine)
        try:
            for number, state in enumerate(states):
                rows.submit(number, state, self.room(state))
            for number, item in rows:
                yield chunk_of(number, item, len(states))
        finally:
            rows.close()

    def completions(
        self, prompts: Iterable[Any], num_slots: int, options: dict[str, Any]
    ) -> Iterator[tuple[int, Completion | OutriderError]]:
        """See ``Decoder.complete``."""
        unread = enumerate(prompts)
        rows = RowStream(self.shared_engine(num_slots))
        states: dict[int, RequestState] = {}
        while True:
            while rows.num_open < 2 * num_slots and (item := next(unread, None)) is not None:
                number, prompt = item
                own: Mapping[str, Any] = {}
                if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                    prompt, own = (prompt, own) if is_chat(prompt) else prompt
                own = options | {"seed": seed_of(options.get("seed"), number)} | dict(own)
                try:
                    check_padding(self.tokenizer, [prompt])
                    states[number] = state = self.state(self.read(prompt), own)
                except (OptionError, PromptError) as error:
                    yield number, error
                else:
                    rows.submit(number, state, self.room(state))
            if not rows.num_open:
                return
            number, found = next(rows)
            if isinstance(found, OutriderError):
                del states[number]
                yield number, found
                continue
            states[number].chunks.append(found)
            if found.finish_reason is not None:
                yield number, states.pop(number).completion

    def one(
        self, prompt: Prompt, sampling: Sampling | None, changes: Mapping[str, Any], resume_ids: Sequence[int]
    ) -> list[RequestState]:
        """A request for one prompt."""
        # In a list, a single message would be taken for a chat.
        is_alone = isinstance(prompt, Mapping) and not media_of(prompt)
        given = checked_ids(self.target, self.tokenizer, prompt) if is_alone else prompt
        return self.states([given], sampling, changes, [resume_ids])

    def states(
        self,
        given: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        changes: Mapping[str, Any],
        resume_ids: Sequence[Sequence[int]] | None,
        n: int = 1,
    ) -> list[RequestState]:
        """``n`` requests for each prompt."""
        check_n(n)
        prompts = list(prompts_of(given))
        check_padding(self.tokenizer, prompts)
        num_rows = n * len(prompts)
        if resume_ids is not None and len(resume_ids) != num_rows:
            raise OptionError("resume_ids", len(resume_ids), f"one list for each of the {num_rows} completions")
        options = rows_of(sampling, changes, len(prompts), self.sampling_defaults, n)
        states: list[RequestState] = []
        for index, prompt in enumerate(prompts):
            try:
                read = self.read(prompt)
                for own in options[index * n : (index + 1) * n]:
                    states.append(self.state(read, own, () if resume_ids is None else resume_ids[len(states)]))
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return states

    def read(self, prompt: Prompt) -> ReadPrompt:
        """Check a prompt, and read its images. Raises PromptError."""
        prompt = chat_inputs(self.processor, prompt) if has_images(prompt) else prompt  # type: ignore[arg-type]
        inputs = media_of(prompt)
        ids = checked_ids(self.target, self.tokenizer, without_media(prompt), has_images=bool(inputs))
        return ReadPrompt(ids, read_media(self.target, ids, inputs) if inputs else None)

    def state(
        self,
        prompt: ReadPrompt,
        options: Mapping[str, Any],
        resume_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
        includes_stop: bool = False,
        thoughts: ThoughtSplitter | None = None,
    ) -> RequestState:
        """A checked request.

        Args:
            options: fields of ``Sampling``, one value each.
            shown_ids: special tokens that have text.
            includes_stop, thoughts: see ``RowText``.
        """
        check_names(options)
        ids = prompt.ids
        has_seed = options.get("seed") is not None
        # 53 bits: JSON numbers are float64 in other languages.
        seed = options["seed"] if has_seed else current_ranks().shared(secrets.randbits(53))
        lists = {name: () for name in LISTS if options.get(name) is None}
        sampling = Sampling(**{**options, "seed": seed, **lists})
        ends = ends_of(ids, self.eos_ids, self.turn_ids)
        check_tokens(sampling, self.target.vocab_size, ends)
        if sampling.stop and self.tokenizer is None:
            raise OptionError("stop", sampling.stop, "stop strings need a tokenizer")
        constraint = constraint_of(sampling, self.tokenizer, self.target.vocab_size, ends, ids)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, ids, shown_ids)
        eos_ids = () if sampling.ignore_eos else ends
        stops = eos_ids, sampling.stop, sampling.stop_token_ids, sampling.min_tokens
        text = RowText(detokenizer, *stops, includes_stop, thoughts)
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
        # If the output for a given seed depends on K, it must not depend on the load, so that under "auto" K is
        # constant. With a constant K it must not depend on its own end, since a drawn seed is reported and may be
        # given.
        is_repeatable, is_auto = has_seed and self.is_repeatable, self.num_draft_tokens == "auto"
        depends_on_k = self.drafter.most_drafted != 0 and self.rule.name != "gumbel" and sampling.temperature > 0
        request = Request(
            [*ids, *resume_ids],
            sampling.with_ends(ends),
            text,
            num_draft_tokens=self._constant_k if is_auto and is_repeatable and depends_on_k else None,
            reports_drafts=self.reports_drafts,
            drafts_beyond_end=depends_on_k and (is_repeatable or not is_auto),
            num_resumed=len(resume_ids),
            constraint=constraint,
            media=prompt.media,
        )
        return RequestState(request, text, len(ids), len(resume_ids))


def _check_list(resume_ids: Any) -> None:
    is_list = isinstance(resume_ids, Sequence) and not isinstance(resume_ids, str | bytes)
    if not is_list or not all(isinstance(i, numbers.Integral) for i in resume_ids):
        raise OptionError("resume_ids", resume_ids, "a list of token ids for each prompt")


def checked_ids(target: LM, tokenizer: Any | None, prompt: Prompt, *, has_images: bool = False) -> list[int]:
    """Token ids of a prompt. Raises PromptError: see ``Decoder.encode``."""
    ids = encode(tokenizer, prompt)
    if len(ids) >= target.context_len:
        raise PromptError(
            f"the prompt has {len(ids)} tokens, but {target.name} can take {target.context_len} in all, "
            "prompt and output together: shorten it"
        )
    check_ids(ids, target.vocab_size, target.weights.config, tokenizer, has_images=has_images)
    return ids


def ends_of(prompt_ids: Sequence[int], eos_ids: frozenset[int], turn_ids: frozenset[int]) -> frozenset[int]:
    """Tokens that end the output of a prompt. One in which turns end is a chat, so that its output ends with a turn,
    whoever has applied the template."""
    return eos_ids if turn_ids.isdisjoint(prompt_ids) else eos_ids | turn_ids


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


def chunk_of(number: int, item: Item, num_rows: int) -> Chunk:
    """The chunk of one of several rows. Raises the error that came in its place."""
    if isinstance(item, NumericsError) and num_rows > 1:
        raise NumericsError(f"prompt {number}: {item}")
    if isinstance(item, OutriderError):
        raise item
    return item


def collect(states: Sequence[RequestState], chunks: Iterable[Chunk]) -> list[Completion]:
    """The completions of all requests."""
    for chunk in chunks:
        states[chunk.row].chunks.append(chunk)
    return [state.completion for state in states]
