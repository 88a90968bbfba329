"""The public door: text in, chunks of text out.

    decoder = load("fable", "fable-draft")
    for chunk in decoder.stream("Once upon a time", seed=1):
        print(chunk.text, end="")

The stream is the primitive; ``generate`` gathers it.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from outrider.decoding.costs import round_costs
from outrider.decoding.engine import decode
from outrider.decoding.schedule import AdaptiveSchedule, Schedule
from outrider.drafters.base import Drafter, NoDrafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.errors import OptionError, PromptError
from outrider.models.loading import Checkpoint, build_lm, load_checkpoint, num_tokens_of
from outrider.models.registry import resolve
from outrider.options import (
    DEFAULT_ACCEPTANCE,
    DEFAULT_NUM_DRAFT_TOKENS,
    MAX_NUM_DRAFT_TOKENS,
    NumDraftTokens,
    Sampling,
)
from outrider.records import Chunk, Completion, Origin, Request, Round, Stats, Timing, TokenLogprob
from outrider.runtime.lm import LM
from outrider.sampling.rules import RULES
from outrider.text.row_text import RowText
from outrider.text.tokenizer import Detokenizer, Prompt, check_same_tokens, encode

_OPTIONS = [field.name for field in fields(Sampling)]


@dataclass(frozen=True, slots=True)
class Decoder:
    """A target, a drafter and how they are used. It holds no state of any generation, so one may serve many.

    Attributes:
        target: the model whose distribution the output follows.
        tokenizer: of Hugging Face; None if prompts are token ids and only ids are wanted.
        eos_ids: tokens that end a text.
        drafter: what proposes.
        acceptance: name of the rule, "rejection", "block" or "gumbel" (see outrider.sampling.rules).
        num_draft_tokens: K, the default; "auto" chooses it each round for the most tokens per second. (Under
            "auto" the same seed need not give the same text, but by "gumbel" or at temperature 0; the law is the same.)
    """

    target: LM
    tokenizer: Any | None
    eos_ids: frozenset[int]
    drafter: Drafter
    acceptance: str = DEFAULT_ACCEPTANCE
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS

    def __post_init__(self) -> None:
        _check_acceptance(self.acceptance)
        _check_num_draft_tokens(self.num_draft_tokens)

    @property
    def context_len(self) -> int:
        """Tokens that both models can take, where the drafter has one."""
        own = self.target.context_len
        return min(own, self.drafter.lm.context_len) if isinstance(self.drafter, ModelDrafter) else own

    def plain(self) -> Decoder:
        """The same target without a draft: the baseline of every comparison."""
        return replace(self, drafter=NoDrafter())

    def compiled(self) -> Decoder:
        """The same models, compiled ahead of time when a shape is first met: half a minute for each, or about a second
        where it is found on disk. On a CUDA device they are captured as graphs instead, which takes a moment and is not
        kept on disk. It pays for long work. Keep the result: what was compiled is lost with it.

        Raises:
            CompileError: from the first generation; a model or this machine does not allow it.
        """
        return replace(self, target=self.target.compiled(), drafter=self.drafter.compiled())

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[Chunk]:
        """Generate for one prompt, a chunk a round. Options: see ``stream_many``.

        The iterator may be dropped at any time. Generation that is resumed with the tokens so far as the prompt,
        ``max_new_tokens`` less by as many and the same seed goes on as if it had not been cut.
        """
        return self.stream_many([prompt], **options)

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        *,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        **options: Any,
    ) -> Iterator[Chunk]:
        """Generate for several prompts at once, a chunk for each unfinished row and round.

        Args:
            prompts: texts, lists of token ids, or chats.
            num_draft_tokens, acceptance: for this call, in place of the decoder's.
            options: the fields of ``Sampling``; each a value for all rows, or a list with one for each row (``stop``: a
                list of lists). Without a seed each row draws its own.

        Raises:
            OptionError, PromptError: at once, not at the first chunk.
            NumericsError: from the iterator.
        """
        requests, texts = self._prepare(prompts, options)
        return _chunks(self._rounds(requests, num_draft_tokens, acceptance), texts)

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        *,
        num_draft_tokens: NumDraftTokens | None = None,
        acceptance: str | None = None,
        **options: Any,
    ) -> list[Completion]:
        """Generate for one text or several prompts, and wait for all. Arguments and errors: see ``stream_many``.

        Returns:
            A completion for each prompt, in order.
        """
        requests, texts = self._prepare([prompts] if isinstance(prompts, str) else prompts, options)
        chunks: list[list[Chunk]] = [[] for _ in requests]
        for chunk in _chunks(self._rounds(requests, num_draft_tokens, acceptance), texts):
            chunks[chunk.row].append(chunk)
        return [_completion(*pair) for pair in zip(requests, chunks, strict=True)]

    def _rounds(
        self, requests: Sequence[Request], num_draft_tokens: NumDraftTokens | None, acceptance: str | None
    ) -> Iterator[Round]:
        k = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        _check_num_draft_tokens(k)
        rule = RULES[_check_acceptance(self.acceptance if acceptance is None else acceptance)]
        if not requests:
            return iter(())
        schedule: int | Schedule
        if isinstance(self.drafter, NoDrafter):
            schedule = 0
        elif isinstance(k, int):
            schedule = k
        elif rule.name != "gumbel" and len({request.sampling.seed for request in requests}) < len(requests):
            # Rows of one seed meet the same noise at the same position. What it did to the row that was there first
            # would choose K for the other, which must not depend on its own noise to come.
            schedule = DEFAULT_NUM_DRAFT_TOKENS
        else:
            num_rows = self.target.execution.round_rows(len(requests))
            lengths = [len(request.prompt_ids) + request.sampling.max_new_tokens for request in requests]
            num_tokens = min(max(lengths), self.target.context_len)
            schedule = AdaptiveSchedule(round_costs(self.target, self.drafter, rule, num_rows, num_tokens))
        return decode(self.target, self.drafter, requests, rule, num_draft_tokens=schedule)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt.

        Raises:
            PromptError: it is empty, longer than the context, or has ids beyond the vocabulary.
        """
        ids = encode(self.tokenizer, prompt)
        if len(ids) >= self.target.context_len:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but {self.target.name} can take {self.target.context_len} in all, "
                "prompt and output together: shorten it"
            )
        if max(ids) >= self.target.vocab_size or min(ids) < 0:
            raise PromptError(f"the prompt has a token id outside 0..{self.target.vocab_size - 1}")
        return ids

    def _prepare(self, prompts: Sequence[Prompt], options: dict[str, Any]) -> tuple[list[Request], list[RowText]]:
        requests, texts = [], []
        for index, prompt in enumerate(prompts):
            try:
                ids = self.encode(prompt)
            except PromptError as error:
                raise PromptError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None
            sampling = _row_sampling(options, index, len(prompts))
            self.check_bias(sampling.logit_bias or {})
            if sampling.stop and self.tokenizer is None:
                raise OptionError("stop", sampling.stop, "stop strings need a tokenizer")
            detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, ids)
            text = RowText(detokenizer, () if sampling.ignore_eos else self.eos_ids, sampling.stop)
            requests.append(Request(ids, sampling, text))
            texts.append(text)
        return requests, texts

    def check_bias(self, bias: Mapping[int, float]) -> None:
        """Whether this target can be biased so. Raises OptionError."""
        vocab_size = self.target.vocab_size
        if max(bias, default=0) >= vocab_size:
            raise OptionError("logit_bias", max(bias), f"token ids are below {vocab_size}")
        if sum(value == -math.inf for value in bias.values()) == vocab_size:
            raise OptionError("logit_bias", -math.inf, "it forbids every token")


