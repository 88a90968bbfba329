"""A target and its drafter: text in, chunks of text out. The stream is the primitive; ``generate`` collects it."""

from __future__ import annotations

import math
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

from outrider.compile.compiled_lm import compiled_lm
from outrider.compile.service import CompileService
from outrider.decoding.batch import final_room
from outrider.decoding.engine import Engine, decode
from outrider.decoding.pair_state import PairState
from outrider.decoding.schedule import AdaptiveSchedule, ConstantSchedule, Schedule
from outrider.drafters.base import Drafter, NoDrafter
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError
from outrider.options import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    DEFAULT_NUM_SLOTS,
    NumDraftTokens,
    Sampling,
    SamplingChanges,
    check_num_draft_tokens,
    check_num_slots,
)
from outrider.records import Chunk, Completion, Constraint, Request, Round, Timing
from outrider.request_state import RequestState, check_names, chunk_of, chunks_of, completion_of, rows_of, seed_of
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES, Rule
from outrider.system.ranks import current_ranks
from outrider.text.prompts import check_ids, check_padding, is_chat, prompts_of
from outrider.text.row_text import RowText
from outrider.text.structure import Structure
from outrider.text.tokenizer import Detokenizer, Prompt, encode


@dataclass(frozen=True, slots=True)
class Decoder:
    """A target, a drafter and their defaults. It holds no state of a generation, so that one decoder serves many.

    Attributes:
        target: the model whose distribution the output follows.
        tokenizer: of Hugging Face; None for token ids in and out.
        eos_ids: end tokens.
        drafter: proposes tokens.
        acceptance: name of the rule, "rejection", "block" or "gumbel" (see outrider.sampling.rules).
        num_draft_tokens: default K; "auto" chooses it each round for the most tokens per second. (Under "auto" a row
            whose seed is given keeps K = 4 where its output depends on K.)
        pair_state: estimates of this pair for "auto", kept from call to call. ``replace`` keeps it, unless target or
            drafter change.
    """

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    drafter: Drafter
    acceptance: str = DEFAULT_ACCEPTANCE
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS
    pair_state: PairState | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_acceptance(self.acceptance)
        check_num_draft_tokens(self.num_draft_tokens)
        if self.pair_state is None or not self.pair_state.is_of(self.target, self.drafter):
            object.__setattr__(self, "pair_state", PairState(self.target, self.drafter))

    @property
    def context_len(self) -> int:
        """Context length of the target, or of the drafter if that is shorter."""
        own = self.target.context_len
        return min(own, self.drafter.context_len or own)

    def plain(self) -> Decoder:
        """A decoder with this target and no draft: the baseline of every comparison."""
        return replace(self, drafter=NoDrafter())

    def compiled(self, *, waits: bool = True, service: CompileService | None = None) -> Decoder:
        """A decoder whose models are compiled when a shape is first used: half a minute each, or milliseconds from the
        cache on disk. On a CUDA device they are captured as CUDA graphs instead, which is quick and not cached. It pays
        for long work. Keep the result, since the programs are freed with it.

        Args:
            waits: False starts generating at once: rounds are eager until another process has compiled their programs.
                Rounds with a row whose seed was given wait nevertheless, so that its output does not depend on what
                was compiled before.
            service: compiles the programs; None for that of this process.

        Raises:
            CompileError: several processes share the target; or, from the first generation, a model or this machine
                does not support it.
        """
        change = partial(compiled_lm, waits=waits, service=service)
        return replace(self, target=change(self.target), drafter=self.drafter.with_models(change))

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
        # In a list, a single message would be taken for a chat.
        prompt = self.encode(prompt) if isinstance(prompt, Mapping) else prompt
        return self.stream_many(
            [prompt],
            sampling,
            resume_ids=[resume_ids],
            num_draft_tokens=num_draft_tokens,
            acceptance=acceptance,
            is_repeatable=is_repeatable,
            reports_drafts=reports_drafts,
            **changes,
        )

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
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
            resume_ids: for each prompt the tokens generated before (see ``stream``).
            num_slots: concurrent prompts. When a row ends, the next prompt takes its slot.
            num_draft_tokens, acceptance: for this call, in place of the decoder's.
            is_repeatable: the output of a row whose seed is given depends on the call alone: under "auto" its K is
                constant if the output depends on K, and its rounds wait for their programs. False lifts both (for
                measurements; the output distribution is the same if no seed is used twice with this decoder).
            reports_drafts: report all drafted tokens in chunks, rejected or not, with p and q.
            sampling: options of all rows, or a list with one for each row; None for the defaults. A single ``seed`` is
                the base seed; prompt i gets seed + i. Without a seed each row draws its own.
            changes: fields of ``Sampling`` in place of those of ``sampling``.

        Raises:
            OptionError, PromptError: from the call, not from the first chunk.
            NumericsError: from the iterator.
        """
        jobs = self._jobs(prompts, sampling, changes, resume_ids)
        for job in jobs:
            job.has_seed &= is_repeatable
            job.request = replace(job.request, reports_drafts=reports_drafts)
        return chunks_of(self._rounds(jobs, num_slots, num_draft_tokens, acceptance), jobs)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        resume_ids: Sequence[Sequence[int]] | None = None,
        num_slots: int = DEFAULT_NUM_SLOTS,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> list[Completion]:
        """Generate for one prompt or several, and wait for all. Arguments and errors: see ``stream_many``.

        Returns:
            A completion for each prompt, in order.
        """
        jobs = self._jobs(prompts, sampling, changes, resume_ids)
        for chunk in chunks_of(self._rounds(jobs, num_slots, num_draft_tokens, acceptance), jobs):
            jobs[chunk.row].chunks.append(chunk)
        return [completion_of(job) for job in jobs]

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
        k, rule = self._k_and_rule(num_draft_tokens, acceptance)
        check_num_slots(num_slots)
        (options,) = rows_of(sampling, {}, 1)
        check_names(changes)
        return self._complete(enumerate(prompts_of(prompts)), num_slots, k, rule, options | changes)

    def _complete(
        self,
        prompts: Iterator[tuple[int, Any]],
        num_slots: int,
        k: NumDraftTokens,
        rule: Rule,
        options: dict[str, Any],
    ) -> Iterator[tuple[int, Completion | OutriderError]]:
        room_of = partial(final_room, self.target, max_k=_most_k(k))
        waiting: deque[tuple[int, RequestState]] = deque()
        engine: Engine | None = None
        capacity = 0
        open_jobs: dict[int, tuple[int, RequestState]] = {}
        while True:
            while len(waiting) < num_slots and (item := next(prompts, None)) is not None:
                number, prompt = item
                own: Mapping[str, Any] = {}
                if isinstance(prompt, tuple) and len(prompt) == 2 and isinstance(prompt[1], Mapping):
                    prompt, own = (prompt, own) if is_chat(prompt) else prompt
                own = options | {"seed": seed_of(options.get("seed"), number)} | dict(own)
                try:
                    check_padding(self.tokenizer, [prompt])
                    waiting.append((number, self._repeatable(self._job(prompt, own), k, rule)))
                except (OptionError, PromptError) as error:
                    yield number, error
            if not open_jobs and waiting:
                longest = max(room_of(job.request) for _, job in waiting)
                if engine is None or longest > capacity:
                    # A longer sequence than any before: all rows have ended, so a larger cache replaces the old one.
                    engine, capacity = None, min(max(longest, 2 * capacity), self.target.context_len)
                    engine = self._engine(k, rule, num_slots, capacity)
            if engine is None:
                return
            while waiting and len(open_jobs) < 2 * num_slots and room_of(waiting[0][1].request) <= capacity:
                number, job = waiting.popleft()
                open_jobs[engine.submit(job.request)] = number, job
            round_ = engine.step()
            if round_ is None and not waiting:
                return
            for row in () if round_ is None else round_.rows:
                number, job = open_jobs[row.row]
                if row.error is not None:
                    del open_jobs[row.row]
                    yield number, NumericsError(row.error)
                    continue
                job.chunks.append(chunk_of(row, job, Timing()))
                if row.finish_reason is not None:
                    del open_jobs[row.row]
                    yield number, completion_of(job)

    def engine(self, num_slots: int, capacity: int) -> Engine:
        """An engine for requests that arrive at any time (docs/engine.md), made by ``job``.

        Args:
            capacity: most tokens in a row, prompt included.
        """
        return self._engine(*self._k_and_rule(None, None), num_slots, capacity)

    def job(self, prompt: Prompt, options: Mapping[str, Any]) -> RequestState:
        """A checked request for ``engine``.

        Args:
            options: fields of ``Sampling``, one value each.

        Raises:
            OptionError, PromptError
        """
        return self._repeatable(self._job(prompt, options), *self._k_and_rule(None, None))

    def _engine(self, k: NumDraftTokens, rule: Rule, num_slots: int, capacity: int) -> Engine:
        schedule = self._schedule(k, rule, num_slots, capacity)
        return Engine(self.target, self.drafter, rule, num_slots=num_slots, capacity=capacity, schedule=schedule)

    def _k_and_rule(
        self, num_draft_tokens: NumDraftTokens | None, acceptance: str | None
    ) -> tuple[NumDraftTokens, Rule]:
        k = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        check_num_draft_tokens(k)
        return k, RULES[_check_acceptance(self.acceptance if acceptance is None else acceptance)]

    def _rounds(
        self,
        jobs: Sequence[RequestState],
        num_slots: int,
        num_draft_tokens: NumDraftTokens | None,
        acceptance: str | None,
    ) -> Iterator[Round]:
        k, rule = self._k_and_rule(num_draft_tokens, acceptance)
        check_num_slots(num_slots)
        if not jobs:
            return iter(())
        requests = [self._repeatable(job, k, rule).request for job in jobs]
        num_slots = min(num_slots, len(requests))
        longest = max(final_room(self.target, request, _most_k(k)) for request in requests)
        schedule = self._schedule(k, rule, num_slots, longest)
        return decode(self.target, self.drafter, requests, rule, num_draft_tokens=schedule, num_slots=num_slots)

    def _schedule(self, k: NumDraftTokens, rule: Rule, num_slots: int, num_tokens: int) -> Schedule:
        most = self.drafter.most_drafted
        if most == 0:
            return ConstantSchedule(0)
        if isinstance(k, int):
            return ConstantSchedule(k if most is None else min(k, most))
        assert self.pair_state is not None
        return AdaptiveSchedule(self.pair_state.estimates(rule, num_slots, num_tokens))

    def _repeatable(self, job: RequestState, k: NumDraftTokens, rule: Rule) -> RequestState:
        """Make the request reproducible. The output for a given seed must not depend on what is compiled. If it depends
        on K, it must not depend on the load either, so that under "auto" K is constant. With a constant K it must not
        depend on its own end, since a drawn seed is reported and may be given."""
        sampling, most = job.request.sampling, self.drafter.most_drafted
        depends_on_k = most != 0 and rule.name != "gumbel" and sampling.temperature > 0
        is_constant = k != "auto" or job.has_seed
        job.request = replace(job.request, is_repeatable=job.has_seed, drafts_beyond_end=depends_on_k and is_constant)
        if k == "auto" and depends_on_k and job.has_seed:
            own = _most_k(k) if most is None else min(_most_k(k), most)
            job.request = replace(job.request, num_draft_tokens=own)
        return job

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: it is empty, too long for the context, or has ids beyond the vocabulary or of an image.
        """
        ids = encode(self.tokenizer, prompt)
        if len(ids) >= self.target.context_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but {self.target.name} can take {self.target.context_len} in all, "
                "prompt and output together: shorten it"
            )
        check_ids(ids, self.target.vocab_size, self.target.model.config, self.tokenizer)
        return ids

    def _jobs(
        self,
        given: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        changes: Mapping[str, Any],
        resume_ids: Sequence[Sequence[int]] | None,
    ) -> list[RequestState]:
        prompts = list(prompts_of(given))
        check_padding(self.tokenizer, prompts)
        if resume_ids is not None and len(resume_ids) != len(prompts):
            raise OptionError("resume_ids", len(resume_ids), f"one list for each of the {len(prompts)} prompts")
        jobs = []
        for index, (prompt, own) in enumerate(zip(prompts, rows_of(sampling, changes, len(prompts)), strict=True)):
            try:
                jobs.append(self._job(prompt, own, () if resume_ids is None else resume_ids[index]))
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
        return jobs

    def _job(self, prompt: Prompt, options: Mapping[str, Any], resume_ids: Sequence[int] = ()) -> RequestState:
        """A checked request.

        Args:
            options: the fields of ``Sampling``, one value each.
        """
        check_names(options)
        ids = self.encode(prompt)
        has_seed = options.get("seed") is not None
        # 53 bits: JSON numbers are float64 in other languages.
        seed = options["seed"] if has_seed else current_ranks().shared(secrets.randbits(53))
        stop = options.get("stop")
        stop_ids = options.get("stop_token_ids")
        lists = {"stop": () if stop is None else stop, "stop_token_ids": () if stop_ids is None else stop_ids}
        sampling = Sampling(**{**options, "seed": seed, **lists})
        self.check_tokens(sampling)
        if sampling.stop and self.tokenizer is None:
            raise OptionError("stop", sampling.stop, "stop strings need a tokenizer")
        constraint = self.constraint_of(sampling)
        detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, ids)
        eos_ids = () if sampling.ignore_eos else self.eos_ids
        text = RowText(detokenizer, eos_ids, sampling.stop, sampling.stop_token_ids, sampling.min_tokens)
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
        full = sampling.with_ends(self.eos_ids)
        request = Request([*ids, *resume_ids], full, text, num_resumed=len(resume_ids), constraint=constraint)
        return RequestState(request, text, len(ids), len(resume_ids), has_seed)

    def constraint_of(self, sampling: Sampling) -> Constraint | None:
        """The constraint of a request with these options, if any. Raises OptionError, MissingExtra."""
        if not sampling.is_constrained:
            return None
        return Structure(sampling, self.tokenizer, self.target.vocab_size, self.eos_ids)

    def check_tokens(self, sampling: Sampling) -> None:
        """Check that the vocabulary has the tokens that the options name, and that one may be generated. Raises
        OptionError."""
        vocab_size, bias = self.target.vocab_size, sampling.logit_bias or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", sampling.stop_token_ids)):
            if max(ids, default=0) >= vocab_size:
                raise OptionError(name, max(ids), f"token ids are below {vocab_size}")
        forbidden = {token_id for token_id, value in bias.items() if value == -math.inf}
        if len(forbidden) == vocab_size:
            raise OptionError("logit_bias", -math.inf, "it forbids every token")
        if sampling.min_tokens and len(forbidden.union(sampling.stop_token_ids, self.eos_ids)) == vocab_size:
            raise OptionError("min_tokens", sampling.min_tokens, "no token is left that does not end the output")


def _check_acceptance(name: str) -> str:
    if name not in RULES:
        raise OptionError("acceptance", name, f"choose one of {', '.join(RULES)}")
    return name


def _most_k(k: NumDraftTokens) -> int:
    """K, or the default of rows with a constant K under "auto"."""
    return DEFAULT_NUM_DRAFT_TOKENS if k == "auto" else k
