"""A target and its drafter: text in, chunks of text out. The stream is the primitive; ``generate`` gathers it."""

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
from outrider.decoding.pair_state import Experience
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
    """A target, a drafter and how they are used. It holds no state of any generation, so one may serve many.

    Attributes:
        target: the model whose distribution the output follows.
        tokenizer: of Hugging Face; None if prompts are token ids and only ids are wanted.
        eos_ids: tokens that end a text.
        drafter: what proposes.
        acceptance: name of the rule, "rejection", "block" or "gumbel" (see outrider.sampling.rules).
        num_draft_tokens: K, the default; "auto" chooses it each round for the most tokens per second. (Under "auto" a
            row whose seed is given keeps K = 4 where its text depends on K.)
        experience: of this pair under "auto": later calls begin with what earlier ones have learned. ``replace`` hands
            it on, and gives a decoder with another target or drafter one of its own.
    """

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    drafter: Drafter
    acceptance: str = DEFAULT_ACCEPTANCE
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS
    experience: Experience | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_acceptance(self.acceptance)
        check_num_draft_tokens(self.num_draft_tokens)
        if self.experience is None or not self.experience.is_of(self.target, self.drafter):
            object.__setattr__(self, "experience", Experience(self.target, self.drafter))

    @property
    def context_len(self) -> int:
        """Tokens that both models can take, where the drafter has one."""
        own = self.target.context_len
        return min(own, self.drafter.context_len or own)

    def plain(self) -> Decoder:
        """The same target without a draft: the baseline of every comparison."""
        return replace(self, drafter=NoDrafter())

    def compiled(self, *, waits: bool = True, service: CompileService | None = None) -> Decoder:
        """The same models, compiled ahead of time when a shape is first met: half a minute for each, or some
        milliseconds where it is found on disk. On a CUDA device they are captured as graphs instead, which takes a
        moment and is not kept on disk. It pays for long work. Keep the result: what was compiled is lost with it.

        Args:
            waits: False lets texts begin at once: rounds are eager until another process has compiled their programs.
                Rounds with a row whose seed was given wait all the same, so that its text does not depend on what was
                compiled before.
            service: that compiles the programs; None for that of this process.

        Raises:
            CompileError: several processes share the target; or, from the first generation, a model or this machine
                does not allow it.
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
        """Generate for one prompt, a chunk a round. Options: see ``stream_many``.

        The iterator may be dropped at any time. The same call with ``resume_ids``, the tokens generated so far, goes on
        from there: its chunks continue the text, stop strings across the cut and split characters included.
        ``max_new_tokens`` counts all tokens, those of ``resume_ids`` too. Cut at the end of a round (after a chunk;
        under ``gumbel`` anywhere), the same seed gives the text of the uncut stream.
        """
        # In a list, a message alone would be a chat.
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
        """Generate for several prompts at once, a chunk for each row and round.

        Args:
            prompts: texts, lists of token ids, or chats; or one of these; or what a tokenizer returns, with its mask.
            resume_ids: for each prompt the tokens that were generated before (see ``stream``).
            num_slots: prompts at a time. When a row ends, the next prompt takes its place.
            num_draft_tokens, acceptance: for this call, in place of the decoder's.
            is_repeatable: the text of a row whose seed is given depends on nothing but the call: under "auto" its K is
                constant if the text depends on K, and its rounds wait for their programs. False lifts both (for
                measurements; the law of the output is the same, as long as no seed is used twice with this decoder).
            reports_drafts: chunks tell all that was drafted, rejected or not, with p and q.
            sampling: options of all rows, or a list with one for each row; None for the defaults. One ``seed`` is that
                of the first prompt, and prompt i has seed + i. Without a seed each row draws its own.
            changes: fields of ``Sampling`` in place of those of ``sampling``.

        Raises:
            OptionError, PromptError: at once, not at the first chunk.
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
        """Generate for any number of prompts, in constant memory: prompts are taken as slots become free, and
        completions are given as rows end, not in order.

        Args:
            prompts: each alone, or with options of its own, which override all others.
            sampling, num_slots, num_draft_tokens, acceptance, changes: see ``stream_many``; each option is one value.
                Prompt i has seed + i here, too, unless it has a seed of its own.

        Yields:
            The number of the prompt and its completion; or its error (PromptError, OptionError, NumericsError), and the
            other prompts go on.
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
                    # A longer text than any before: all rows have ended, and a larger cache takes the old one's place.
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
        """An engine for prompts that come at any time (docs/engine.md), made by ``job``.

        Args:
            capacity: most tokens in a row, prompt included.
        """
        return self._engine(*self._k_and_rule(None, None), num_slots, capacity)

    def job(self, prompt: Prompt, options: Mapping[str, Any]) -> RequestState:
        """One prompt, checked and ready for ``engine``.

        Args:
            options: fields of ``Sampling``, a value each.

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
        assert self.experience is not None
        return AdaptiveSchedule(self.experience.under(rule, num_slots, num_tokens))

    def _repeatable(self, job: RequestState, k: NumDraftTokens, rule: Rule) -> RequestState:
        """The output of a row whose seed was given must not depend on what is compiled. If it depends on K, it must not
        depend on the load either, so that under "auto" K is constant; nor on its own end, where K is constant, since a
        seed that was drawn is told and may be given."""
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
            PromptError: it is empty, longer than the context, or has ids beyond the vocabulary or of an image.
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
        """One prompt, checked and ready for the loop.

        Args:
            options: the fields of ``Sampling``, a value each.
        """
        check_names(options)
        ids = self.encode(prompt)
        has_seed = options.get("seed") is not None
        # 53 bits, since readers of JSON in other languages keep no more.
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
                "resume_ids", f"{len(resume_ids)} tokens", "the text has ended: nothing is left to generate"
            )
        if resume_ids and not 0 <= min(resume_ids) <= max(resume_ids) < self.target.vocab_size:
            raise OptionError("resume_ids", list(resume_ids)[:8], f"token ids from 0 to {self.target.vocab_size - 1}")
        for token_id in resume_ids:
            if text.push(token_id) is not None:
                raise OptionError("resume_ids", token_id, "the text has ended with this token")
            if constraint is not None and not constraint.push(token_id):
                raise OptionError("resume_ids", token_id, "the text must not go on with this token")
        text.take()  # given out before the cut
        law = sampling.with_ends(self.eos_ids)
        request = Request([*ids, *resume_ids], law, text, num_resumed=len(resume_ids), constraint=constraint)
        return RequestState(request, text, len(ids), len(resume_ids), has_seed)

    def constraint_of(self, sampling: Sampling) -> Constraint | None:
        """What one text with these options has to match, if anything. Raises OptionError, MissingExtra."""
        if not sampling.is_constrained:
            return None
        return Structure(sampling, self.tokenizer, self.target.vocab_size, self.eos_ids)

    def check_tokens(self, sampling: Sampling) -> None:
        """Whether this target has the tokens that the options name, and one is left to be generated. Raises
        OptionError."""
        vocab_size, bias = self.target.vocab_size, sampling.logit_bias or {}
        for name, ids in (("logit_bias", bias), ("stop_token_ids", sampling.stop_token_ids)):
            if max(ids, default=0) >= vocab_size:
                raise OptionError(name, max(ids), f"token ids are below {vocab_size}")
        forbidden = {token_id for token_id, value in bias.items() if value == -math.inf}
        if len(forbidden) == vocab_size:
            raise OptionError("logit_bias", -math.inf, "it forbids every token")
        if sampling.min_tokens and len(forbidden.union(sampling.stop_token_ids, self.eos_ids)) == vocab_size:
            raise OptionError("min_tokens", sampling.min_tokens, "no token is left that does not end the text")


def _check_acceptance(name: str) -> str:
    if name not in RULES:
        raise OptionError("acceptance", name, f"choose one of {', '.join(RULES)}")
    return name


def _most_k(k: NumDraftTokens) -> int:
    """The most tokens that are drafted in a round for a row of constant K."""
    return DEFAULT_NUM_DRAFT_TOKENS if k == "auto" else k
