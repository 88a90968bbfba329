"""A target and its drafter: text in, chunks of text out. The stream is the primitive; ``generate`` collects it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from outrider.decoding.engine import Engine
from outrider.decoding.schedule import PairState
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.errors import OptionError, OutriderError
from outrider.options import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SESSION_SLOTS,
    DEFAULT_NUM_SLOTS,
    NumDraftTokens,
    Sampling,
    SamplingChanges,
    check_num_draft_tokens,
    check_num_slots,
)
from outrider.records import Chunk, Completion
from outrider.requests.async_session import AsyncSession
from outrider.requests.call import GenerateCall, ReadPrompt, checked_ids, collect, ends_of
from outrider.requests.row_options import check_names, rows_of
from outrider.requests.session import Session, SessionCalls
from outrider.requests.state import RequestState
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.output_parser import ThoughtSplitter
from outrider.text.prompts import prompts_of
from outrider.text.tokenizer import Prompt


@dataclass(frozen=True, slots=True)
class Decoder:
    """A target, a drafter and their defaults. It holds no state of a generation, so that one decoder serves many.

    Attributes:
        target: the model whose distribution the output follows.
        tokenizer: a tokenizer of Hugging Face; None for token ids in and out.
        eos_ids: end tokens.
        turn_ids: tokens that end turns, by the chat template: they end the output of a prompt that has one of them.
        drafter: proposes tokens.
        acceptance: name of the rule, "rejection", "block" or "gumbel" (see outrider.sampling.rules).
        processor: a processor of Hugging Face, for chats with images; None where there are none.
        num_draft_tokens: default K; "auto" chooses it each round for the most tokens per second. (Under "auto" a row
            whose seed is given keeps K = 4 where its output depends on K.)
        sampling_defaults: fields of ``Sampling`` for calls without one: those that the target's checkpoint states (see
            ``load``).
        pair_state: estimates of this pair for "auto", kept from call to call. ``replace`` keeps it, unless target or
            drafter change.
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
        _check_acceptance(self.acceptance)
        check_num_draft_tokens(self.num_draft_tokens)
        if self.pair_state is None or not self.pair_state.is_of(self.target, self.drafter):
            object.__setattr__(self, "pair_state", PairState(self.target, self.drafter))

    def plain(self) -> Decoder:
        """A decoder with this target and no draft: the baseline of every comparison."""
        return replace(self, drafter=NO_DRAFTER)

    def compiled(self, *, waits: bool = True, service: object = None) -> Decoder:
        """Deprecated: the decoder itself. The fast execution of each device is the default (see ``Placement``)."""
        warnings.warn("Decoder.compiled has no effect: the fast execution is the default", FutureWarning, stacklevel=2)
        return self

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        is_repeatable: bool = True,
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[Chunk]:
        """Generate for one prompt, one chunk per round. Options: see ``stream_many``.

        The iterator may be dropped at any time. A call with ``resume_ids``, the tokens generated so far, continues from
        there; stop strings and characters may span the cut. ``max_new_tokens`` counts the tokens of ``resume_ids`` too.
        Cut at the end of a round (after a chunk; under ``gumbel`` anywhere), a given seed yields the output of the
        uncut stream.
        """
        call = self._call(num_draft_tokens, acceptance, is_repeatable, reports_drafts)
        return call.chunks(call.one(prompt, sampling, changes, resume_ids), num_slots=1)

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        num_slots: int = DEFAULT_NUM_SLOTS,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        is_repeatable: bool = True,
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[Chunk]:
        """Generate for several prompts concurrently, one chunk per row and round.

        Args:
            prompts: texts, lists of token ids, or chats; or one of these; or the output of a tokenizer, with its mask.
            n: completions of each prompt, in turn: completion j of prompt i is row i n + j. The prompt is fed once.
            resume_ids: for each completion the tokens generated before (see ``stream``).
            num_slots: concurrent prompts. When a row ends, the next prompt takes its slot.
            num_draft_tokens, acceptance: for this call, in place of the decoder's.
            is_repeatable: the output of a row whose seed is given depends on the call alone: under "auto" its K is
                constant if the output depends on K. False lifts this (for measurements; the output distribution is the
                same if no seed is used twice with this decoder).
            reports_drafts: report all drafted tokens in chunks, rejected or not, with p and q.
            sampling: options of all prompts, or a list with one for each; None for ``sampling_defaults``. A
                single ``seed`` is the base seed; row i gets seed + i. (A list has the seed of each prompt's first row.)
                Without a seed each row draws its own.
            changes: fields of ``Sampling`` in place of those of ``sampling``.

        Raises:
            OptionError, PromptError: from the call, not from the first chunk.
            NumericsError: from the iterator.
        """
        call = self._call(num_draft_tokens, acceptance, is_repeatable, reports_drafts)
        return call.chunks(call.states(prompts, sampling, changes, resume_ids, n), num_slots)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        num_slots: int = DEFAULT_NUM_SLOTS,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> list[Completion]:
        """Generate for one prompt or several, and wait for all. Arguments and errors: see ``stream_many``.

        Returns:
            ``n`` completions for each prompt, in order.
        """
        call = self._call(num_draft_tokens, acceptance)
        states = call.states(prompts, sampling, changes, resume_ids, n)
        return collect(states, call.chunks(states, num_slots))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Iterator[Chunk]:
        """Generate the answer to a chat, one chunk per round.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``; a string is one message of the user.
            options: fields of ``ChatOptions`` (``system``, ``tools``, ``chat_template_kwargs``, ...), which go to the
                chat template; and options of ``stream``.

        Raises:
            PromptError: there is no chat template, or it does not accept the messages.
            OptionError: an option is invalid, or the template does not read it.
        """
        chat, others = chat_of(messages, options)
        return self.stream(chat, sampling, **others)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Completion:
        """Generate the answer to a chat, and wait for it. Arguments and errors: see ``stream_chat``. (``generate``
        takes several chats.)"""
        chat, others = chat_of(messages, options)
        (completion,) = self.generate(chat, sampling, **others)
        return completion

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
        call = self._call(num_draft_tokens, acceptance)
        check_num_slots(num_slots)
        (options,) = rows_of(sampling, {}, 1, self.sampling_defaults)
        check_names(changes)
        return call.completions(prompts_of(prompts), num_slots, options | changes)

    def session(
        self,
        slots: int = DEFAULT_NUM_SESSION_SLOTS,
        capacity: int | None = None,
        *,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
    ) -> Session:
        """Open a session: calls that share an engine, and the prefixes in its cache. Use it in a ``with`` statement.

        Args:
            slots: concurrent rows, and prefixes that are kept.
            capacity: the most tokens in a row, prompt included; a longer request is refused. None: the cache begins
                with 2048 tokens (or the context, if that is shorter) and grows, as soon as no row is running, when a
                request needs more; the prefixes are then fed again.
            num_draft_tokens, acceptance: in place of the decoder's.

        Raises:
            OptionError
        """
        return Session(SessionCalls(self._call(num_draft_tokens, acceptance), slots, capacity))

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
        return AsyncSession(SessionCalls(self._call(num_draft_tokens, acceptance), slots, capacity))

    def engine(self, num_slots: int, capacity: int) -> Engine:
        """An engine for requests that arrive at any time (docs/internals/engine.md), made by ``request``.

        Args:
            capacity: most tokens in a row, prompt included.
        """
        return self._call().engine(num_slots, capacity)

    def read(self, prompt: Prompt) -> ReadPrompt:
        """A prompt for several requests: it is encoded, and its images are read, only once. Raises PromptError."""
        return self._call().read(prompt)

    def request(
        self,
        prompt: Prompt | ReadPrompt,
        options: Mapping[str, Any],
        *,
        shown_ids: Collection[int] = (),
        includes_stop: bool = False,
        thoughts: ThoughtSplitter | None = None,
    ) -> RequestState:
        """A checked request for ``engine``.

        Args:
            options: fields of ``Sampling``, one value each; others are the decoder's defaults.
            shown_ids: special tokens that are written in its text.
            includes_stop: so is the token or string that ends it.
            thoughts: splits off its thoughts, in which stop strings do not count.

        Raises:
            OptionError, PromptError
        """
        read = prompt if isinstance(prompt, ReadPrompt) else self.read(prompt)
        own = {**self.sampling_defaults, **options}
        return self._call().state(read, own, shown_ids=shown_ids, includes_stop=includes_stop, thoughts=thoughts)

    def ends_of(self, prompt_ids: Sequence[int]) -> frozenset[int]:
        """Tokens that end the output of a prompt."""
        return ends_of(prompt_ids, self.eos_ids, self.turn_ids)

    def of_one_kind(self, prompts: Iterable[Sequence[int]]) -> Decoder:
        """A decoder for texts that share their options: if one of the prompts is a chat, all texts end with turns."""
        ends = self.eos_ids.union(*(self.ends_of(prompt_ids) for prompt_ids in prompts))
        return replace(self, eos_ids=ends, turn_ids=frozenset())

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: it is empty, too long for the context, or has ids beyond the vocabulary or of an image.
        """
        return checked_ids(self.target, self.tokenizer, prompt)

    def _call(
        self,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        is_repeatable: bool = True,
        reports_drafts: bool = False,
    ) -> GenerateCall:
        k = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        check_num_draft_tokens(k)
        rule = RULES[_check_acceptance(self.acceptance if acceptance is None else acceptance)]
        assert self.pair_state is not None
        models = self.target, self.tokenizer, self.eos_ids, self.turn_ids, self.drafter, self.pair_state
        shared = self.sampling_defaults, is_repeatable, reports_drafts, self.processor
        return GenerateCall(*models, k, rule, *shared)


def _check_acceptance(name: str) -> str:
    if name not in RULES:
        raise OptionError("acceptance", name, f"choose one of {', '.join(RULES)}")
    return name