def _check_acceptance(name: str) -> str:
    if name not in RULES:
        raise OptionError("acceptance", name, f"choose one of {', '.join(RULES)}")
    return name


def _check_num_draft_tokens(k: NumDraftTokens) -> None:
    is_number = isinstance(k, int) and not isinstance(k, bool) and 1 <= k <= MAX_NUM_DRAFT_TOKENS
    if not is_number and k != "auto":
        remedy = (
            f"a whole number from 1 to {MAX_NUM_DRAFT_TOKENS}, or 'auto' (for plain decoding choose the draft 'none')"
        )
        raise OptionError("num_draft_tokens", k, remedy)


def _row_sampling(options: dict[str, Any], index: int, num_rows: int) -> Sampling:
    """The options of one row."""
    row: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _OPTIONS:
            nearest = difflib.get_close_matches(name, _OPTIONS, n=1)
            raise OptionError(name, value, f"did you mean {nearest[0]}?" if nearest else "there is no such option")
        is_per_row = isinstance(value, (list, tuple))
        if name == "stop" and is_per_row:
            is_per_row = any(not isinstance(item, str) for item in value)
        if is_per_row and len(value) != num_rows:
            raise OptionError(name, value, f"a list needs one value for each of the {num_rows} prompts")
        row[name] = value[index] if is_per_row else value
    if row.get("stop", ()) is None:
        row["stop"] = ()
    if row.get("seed") is None:
        row["seed"] = secrets.randbits(63)
    return Sampling(**row)


def _chunks(rounds: Iterator[Round], texts: Sequence[RowText]) -> Iterator[Chunk]:
    origins: list[list[Origin]] = [[] for _ in texts]
    for round_ in rounds:
        # The first chunk of a round carries its timing, so that the timings of all chunks add up.
        timing = round_.timing
        for row in round_.rows:
            origins[row.row].extend(row.origins)
            text = texts[row.row]
            if row.finish_reason is not None:
                text.finish()
            yield Chunk(
                row=row.row,
                pieces=_pieces(text.take(), origins[row.row]),
                token_ids=row.token_ids,
                origins=row.origins,
                logprobs=row.logprobs,
                finish_reason=row.finish_reason,
                stats=Stats.of(row),
                timing=timing,
                rejected_ratio=row.rejected_ratio,
            )
            timing = Timing()


