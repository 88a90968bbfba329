"""``outrider certify-samples``: tests whether samples of another system follow the target's distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.findings import FindingsOptions
from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import PromptsOption, SamplingOptions, check_alone, field_of
from outrider.cli.shared.output import as_read, json_text, make_document
from outrider.cli.shared.pair_options import MachineOptions, options_json
from outrider.cli.shared.progress import progress
from outrider.cli.shared.template_options import TemplateOptions, encode_lines
from outrider.errors import FileError, OptionError, PromptError, WorkerError
from outrider.options import Sampling
from outrider.system.files import short_name

if TYPE_CHECKING:
    from outrider.certify.certificate import Certificate, ControlReport
    from outrider.certify.samples import SampledText
    from outrider.decoder import Decoder
    from outrider.offline.endpoints import Endpoint
    from outrider.offline.jsonl import SampleLine

_NAMES = tuple(field.name for field in fields(SamplingOptions))
_COMPARED = {  # verdict on the plain server's texts, where those of the server fail
    "passed": "The plain server's texts are consistent: the reason is its speculation.",
    "failed": "The plain server's texts are not consistent either: numerics, quantization or the meaning of an option "
    "is a reason, whatever speculation adds.",
    "inconclusive": "There are too few texts of the plain server to tell whether the reason is speculation.",
}


_server = partial(field_of, "Server")


@dataclass(frozen=True)
class ServerSamples:
    """Sampling from servers: one JSON line for each text. An interrupted run resumes."""

    server: str | None = _server(
        None,
        "Sample from this OpenAI-compatible server into FILE first. An interrupted run resumes. The key is in "
        "OPENAI_API_KEY.",
        metavar="URL",
    )
    plain_server: str | None = _server(
        None, "The same without speculation, for comparison: into FILE with '-plain' in its name.", metavar="URL"
    )
    model: str | None = _server(None, "The server's name of the model. Default: its one.", metavar="NAME")
    engine: str = _server(
        "auto", "The server's API: outrider, vllm, llama.cpp, llama-cpp-python, transformers, openai. auto asks it."
    )
    prompts: PromptsOption = None
    num_texts: int = _server(100, "Texts to sample, over all prompts in turn.", min=2)
    max_new_tokens: int = _server(64, "Maximum tokens per text.", "-n", "--max-new-tokens", min=1)
    concurrency: int = _server(1, "Requests at a time.", min=1)
    rate: float | None = _server(None, "Maximum requests per second.", min=1e-6)
    same_bytes: bool = _server(
        False,
        "Require greedy texts equal to those of the plain server, or of TARGET. The first difference of each is "
        "explained.",
        "--same-bytes",
    )

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
        """Sample from each server what its file lacks. Raises FileError, OptionError, PromptError, WorkerError.

        Args:
            decoder: the target's, whose tokenizer counts the prompts' tokens.
            seed: of the first request.
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
                jobs = [(index, lines[index].prompt, seed + index) for index, done in enumerate(is_done) if not done]
                with progress("texts", len(lines), len(lines) - len(jobs)) as advance:
                    for index, found in samples(endpoint, jobs, self.concurrency, self.rate):
                        line, ids, num_read = lines[index], prompts[index], found["num_prompt_tokens"]
                        if num_read not in (None, len(ids)):
                            raise WorkerError(
                                f"{endpoint.url} reads {line.place} as {num_read} tokens, the target as {len(ids)}: "
                                "its tokenizer, beginning token or chat template is another one"
                            )
                        row = {"index": index, **line.source, **line.labels, "prompt_ids": ids, **found}
                        output.write(json_text(row | {"settings": settings}))
                        advance(1)

        for url, model, path in self.files(file):
            first, own = given[0].prompt, Sampling(**options)
            write(Endpoint.open(url, model, self.engine, first, own, tokenizer=decoder.tokenizer), path)


