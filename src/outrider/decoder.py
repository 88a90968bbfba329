"""A target and its drafter: text in, chunks of text out. The stream is the primitive; ``generate`` collects it."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Unpack

from outrider.decoding.batch import Row, final_room
from outrider.decoding.engine import Engine
from outrider.decoding.fair_queue import FairQueue
from outrider.decoding.runner import PREFILL_CHUNK
from outrider.decoding.schedule import AdaptiveSchedule, ConstantSchedule, PairState, Schedule
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.errors import OptionError, OutriderError, PromptError
from outrider.options import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SESSION_SLOTS,
    DEFAULT_NUM_SLOTS,
    NumDraftTokens,
    Sampling,
    SamplingChanges,
    check_count,
    check_num_draft_tokens,
    with_checked,
)
from outrider.records import Chunk, Completion, MediaPrompt, Request
from outrider.requests.async_session import AsyncSession
from outrider.requests.calls import BlockingCalls
from outrider.requests.engine_loop import EngineLoop, RequestState
from outrider.requests.hooks import ReadOptions, constraint_of
from outrider.requests.row_options import LISTS, all_row_options, check_names, check_resume_ids, check_tokens, seed_of
from outrider.requests.session import Session
from outrider.runtime.lm import LM
from outrider.runtime.media import read_media
from outrider.sampling.rules import GUMBEL, RULES
from outrider.text.chat_images import chat_inputs, has_images
from outrider.text.prompts import begun_of, check_ids, check_padding, is_chat, media_of, prompts_of, without_media
from outrider.text.row_text import RowText
from outrider.text.thinking import Thinking
from outrider.text.thought_splitter import ThoughtSplitter
from outrider.text.tokenizer import Detokenizer, Prompt, encode

_LEAST_SESSION_CAPACITY = 2048  # tokens of a slot, so that most sessions never grow


class ReadPrompt(NamedTuple):
    """A checked prompt for any number of requests: token ids, what the model has read of images (None for text), and
    the text that the output continues (see ``begun_of``)."""

    ids: Sequence[int]
    media: MediaPrompt | None
    begun: str | None


@dataclass(frozen=True, slots=True)
class Decoder(BlockingCalls):
    """A target, a drafter and their defaults. It holds no state of a generation, so that one decoder serves many.

    Attributes:
        target: the model whose distribution the output follows.
        tokenizer: a tokenizer of Hugging Face; None for token ids in and out.
        eos_ids: end tokens.
        turn_ids: tokens that end turns, by the chat template: they end the output of a prompt with one of them.
        drafter: proposes tokens.
        acceptance: name of the rule, "rejection", "block" or "gumbel" (see outrider.sampling.rules).
        processor: a processor of Hugging Face, for chats with images; None where there are none.
        num_draft_tokens: default K; "auto" chooses it each round for the most tokens per second. (Under "auto" a row
            whose seed is given keeps K = 4 where its output depends on K.)
        sampling_defaults: fields of ``Sampling`` for calls without one, as the target's checkpoint states (``load``).
        pair_state: estimates of this pair for "auto", kept from call to call, by ``replace`` too.
    """

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    drafter: Drafter
    acceptance: str = DEFAULT_ACCEPTANCE
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)
    pair_state: PairState | None = field(default=None, repr=False, compare=False)
    processor: Any | None = field(default=None, repr=False)
    turn_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.acceptance not in RULES:
            raise OptionError("acceptance", self.acceptance, f"choose one of {', '.join(RULES)}")
        check_num_draft_tokens(self.num_draft_tokens)
        pair = self.pair_state
        if pair is None or pair.target is not self.target or pair.drafter is not self.drafter:
            object.__setattr__(self, "pair_state", PairState(self.target, self.drafter))

    def plain(self) -> Decoder:
        """A decoder with this target and no draft: the baseline of every comparison."""
        return replace(self, drafter=NO_DRAFTER)

    def depends_on_draft(self, temperature: float) -> bool:
        """Whether the text for a seed depends on the draft and K, as every sampled one does except under gumbel."""
        return temperature > 0 and self.acceptance != GUMBEL.name and self.drafter.most_drafted != 0

    def same_bytes(self, temperature: float) -> str:
        """Whether a text is promised to be the bytes of plain decoding: "promised", or "not promised" with the name of
        the rule or the execution that prevents it."""
        differs = self.depends_on_draft(temperature)
        return f"not promised ({self.acceptance})" if differs else self.target.same_bytes

    def complete(
        self,
        prompts: Iterable[Prompt | tuple[Prompt, Mapping[str, Any]]],
        sampling: Sampling | None = None,
        *,
        num_slots: int = DEFAULT_NUM_SLOTS,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[tuple[int, Completion | OutriderError]]:
        """Generate for any number of prompts, in constant memory: prompts are read as slots become free, and
        completions are yielded as rows end, not in order.

        Args:
            prompts: each alone, or with options of its own, which override all others.
            sampling, num_slots, num_draft_tokens, acceptance, changes: see ``stream_many``; each option is one value.
                Prompt i gets seed + i here, too, unless it has a seed of its own.

        Yields:
            The index of the prompt and its completion; or its error (PromptError, OptionError, NumericsError), while
            the other prompts continue.
        """
        own = self._with(num_draft_tokens, acceptance)
        check_count("num_slots", num_slots)
        (options,) = all_row_options(sampling, {}, 1, self.sampling_defaults)
        check_names(changes)
        return own._completions(prompts_of(prompts), num_slots, options | changes)

    def session(
        self,
        slots: int = DEFAULT_NUM_SESSION_SLOTS,
        capacity: int | None = None,
        *,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
    ) -> Session:
        """Open a session: calls that share an engine, and the prefixes in its cache. Use it in a ``with`` statement.
        Raises OptionError.

        Args:
            slots: concurrent rows, and prefixes that are kept.
            capacity: the most tokens in a row, prompt included; a longer request is refused. None: the cache begins
                with 2048 tokens (or the context, if that is shorter) and grows, as soon as no row is running, when a
                request needs more; the prefixes are then fed again.
            num_draft_tokens, acceptance: in place of the decoder's.
        """
        own = self._with(num_draft_tokens, acceptance)
        check_count("slots", slots)
        least, most = _LEAST_SESSION_CAPACITY, self.target.context_len
        if capacity is not None:
            if isinstance(capacity, bool) or not isinstance(capacity, int) or not 2 <= capacity <= most:
                remedy = f"a whole number of tokens from 2 to {most}, the context of {self.target.name}"
                raise OptionError("capacity", capacity, remedy)
            least = most = min(capacity + own.constant_k, most)
        loop = EngineLoop(partial(own.engine, slots), least_capacity=least, most_capacity=most)
        return Session(own._requests, loop, self.target, capacity)

    def async_session(
        self,
        slots: int = DEFAULT_NUM_SLOTS,
        capacity: int | None = None,
        *,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
    ) -> AsyncSession:
        """A session for an event loop, whose tasks share it: ``async with decoder.async_session() as session``, then
        ``async for chunk in session.stream(...)``. Arguments and errors: see ``session``."""
        session = self.session(slots, capacity, num_draft_tokens=num_draft_tokens, acceptance=acceptance)
        return AsyncSession(lambda: session)

    def engine(
        self,
        num_slots: int,
        capacity: int,
        *,
        prefill_chunk: int | None = PREFILL_CHUNK,
        queue: FairQueue[Row] | None = None,
    ) -> Engine:
        """An engine for requests that arrive at any time (docs/internals/architecture.md), made by ``request``.

        Args:
            capacity: most tokens in a row, prompt included.
            prefill_chunk, queue: see ``Engine``.
        """
        assert self.pair_state is not None
        rule = RULES[self.acceptance]
        schedule: Schedule = ConstantSchedule(self.constant_k)
        if self.num_draft_tokens == "auto" and self.drafter.most_drafted != 0:
            schedule = AdaptiveSchedule(self.pair_state.estimates(rule))
        return Engine(
            self.target,
            self.drafter,
            rule,
            num_slots=num_slots,
            capacity=capacity,
            schedule=schedule,
            prefill_chunk=prefill_chunk,
            queue=queue,
        )

    def loop(self, num_slots: int, prefill_chunk: int | None = PREFILL_CHUNK) -> EngineLoop:
        """A loop for requests made by ``request``, over an engine that is made when a request needs it."""
        make = partial(self.engine, num_slots, prefill_chunk=prefill_chunk)
        return EngineLoop(make, most_capacity=self.target.context_len)

    def read_prompt(self, prompt: Prompt) -> ReadPrompt:
        """A prompt for several requests: it is encoded, and its images are read, only once. Raises PromptError."""
        begun = begun_of(prompt)
        prompt = chat_inputs(self.processor, prompt) if has_images(prompt) else prompt  # type: ignore[arg-type]
        inputs = media_of(prompt)
        ids = self._checked_ids(without_media(prompt), has_images=bool(inputs))
        return ReadPrompt(ids, read_media(self.target, ids, inputs) if inputs else None, begun)

    def read_options(self, options: Mapping[str, Any]) -> ReadOptions:
        """Options for several requests: see ``request``. Raises OptionError."""
        check_names(options)
        options = {**self.sampling_defaults, **options}
        lists = {name: () for name in LISTS if options.get(name) is None}
        sampling = Sampling(**{**options, **lists})
        check_tokens(sampling, self.target.vocab_size, self.eos_ids)
        if sampling.stop and self.tokenizer is None:
            raise OptionError("stop", sampling.stop, "stop strings need a tokenizer")
        return ReadOptions.of(sampling, self.tokenizer, self.target.vocab_size)

    def request(
        self,
        prompt: Prompt | ReadPrompt,
        options: Mapping[str, Any] | ReadOptions,
        *,
        resume_ids: Sequence[int] = (),
        shown_ids: Collection[int] = (),
        includes_stop: bool = False,
        thinking: Thinking | None = None,
        splits_thoughts: bool = True,
        is_repeatable: bool = True,
        reports_drafts: bool = False,
    ) -> RequestState:
        """A checked request. Raises OptionError, PromptError.

        Args:
            options: fields of ``Sampling``, one value each; others are the decoder's defaults.
            resume_ids: see ``stream``.
            shown_ids: special tokens that are written in the text.
            includes_stop: the token or string that ends the text is written in it.
            thinking: markers of thoughts, after which constraints begin.
            splits_thoughts: separate thoughts from text; then stop strings count after thoughts alone.
            is_repeatable, reports_drafts: see ``CallOptions``.
        """
        target, tokenizer = self.target, self.tokenizer
        options = options if isinstance(options, ReadOptions) else self.read_options(options)
        sampling = options.sampling
        ids, media, begun = prompt if isinstance(prompt, ReadPrompt) else self.read_prompt(prompt)
        if not (has_seed := sampling.seed is not None):  # 53 bits: JSON numbers are float64 in other languages
            sampling = with_checked(sampling, seed=secrets.randbits(53))
        ends = self.ends_of(ids)
        if sampling.min_tokens:  # until then no end may be generated
            check_tokens(sampling, target.vocab_size, ends)
        constraint = constraint_of(options, tokenizer, target.vocab_size, ends, ids, thinking, begun)
        thoughts = None
        if thinking is not None and splits_thoughts:
            stage = thinking.stage_of(tokenizer, ids, begun)
            thoughts = ThoughtSplitter(thinking, stage, is_continued=bool(begun))
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, ids, shown_ids)
        stops = sampling.stop, sampling.stop_token_ids, sampling.min_tokens
        text = RowText(detokenizer, () if sampling.ignore_eos else ends, *stops, includes_stop, thoughts)
        check_resume_ids(resume_ids, target.vocab_size)
        num_resumed = len(resume_ids)
        if num_resumed >= sampling.max_new_tokens or len(ids) + num_resumed >= target.context_len:
            remedy = "the output is complete: nothing is left to generate"
            raise OptionError("resume_ids", f"{num_resumed} tokens", remedy)
        for token_id in resume_ids:
            if text.push(token_id) is not None:
                raise OptionError("resume_ids", token_id, "the output ended with this token")
            if constraint is not None and not constraint.push(token_id):
                raise OptionError("resume_ids", token_id, "the constraint forbids this token")
        text.take()  # emitted before the cut
        text.parts.clear()
        # If the output for a given seed depends on K, it must not depend on the load: K is constant under "auto". With
        # a constant K it must not depend on its own end, since a drawn seed is reported and may be given.
        is_fixed, is_auto = has_seed and is_repeatable, self.num_draft_tokens == "auto"
        depends_on_k = self.depends_on_draft(sampling.temperature)
        request = Request(
            [*ids, *resume_ids],
            sampling.with_ends(ends),
            text,
            num_draft_tokens=self.constant_k if is_auto and is_fixed and depends_on_k else None,
            reports_drafts=reports_drafts,
            drafts_beyond_end=depends_on_k and (is_fixed or not is_auto),
            num_resumed=num_resumed,
            constraint=constraint,
            media=media,
        )
        return RequestState(request, text, len(ids), num_resumed, final_room(target, request, self.constant_k))

    def ends_of(self, prompt_ids: Sequence[int]) -> frozenset[int]:
        """Tokens that end the output of a prompt: a chat, whoever has applied its template, ends with a turn."""
        return self.eos_ids if self.turn_ids.isdisjoint(prompt_ids) else self.eos_ids | self.turn_ids

    def of_one_kind(self, prompts: Iterable[Sequence[int]]) -> Decoder:
        """A decoder for texts that share their options: if one of the prompts is a chat, all texts end with turns."""
        ends = self.eos_ids.union(*(self.ends_of(prompt_ids) for prompt_ids in prompts))
        return replace(self, eos_ids=ends, turn_ids=frozenset())

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt. Raises PromptError: it is empty, too long for the context, or has ids beyond the
        vocabulary or of an image."""
        return self._checked_ids(prompt, has_images=False)

    def _checked_ids(self, prompt: Prompt, *, has_images: bool) -> list[int]:
        target, ids = self.target, encode(self.tokenizer, prompt)
        if len(ids) >= target.context_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but {target.name} can take {target.context_len} in all, "
                "prompt and output together: shorten it"
            )
        check_ids(ids, target.vocab_size, target.weights.config, self.tokenizer, has_images=has_images)
        return ids

    @property
    def constant_k(self) -> int:
        """K of rows whose K is constant."""
        k = DEFAULT_NUM_DRAFT_TOKENS if self.num_draft_tokens == "auto" else self.num_draft_tokens
        return k if self.drafter.most_drafted is None else min(k, self.drafter.most_drafted)

    def _with(self, num_draft_tokens: NumDraftTokens | None, acceptance: str | None) -> Decoder:
        given = {"num_draft_tokens": num_draft_tokens, "acceptance": acceptance}
        own: Any = {name: value for name, value in given.items() if value is not None}
        return replace(self, **own) if own else self

    def _open(
        self, prompts: Any, sampling: Any, resume_ids: Any, n: int, options: Mapping[str, Any]
    ) -> tuple[list[RequestState], EngineLoop]:
        changes = dict(options)
        num_slots, is_repeatable = changes.pop("num_slots", DEFAULT_NUM_SLOTS), changes.pop("is_repeatable", True)
        own = self._with(changes.pop("num_draft_tokens", None), changes.pop("acceptance", None))
        states = own._requests(prompts, sampling, resume_ids, n, changes, is_repeatable=is_repeatable)
        check_count("num_slots", num_slots)
        return states, own.loop(min(num_slots, len(states)), prefill_chunk=None)

    def _requests(
        self,
        given: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        resume_ids: Sequence[Sequence[int]] | None,
        n: int,
        options: Mapping[str, Any],
        *,
        is_repeatable: bool = True,
    ) -> list[RequestState]:
        check_count("n", n)
        changes, prompts = dict(options), list(prompts_of(given))
        reports_drafts = changes.pop("reports_drafts", False)
        check_padding(self.tokenizer, prompts)
        if resume_ids is not None and len(resume_ids) != n * len(prompts):
            raise OptionError("resume_ids", len(resume_ids), f"one list for each of the {n * len(prompts)} completions")
        rows = all_row_options(sampling, changes, len(prompts), self.sampling_defaults, n)
        states: list[RequestState] = []
        for index, prompt in enumerate(prompts):
            try:
                read = self.read_prompt(prompt)
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            for row in rows[index * n : (index + 1) * n]:
                resumed = () if resume_ids is None else resume_ids[len(states)]
                own = {"is_repeatable": is_repeatable, "reports_drafts": reports_drafts}
                states.append(self.request(read, row, resume_ids=resumed, **own))
        return states

    def _completions(
        self, prompts: Iterable[Any], num_slots: int, options: Mapping[str, Any]
    ) -> Iterator[tuple[int, Completion | OutriderError]]:
        """See ``complete``."""
        unread, loop = enumerate(prompts), self.loop(num_slots)
        arrived: deque[tuple[int, Chunk | OutriderError]] = deque()
        states: dict[int, RequestState] = {}

        while True:
            while len(states) < 2 * num_slots and (item := next(unread, None)) is not None:
                number, prompt = item
                own: Mapping[str, Any] = {}
                if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                    prompt, own = (prompt, own) if is_chat(prompt) else prompt
                try:
                    check_padding(self.tokenizer, [prompt])
                    own = {**options, "seed": seed_of(options.get("seed"), number), **own}
                    state = self.request(prompt, own)
                except (OptionError, PromptError) as error:
                    yield number, error
                else:
                    states[number] = state
                    loop.submit([state], lambda *item: arrived.append(item), first_number=number)
            if not states:
                return
            while not arrived:
                loop.step(skip_if=arrived)
            number, found = arrived.popleft()
            if isinstance(found, OutriderError):
                del states[number]
                yield number, found
            else:
                states[number].chunks.append(found)
                if found.finish_reason is not None:
                    yield number, states.pop(number).completion
