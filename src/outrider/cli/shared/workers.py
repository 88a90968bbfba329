"""Workers that generate for the prompts of ``generate``.

A worker knows no files: it takes prompts and yields rows, in this process or in others (ray_workers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from outrider.cli.shared.output import options_json, origin_of
from outrider.cli.shared.pair_options import PairOptions
from outrider.cli.shared.template_options import TemplateOptions, hint_at_chat
from outrider.errors import NumericsError, OptionError, OutriderError, PromptError
from outrider.offline.output_rows import row_of, stats_of
from outrider.offline.prompt_row import PromptLine
from outrider.options import NumDraftTokens, Sampling
from outrider.records import Stats
from outrider.text.chat import Chat

if TYPE_CHECKING:
    from outrider.decoder import Decoder

Prompts = Iterable[tuple[int, PromptLine]]
"""Prompts of a file, each with its index there."""


@dataclass(frozen=True)
class Setup:
    """Models and options of a worker.

    Attributes:
        options: fields of ``Sampling``, overridden by a prompt's own.
        num_probs: most probable tokens to keep at each place; None for none.
    """

    pair: PairOptions
    draft: str
    k: NumDraftTokens
    options: dict[str, Any]
    template: TemplateOptions
    num_probs: int | None = None

    def settings(self, line: PromptLine | None = None) -> dict[str, Any]:
        """Everything that determines a prompt's output."""
        options = self.options if line is None else self.options | line.options
        more = self.template.to_json() | ({} if self.num_probs is None else {"probs": self.num_probs})
        return options_json(self.pair, options, draft=self.draft, num_draft_tokens=self.k, **more)

    def max_new_tokens(self, line: PromptLine) -> int:
        number: int = (self.options | line.options)["max_new_tokens"]
        return number

    def seed(self, index: int, line: PromptLine) -> int | None:
        """Seed of a prompt, determined by its place in the file."""
        first = self.options["seed"]
        seed: int | None = line.options.get("seed", None if first is None else first + index)
        return seed

    def load(self) -> Decoder:
        decoder = self.pair.load()
        return replace(decoder, drafter=self.pair.load_draft(decoder, self.draft), num_draft_tokens=self.k)

    def encode(self, decoder: Decoder, prompt: str | Chat) -> list[int]:
        return decoder.encode(self.template.prompt(prompt))


@dataclass(frozen=True, slots=True)
class Length:
    """Maximum tokens of a prompt, output included.

    Attributes:
        is_cut: the limit is the target's context, not the given one.
    """

    num_tokens: int
    is_cut: bool


class Workers(Protocol):
    """One worker, or several."""

    def lengths(self, prompts: Prompts) -> Iterator[tuple[int, Length | OutriderError]]:
        """Yield each prompt's index, and its length or the reason why the target cannot take it."""

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, tuple[dict[str, Any], Stats]]]:
        """Yield each finished prompt's index, row and round counts, in any order."""

    def pair(self) -> str:
        """Description of the models and their use."""

    def origin(self) -> dict[str, Any]:
        """Provenance of the rows."""


class LocalWorker:
    """A worker in this process. Loads the models when first needed.

    Args:
        num_slots: prompts generated concurrently.
    """

    def __init__(self, setup: Setup, num_slots: int) -> None:
        self._setup, self._num_slots = setup, num_slots

    @cached_property
    def decoder(self) -> Decoder:
        return self._setup.load()

    def lengths(self, prompts: Prompts) -> Iterator[tuple[int, Length | OutriderError]]:
        self._check_tokens(self._setup.options)
        has_text = False
        for index, line in prompts:
            if isinstance(line.prompt, str) and not has_text:  # they may be many: the first one tells
                has_text = True
                hint_at_chat(self.decoder, [self._setup.template.prompt(line.prompt)])
            try:
                ids = self._setup.encode(self.decoder, line.prompt)
                if line.options:
                    self._check_tokens(self._setup.options | line.options)
            except (OptionError, PromptError) as error:
                yield index, error
            else:
                most, context_len = len(ids) + self._setup.max_new_tokens(line), self.decoder.target.context_len
                yield index, Length(min(most, context_len), most > context_len)

    def _check_tokens(self, options: dict[str, Any]) -> None:
        from outrider.requests.row_options import check_tokens

        check_tokens(Sampling(**options), self.decoder.target.vocab_size, self.decoder.eos_ids)

    def rows(self, prompts: Prompts) -> Iterator[tuple[int, tuple[dict[str, Any], Stats]]]:
        waiting: dict[int, tuple[int, PromptLine, list[int], int | None]] = {}

        def jobs() -> Iterator[tuple[list[int], Mapping[str, Any]]]:
            for place, (index, line) in enumerate(prompts):
                ids, seed = self._setup.encode(self.decoder, line.prompt), self._setup.seed(index, line)
                waiting[place] = (index, line, ids, seed)
                yield ids, {**line.options, "seed": seed}

        options = {name: value for name, value in self._setup.options.items() if name != "seed"}
        for place, done in self.decoder.complete(jobs(), num_slots=self._num_slots, **options):
            index, line, ids, seed = waiting.pop(place)
            row = row_of(index, line, ids, seed, done)
            if row["token_ids"] and self._setup.num_probs is not None:
                try:
                    row["probs"] = self._probs(line, ids, row["token_ids"], self._setup.num_probs)
                except NumericsError as error:
                    row = row_of(index, line, ids, seed, error)
            ends = sorted(self.decoder.ends_of(ids))
            yield index, (row | {"model": self._model | {"eos_ids": ends}}, stats_of(done))

    @cached_property
    def _model(self) -> dict[str, Any]:
        from outrider.replay.record import model_json

        return model_json(self.decoder)

    def _probs(self, line: PromptLine, ids: list[int], token_ids: list[int], num_probs: int) -> dict[str, Any]:
        """Probabilities of an output's tokens."""
        from outrider.replay.record import top_probs

        options = self._setup.options | line.options | {"seed": None, "logprobs": None}
        sampling = Sampling(**options).with_ends(self.decoder.ends_of(ids))
        (found,) = top_probs(self.decoder.target, [(ids, token_ids)], sampling, num_probs)
        return found.to_json()

    def pair(self) -> str:
        decoder = self.decoder
        target, draft = decoder.target.name, decoder.drafter.name
        if draft == "none":
            return f"{target}, plain"
        return f"{target} with {draft}, K = {decoder.num_draft_tokens}, {decoder.acceptance}"

    def origin(self) -> dict[str, Any]:
        return origin_of(self.decoder)