@flat
def certify_samples(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="Model that generated the samples. Known name, folder or hub id.")],
    file: Annotated[
        Path, typer.Argument(help="JSON lines with prompt_ids or prompt, token_ids or text, and optionally options.")
    ],
    machine: MachineOptions,
    sampling: SamplingOptions,
    servers: ServerSamples,
    template: TemplateOptions,
    draft: Annotated[
        str, typer.Option(help="Draft that the system used; deviations are tested towards it first.")
    ] = "none",
    detect_tv: Annotated[
        float | None, typer.Option(min=1e-9, max=1, help="Total variation to detect with 99% probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the tests, and of a server's first text.")] = 0,
    *,
    findings: FindingsOptions,
) -> None:
    """Test whether samples follow their model's distribution. They may come from any system.

    With --server: samples from it first. Exit code 0: consistent; 1: not consistent; 3: inconclusive (too little data).

    Sampling options are those of the samples, for lines without options of their own. Each sample must have its own
    seed."""
    from outrider.offline.jsonl import read_samples

    if seed < 0:
        raise OptionError("--seed", seed, "a whole number >= 0")
    if servers.server is None:
        of_servers = {field.name for group in (ServerSamples, TemplateOptions) for field in fields(group)}
        check_alone(context, context.params.keys() - of_servers, "give it with --server, whose texts it concerns")
    elif servers.same_bytes:
        sampling = replace(sampling, temperature=0.0)
    options = sampling.to_options(seed=None, num_seeds=1)
    files = [path for _, _, path in servers.files(file)] or [file]
    lines = [read_samples(path, _NAMES) for path in files] if servers.server is None else []

    pair = replace(machine, target=target, draft=[draft])
    plain = pair.load()
    decoder = replace(plain, drafter=pair.load_draft(plain, draft))
    if not lines:
        servers.collect(file, decoder, sampling, template, seed)
        lines = [read_samples(path, _NAMES) for path in files]
    read = [_read(decoder, *one, sampling, seed) for one in zip(files, lines, strict=True)]
    if servers.same_bytes:
        tested = [_compare(decoder, file, read, findings.batch_size)]
    else:
        how: dict[str, Any] = {"wanted": detect_tv, "seed": seed, "batch_size": findings.batch_size}
        both = zip(files, read, strict=True)
        tested = [_test(decoder, *one, findings.significance, **how) for one in both]
    (certificate, remarks), *others = tested
    options_of = [asdict(replace(sampling, **line.options)) for line in lines[0]]
    shared = {name: value for name, value in options_of[0].items() if all(one[name] == value for one in options_of)}
    body = certificate.to_json() | {"is_text": read[0][1] > 0, "num_left_out": read[0][2]}
    body |= {"shared_options": shared, "plain": None}
    for other, _ in others:
        body["plain"] = other.to_json()
        if certificate.verdict == "failed":
            remarks.append(_COMPARED[other.verdict])
    more: dict[str, Any] = {"file": file, "significance": findings.significance, "detect_tv": detect_tv}
    settings = options_json(pair, options, **more, batch_size=findings.batch_size, seed=seed)
    settings |= as_read(asdict(servers) | template.to_json())
    document = make_document("certify-samples", settings, body, decoder)

    against = files[-1].name if servers.same_bytes and len(files) > 1 else short_name(decoder.target.name)
    shown = [(f"{path.name} against {against}", *one) for path, one in zip(files, tested, strict=False)]
    about = {"word": "THE SAME BYTES" if servers.same_bytes else "CONSISTENT", "unit": "line"}
    about["towards"] = "a sharper distribution" if decoder.drafter.most_drafted == 0 else "the draft"
    findings.report(shown[::-1], document, tokenizer=decoder.tokenizer, **about)


_Samples = tuple[list["SampledText"], int, int]
"""Samples of a file; how many of them have the tokens of their text; and of how many texts, which were left out, the
tokens are not certain."""


