"""Task of a certificate: what to certify, and generation by the real loop, with mistakes or without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.certify.controls import Control
from outrider.certify.observed import GeneratedText, UnenforcedConstraint
from outrider.decoder import Decoder
from outrider.decoding.engine import decode
from outrider.errors import OptionError, PromptError
from outrider.options import DEFAULT_NUM_DRAFT_TOKENS, Sampling
from outrider.records import Constraint, Request
from outrider.requests.hooks import constraint_of
from outrider.runtime.lm import LM
from outrider.text.row_text import RowText


@dataclass(frozen=True, slots=True)
class CertifyTask:
    """Pair, options and prompts to certify.

    Attributes:
        decoder: with its draft, rule and K.
        sampling: without a seed.
        prompts: token ids of each.
        level: probability of a false alarm of the statistical layer.
        seed: base seed; sequence i gets seed + i.
    """

    decoder: Decoder
    sampling: Sampling
    prompts: Sequence[Sequence[int]]
    level: float
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        assert self.prompts and self.batch_size >= 1
        if self.sampling.processor is not None:
            raise OptionError("processor", self.sampling.processor, "certificates know no functions: leave it out")
        if not 0 < self.level < 1:
            raise OptionError("--significance", self.level, "a number between 0 and 1")
        most = self.decoder.target.context_len - 3  # the exact layer looks two tokens ahead
        for index, ids in enumerate(self.prompts):
            if len(ids) >= most:
                raise PromptError(
                    f"prompt {index} has {len(ids)} tokens, but a prompt must have fewer than {most} here"
                )

    @property
    def num_draft_tokens(self) -> int:
        """Constant K for the controls."""
        k = self.decoder.num_draft_tokens
        return k if isinstance(k, int) else DEFAULT_NUM_DRAFT_TOKENS

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0

    @property
    def effective_sampling(self) -> Sampling:
        """Sampling options with the decoder's end tokens: all that p depends on, except the constraint."""
        return self.sampling.without_masks().with_ends(self.decoder.eos_ids)

    def new_constraint(self, prompt_ids: Sequence[int]) -> Constraint | None:
        """Constraint of a new sequence."""
        decoder, vocab_size = self.decoder, self.decoder.target.vocab_size
        return constraint_of(self.sampling, decoder.tokenizer, vocab_size, decoder.eos_ids, prompt_ids)

    def prompt_of(self, text: int) -> int:
        return text % len(self.prompts)

    def request(self, text: int) -> Request:
        """Request of a sequence by index, with the decoder's end tokens."""
        ids = self.prompts[self.prompt_of(text)]
        most = min(self.sampling.max_new_tokens, self.decoder.target.context_len - len(ids))
        sampling = replace(self.effective_sampling, seed=self.seed + text, max_new_tokens=most)
        stop = RowText(None, () if sampling.ignore_eos else self.decoder.eos_ids, (), self.sampling.stop_token_ids)
        # As the decoder's own requests do, or mistakes would differ from it in their last rounds.
        beyond = not self.is_greedy
        return Request(ids, sampling, stop, drafts_beyond_end=beyond, constraint=self.new_constraint(ids))


def generate_texts(job: CertifyTask, texts: Sequence[int], control: Control | None = None) -> list[GeneratedText]:
    """Generate sequences with the real loop, ``job.batch_size`` concurrently; when one ends, the next takes its slot.
    Steps of the loop are counted from 0.

    Args:
        texts: indices of the sequences.
        control: a mistake to inject.
    """
    decoder = job.decoder
    requests = [job.request(text) for text in texts]
    rounds: list[list[tuple[int, ...]]] = [[] for _ in texts]
    begins: list[tuple[int, int]] = [(0, 0)] * len(texts)  # slot and step
    step = 0
    if control is None:
        prompts = [list(request.prompt_ids) for request in requests]
        own = [replace(job.sampling, seed=one.sampling.seed) for one in requests]
        last_slot = -1
        for chunk in decoder.stream_many(prompts, own, num_slots=job.batch_size, is_repeatable=False):
            step += chunk.slot <= last_slot  # the chunks of a step are in the order of their slots
            last_slot = chunk.slot
            if not rounds[chunk.row]:
                begins[chunk.row] = chunk.slot, step
            rounds[chunk.row].append(chunk.token_ids)
    else:
        decoder = eager(decoder)
        target, drafter = control.wrap_target(decoder.target), control.wrap_drafter(decoder.drafter)
        # In batches: a faulty cache must be wrong about its own sequence, not about an earlier one in its slot.
        num_rows = min(job.batch_size, control.most_rows or job.batch_size)
        for begin in range(0, len(requests), num_rows):
            batch = [_unenforced(request) for request in requests[begin : begin + num_rows]]
            if control.keeps_seeds:
                seeded = [replace(one.sampling, seed=job.seed + slot) for slot, one in enumerate(batch)]
                batch = [replace(one, sampling=sampling) for one, sampling in zip(batch, seeded, strict=True)]
            begins[begin : begin + num_rows] = [(slot, step) for slot in range(len(batch))]
            for round_ in decode(target, drafter, batch, control.rule, num_draft_tokens=job.num_draft_tokens):
                step += 1
                for row in round_.rows:
                    rounds[begin + row.row].append(row.token_ids)
    return [
        GeneratedText(
            index=text,
            prompt=job.prompt_of(text),
            prompt_ids=tuple(request.prompt_ids),
            token_ids=tuple(token for ids in row for token in ids),
            places=tuple(place for ids in row for place in range(len(ids))),
            slot=slot,
            first_step=first_step,
        )
        for text, request, row, (slot, first_step) in zip(texts, requests, rounds, begins, strict=True)
    ]


def _unenforced(request: Request) -> Request:
    """Let a faulty loop commit tokens that the constraint forbids."""
    constraint = request.constraint
    return request if constraint is None else replace(request, constraint=UnenforcedConstraint(constraint))


def eager(decoder: Decoder) -> Decoder:
    """Decoder with eager execution, for controls and their reference: capturing steps for each would dominate."""
    return replace(decoder, target=decoder.target.uncaptured(), drafter=decoder.drafter.with_models(LM.uncaptured))
