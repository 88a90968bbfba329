"""Options for sampling from a server, and the job that does: one JSON line each. It can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import PromptsOption, SamplingOptions
from outrider.cli.shared.output import as_read, json_text
from outrider.cli.shared.progress import progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import OptionError, WorkerError
from outrider.options import Sampling

if TYPE_CHECKING:
    from outrider.decoder import Decoder

_option = partial(typer.Option, rich_help_panel="Server")
_URL = partial(_option, metavar="URL")


@dataclass(frozen=True)
class ServerSamples:
    """Sampling from servers."""

    server: Annotated[
        str | None,
        _URL(
            help="Sample from this OpenAI-compatible server into FILE first. An interrupted run resumes. The key is in "
            "OPENAI_API_KEY."
        ),
    ] = None
    plain_server: Annotated[
        str | None, _URL(help="The same without speculation, for comparison: into FILE with '-plain' in its name.")
    ] = None
    model: Annotated[str | None, _option(metavar="NAME", help="The server's name of the model. Default: its one.")] = (
        None
    )
    engine: Annotated[
        str,
        _option(
            help="The server's API: outrider, vllm, llama.cpp, llama-cpp-python, transformers, openai. auto asks it."
        ),
    ] = "auto"
    prompts: PromptsOption = None
    num_texts: Annotated[int, _option(min=2, help="Texts to sample, over all prompts in turn.")] = 100
    max_new_tokens: Annotated[int, _option("-n", "--max-new-tokens", min=1, help="Maximum tokens per text.")] = 64
    concurrency: Annotated[int, _option(min=1, help="Requests at a time.")] = 1
    rate: Annotated[float | None, _option(min=1e-6, help="Maximum requests per second.")] = None
    same_bytes: Annotated[
        bool,
        _option(
            "--same-bytes",
            help="Require greedy texts equal to those of the plain server, or of TARGET. The first difference of each "
            "is explained.",
        ),
    ] = False

    def files(self, file: Path) -> Iterator[tuple[str, str | None, Path]]:
        """Yield address, model and file of each server; none without one. Raises OptionError."""
        if self.server is None:
            return
        from outrider.offline.endpoints import ENGINES

        if self.engine not in ("auto", *ENGINES):
            raise OptionError("--engine", self.engine, f"choose one of auto, {', '.join(ENGINES)}")
        yield self.server, self.model, file
        if self.plain_server is not None:
            yield self.plain_server, None, file.with_stem(f"{file.stem}-plain")

    def collect(
        self, file: Path, decoder: Decoder, sampling: SamplingOptions, template: TemplateOptions, seed: int
    ) -> None:
        """Sample from each server what its file lacks.

        Args:
            decoder: the target's, whose tokenizer counts the prompts' tokens.
            seed: of the first request.

        Raises:
            FileError, OptionError, PromptError, WorkerError
        """
        from outrider.offline.endpoints import Endpoint, samples
        from outrider.offline.output_file import open_output

        options = sampling.to_options(seed=seed, num_seeds=self.num_texts, max_new_tokens=self.max_new_tokens)
        given = template.read_lines(self.prompts)
        encoded = encode_lines(decoder, given, self.prompts)
        num_texts = self.num_texts if sampling.temperature > 0 else len(given)  # a greedy text is the same again
        lines, prompts = [*islice(cycle(given), num_texts)], [*islice(cycle(encoded), num_texts)]

        def write(endpoint: Endpoint, path: Path) -> None:
            about: dict[str, Any] = {"server": endpoint.url, "model": endpoint.model, "engine": endpoint.engine}
            about |= {"chat": template.is_chat, **asdict(sampling), "max_new_tokens": self.max_new_tokens}
            settings = as_read(about)
            with closing(endpoint.client), open_output(path) as output:
                is_done, _ = output.read_finished(lines, range(len(lines)), lambda line: settings)
                missing = [index for index, done in enumerate(is_done) if not done]
                jobs = ((index, lines[index].prompt, seed + index) for index in missing)
                with progress("texts", len(lines), len(lines) - len(missing)) as advance:
                    for index, fields in samples(endpoint, jobs, self.concurrency, self.rate):
                        line, ids, num_read = lines[index], prompts[index], fields["num_prompt_tokens"]
                        if num_read not in (None, len(ids)):
                            raise WorkerError(
                                f"{endpoint.url} reads {line.place} as {num_read} tokens, the target as {len(ids)}: "
                                "its tokenizer, beginning token or chat template is another one"
                            )
                        row = {"index": index, **line.source, **line.labels, "prompt_ids": ids, **fields}
                        output.write(json_text(row | {"settings": settings}))
                        advance(1)

        for url, model, path in self.files(file):
            first, own = given[0].prompt, Sampling(**options)
            write(Endpoint.open(url, model, self.engine, first, own, tokenizer=decoder.tokenizer), path)