def _pieces(text: Sequence[tuple[int, str]], origins: Sequence[Origin]) -> tuple[tuple[str, Origin], ...]:
    """Text by token to text by origin; neighbours of the same origin are joined."""
    groups = groupby(text, key=lambda item: origins[item[0]])
    return tuple(("".join(piece for _, piece in group), origin) for origin, group in groups)


def _completion(request: Request, chunks: Sequence[Chunk]) -> Completion:
    reason, seed = chunks[-1].finish_reason, request.sampling.seed
    assert reason is not None and seed is not None
    logprobs: tuple[TokenLogprob, ...] | None = None
    if chunks[0].logprobs is not None:
        logprobs = tuple(item for chunk in chunks for item in chunk.logprobs or ())
    return Completion(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(i for chunk in chunks for i in chunk.token_ids),
        origins=tuple(origin for chunk in chunks for origin in chunk.origins),
        logprobs=logprobs,
        finish_reason=reason,
        stats=sum((chunk.stats for chunk in chunks), Stats()),
        num_prompt_tokens=len(request.prompt_ids),
        seed=seed,
    )


def load(
    target: str | Path | Any,
    draft: str | Path | Any | None = None,
    *,
    tokenizer: Any | None = None,
    draft_tokenizer: Any | None = None,
    device: str = "auto",
    dtype: str = "auto",
    acceptance: str = DEFAULT_ACCEPTANCE,
    num_draft_tokens: NumDraftTokens = DEFAULT_NUM_DRAFT_TOKENS,
    compile: bool = False,
    models_file: Path | None = None,
) -> Decoder:
    """A decoder for a target and a draft.

    Args:
        target: a known name, a folder, a hub id, or a Hugging Face causal language model in memory (it is put into
            evaluation mode).
        draft: the same; or "ngram"; or "none" or None for plain decoding.
        tokenizer: for a target in memory; without one, prompts are token ids and chunks have no text.
        draft_tokenizer: for a draft in memory, to be compared with the target's; without one they are taken to agree.
        device: "auto", "cpu", "cuda", "cuda:1", "mps"; models in memory stay where they are.
        dtype: "auto" (float32 on the CPU, else the checkpoint's own), or "float64", "float32", "bfloat16", "float16".
        acceptance: "rejection", "block" or "gumbel".
        num_draft_tokens: K; "auto" chooses it each round for the most tokens per second, by costs that are measured on
            first use (under a second for small models) and kept.
        compile: see ``Decoder.compiled``.
        models_file: a TOML file with names of models, beside the user's own.

    Raises:
        ModelError: a model cannot be had, read, or rolled back.
        TokenizerMismatch: target and draft have different tokens.
        DeviceError, OptionError: an option is not possible here.
    """
    checkpoint = _checkpoint(target, tokenizer, device, dtype, models_file)
    plain = Decoder(
        target=build_lm(checkpoint, num_tokens_of(checkpoint)),
        tokenizer=checkpoint.tokenizer,
        eos_ids=checkpoint.eos_ids,
        drafter=NoDrafter(),
        acceptance=acceptance,
        num_draft_tokens=num_draft_tokens,
    )
    drafter = load_drafter(plain, draft, tokenizer=draft_tokenizer, device=device, dtype=dtype, models_file=models_file)
    decoder = replace(plain, drafter=drafter)
    return decoder.compiled() if compile else decoder


def load_drafter(
    decoder: Decoder,
    draft: str | Path | Any | None,
    *,
    tokenizer: Any | None = None,
    device: str = "auto",
    dtype: str = "auto",
    models_file: Path | None = None,
) -> Drafter:
    """A drafter that fits the decoder's target. Arguments and errors: see ``load``."""
    if draft is None or draft == "none":
        return NoDrafter()
    if draft == "ngram":
        return NgramDrafter()
    checkpoint = _checkpoint(draft, tokenizer, device, dtype, models_file)
    if decoder.tokenizer is not None and checkpoint.tokenizer is not None:
        check_same_tokens(decoder.tokenizer, checkpoint.tokenizer, decoder.target.name, checkpoint.name)
    return ModelDrafter(build_lm(checkpoint, decoder.target.vocab_size))


def _checkpoint(
    model: str | Path | Any, tokenizer: Any | None, device: str, dtype: str, models_file: Path | None
) -> Checkpoint:
    if isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise OptionError("tokenizer", type(tokenizer).__name__, f"the model {str(model)!r} brings its own")
        return load_checkpoint(resolve(str(model), models_file), device=device, dtype=dtype)
    config = getattr(model, "config", None)
    if config is None or not isinstance(model, torch.nn.Module):
        raise OptionError(
            "model", type(model).__name__, "a name, a folder, a hub id, or a Hugging Face model in memory"
        )
    name = config.name_or_path or type(model).__name__
    return Checkpoint(name, model, tokenizer)