def _read(decoder: Decoder, file: Path, lines: Sequence[SampleLine], sampling: SamplingOptions, seed: int) -> _Samples:
    """Token ids and options (``sampling``, without its own) of each line. A text is left out unless its tokens, by the
    tokenizer, come after the prompt's own, and are as many as the system counted: then other tokens were sampled.
    Raises FileError: an option or a prompt is invalid."""
    from outrider.certify.samples import SampledText, check_samples, end_token
    from outrider.requests.row_options import check_tokens

    limits = decoder.target.vocab_size, decoder.target.context_len
    found, num_as_text, num_left_out = [], 0, 0
    for line in lines:
        given = replace(sampling, **line.options)
        try:
            own = Sampling(**given.to_options(seed=None, num_seeds=1))
            prompt_ids = line.prompt if isinstance(line.prompt, tuple) else tuple(decoder.encode(line.prompt))
            ends = decoder.ends_of(prompt_ids)
            check_tokens(own, decoder.target.vocab_size, ends)
            if isinstance(line.output, tuple):
                ids = line.output
            else:
                assert isinstance(line.prompt, str)
                whole = tuple(decoder.encode(line.prompt + line.output))
                ids = whole[len(prompt_ids) :]
                is_certain = whole[: len(prompt_ids)] == prompt_ids and line.num_tokens in (None, len(ids))
                num_as_text, num_left_out = num_as_text + is_certain, num_left_out + (not is_certain)
                if not is_certain:
                    continue
            one = SampledText(line.number, prompt_ids, ids, own.with_ends(ends))
            if line.has_ended and not ends.intersection(ids[-1:]):
                check_samples([replace(one, token_ids=(*ids, min(ends, default=-1)))], *limits)
                one = replace(one, token_ids=(*ids, end_token(decoder.target, one, ends, seed)))
            check_samples([one], *limits)
        except (OptionError, PromptError) as error:
            raise FileError(f"{file}, line {line.number}: {error}") from None
        found.append(one)
    return found, num_as_text, num_left_out


def _compare(decoder: Decoder, file: Path, read: Sequence[_Samples], batch_size: int) -> tuple[Certificate, list[str]]:
    """Compare greedy texts with those of the plain server, or of the target; they must be equal. Raises FileError."""
    from outrider.certify.certificate import Certificate
    from outrider.certify.divergence import REQUIRED
    from outrider.certify.samples import judge_greedily

    (first, *_), *others = read
    plain = {one.prompt_ids: one.token_ids for other, *_ in others for one in other}
    missing = [one.line for one in first if others and one.prompt_ids not in plain]
    if missing or not first:
        raise FileError(f"{file}: texts without certain tokens were left out: the servers must return token ids")
    right = [plain[one.prompt_ids] for one in first] if others else None
    with progress("texts", len(first)) as advance:
        report = judge_greedily(decoder.target, first, batch_size, right)
        advance(len(first))
    return Certificate(None, None, (), [replace(report, promise=REQUIRED)]), []


def _test(decoder: Decoder, file: Path, read: _Samples, level: float, **how: Any) -> tuple[Certificate, list[str]]:
    """Test the samples. Returns the findings, and remarks. Raises FileError if there are too few."""
    from outrider.certify.certificate import Certificate
    from outrider.certify.samples import judge, judge_greedily, level_of_kept, num_repeats

    target, remarks, (samples, num_as_text, num_left_out) = decoder.target, [], read
    greedy = [one for one in samples if one.sampling.temperature == 0]
    sampled = [one for one in samples if one.sampling.temperature > 0]
    if len(sampled) == 1 or not samples:
        left_out = f" ({num_left_out} texts have no certain tokens: give token ids)" if num_left_out else ""
        few = "the tests need at least two samples, since some determine how others are tested"
        raise FileError(f"{file}: {few}{left_out}")
    statistical, reports = None, []
    controls: list[ControlReport] = []
    if num_as_text:
        remarks.append(
            f"Tokens are those of the text for {num_as_text} samples. If others were sampled, as many, a correct "
            "system can fail: token ids are better."
        )
    if sampled and (num_as_text or num_left_out):
        whole, level = level, level_of_kept(level, len(sampled), num_left_out)
        if level == 0:
            raise FileError(f"{file}: {num_left_out} texts have no certain tokens, too many: give token ids")
        remarks.append(
            f"{num_left_out} texts without certain tokens were left out. The tests run at a level of {level:.1e}, "
            f"so that a correct system fails with a probability of {whole:g} all the same."
        )
    with progress("texts", len(samples)) as advance:
        if greedy:
            reports.append(judge_greedily(target, greedy, how["batch_size"]))
            advance(len(greedy))
        if sampled:
            statistical, controls = judge(target, decoder.drafter, sampled, level=level, on_texts=advance, **how)
    if repeats := num_repeats(sampled):
        remarks.append(
            f"Repeated samples: {repeats}. If they share a seed or come from a cache, rather than being sampled again, "
            "the tests are invalid: leave them out."
        )
    return Certificate(None, statistical, controls, reports, repeats), remarks
