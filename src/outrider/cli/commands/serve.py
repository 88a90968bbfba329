"""``outrider serve``: OpenAI-compatible HTTP server."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import GenerationConfigOption, parse_k
from outrider.cli.shared.output import OnStderr
from outrider.cli.shared.pair_options import PairOptions
from outrider.cli.shared.progress import progress
from outrider.errors import MissingExtra, OptionError
from outrider.options import DEFAULT_NUM_SLOTS
from outrider.system.files import read_text, short_name
from outrider.system.ranks import is_one_of_several

if TYPE_CHECKING:
    from outrider.decoder import Decoder
    from outrider.serve.served_model import ServedModel

_LOG = logging.getLogger("outrider.serve")
_option = partial(typer.Option, rich_help_panel="Server")


@flat
def serve(
    pair: PairOptions,
    num_draft_tokens: Annotated[
        str,
        typer.Option(
            "-k",
            "--num-draft-tokens",
            help="Tokens drafted per round, or auto. auto adapts K to the load; requests with a seed use 4.",
            rich_help_panel="Models",
        ),
    ] = "auto",
    slots: Annotated[int, _option(min=1, metavar="N", help="Sequences generated concurrently.")] = DEFAULT_NUM_SLOTS,
    context: Annotated[
        int | None,
        _option(
            min=2,
            metavar="N",
            help="Maximum tokens of a sequence, prompt included. Default: the target's context, at most 8192.",
        ),
    ] = None,
    generation_config: GenerationConfigOption = "auto",
    host: Annotated[str, _option(help="Address to listen on. Any but loopback requires --api-key.")] = "127.0.0.1",
    port: Annotated[int, _option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _option(
            envvar="OUTRIDER_API_KEY",
            metavar="KEY",
            help="API key for clients. Repeatable, one per client. Prefer the environment variable (keys separated by "
            "spaces): other users can see command lines.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            metavar="NAME",
            help="Model name for clients. Repeatable. Default: the target's, as all commands show it.",
        ),
    ] = None,
    max_queue: Annotated[
        int, _option(min=0, metavar="N", help="Maximum sequences waiting for a slot; more get 503.")
    ] = 256,
    max_per_client: Annotated[
        int | None,
        _option(
            min=1,
            metavar="N",
            help="Maximum sequences per client, running or waiting; more get 429. Default: three quarters of --slots "
            "and --max-queue together.",
        ),
    ] = None,
    max_connections: Annotated[
        int, _option(min=2, metavar="N", help="Maximum connections; requests on further ones get 503.")
    ] = 1024,
    priority_across_clients: Annotated[
        bool,
        _option(
            "--priority-across-clients",
            help="Compare request priorities across clients. Default: clients take turns, and priority orders the "
            "requests of one client.",
        ),
    ] = False,
    queue_timeout: Annotated[
        float, _option(min=1e-3, metavar="S", help="Maximum seconds that a request waits for a slot; then it gets 503.")
    ] = 600.0,
    tool_parser: Annotated[
        str,
        _option(
            metavar="NAME",
            help="How the model writes calls of tools: auto (by its chat template), hermes (Qwen too), llama3_json, "
            "mistral, openai (gpt-oss).",
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        _option(
            metavar="NAME",
            help="How the model marks its thoughts, which become reasoning_content: auto, none, think (<think>), "
            "mistral ([THINK]), gemma4, harmony (gpt-oss). Default: by its tokens.",
        ),
    ] = "auto",
    shared_prompt: Annotated[
        list[Path] | None,
        _option(
            metavar="FILE",
            help="System prompt, or beginning of texts, that clients with different keys share. Repeatable.",
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float, _option(min=0, metavar="S", help="Seconds that running requests may continue after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a target and its draft over OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/responses, /v1/completions and others; the page at / shows a race."""
    for name, seconds in (("--queue-timeout", queue_timeout), ("--shutdown-timeout", shutdown_timeout)):
        if not seconds <= 1e6:  # nor infinite
            raise OptionError(name, seconds, "seconds, at most 1e6")
    k = parse_k(num_draft_tokens, "this command takes one number, or auto")[0]
    from outrider.models.sampling_defaults import check_choice

    # A key read from a file may end in a newline.
    keys = tuple(key.strip() for key in api_key or () if key.strip())
    if is_one_of_several():
        raise OptionError("torchrun", "outrider serve", "a server is one process: use --device-map to spread a model")
    names, draft = served_model_name or [short_name(pair.target)], pair.single_draft
    check_choice(generation_config)
    shared = {path: read_text(path).removesuffix("\n") for path in shared_prompt or ()}
    if empty := [path for path, text in shared.items() if not text.strip()]:
        raise OptionError("--shared-prompt", str(empty[0]), "the file is empty: name one with a prompt")
    try:
        with progress("loading libraries"):
            from outrider.serve.about import startup_lines
            from outrider.serve.guards import is_loopback
            from outrider.serve.served_model import ServerOptions
            from outrider.serve.server import Server, listen
            from outrider.text.thinking import thinking_of
            from outrider.text.tool_formats import tool_format_of
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "starlette", "serve", "'outrider serve'") from None
    if not keys and not is_loopback(host):
        raise OptionError("--host", host, "without --api-key only loopback is allowed: use 127.0.0.1")

    def load() -> Decoder:
        _LOG.info("loading %s: %s with draft %s; %s/health is 503 until ready", names[0], pair.target, draft, url)
        decoder = pair.load(generation_config=generation_config)
        tool_format_of(decoder.tokenizer, tool_parser)  # before the server is ready
        thinking_of(decoder.tokenizer, reasoning_parser)
        return replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)

    listener = listen(host, port)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"

    def on_ready(model: ServedModel) -> None:
        gc.freeze()  # full collections stop all threads, for half a second if they go through all modules
        for line in startup_lines(model.decoder, model.schedule, slots, model.capacity):
            _LOG.info("%s", line)
        key = "any API key" if not keys else "with an API key"
        _LOG.info("ready: %s/v1 (model %s, %s)", url, names[0], key)
        _LOG.info("web page with a race of plain and speculative decoding: %s", url)

    options = ServerOptions(
        num_slots=slots,
        context_len=context or 8192,
        max_queue=max_queue,
        queue_timeout_s=queue_timeout,
        max_per_client=max_per_client,
        max_connections=max_connections,
        has_priority_across_clients=priority_across_clients,
        api_keys=keys,
        shutdown_timeout_s=shutdown_timeout,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        shared_prompts=tuple(shared.values()),
    )
    with listener, _log_on_stderr():
        Server(names, load, options, listener, on_ready).run()


@contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Log the server's work on standard error."""
    handler = OnStderr()
    if sys.stderr.isatty():
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    # Not "outrider" as a whole, which tells how models are read (--verbose).
    names = {f"outrider.{name}": logging.INFO for name in ("serve", "decoding", "kernels", "sampling")}
    # uvicorn warns of each malformed request: clients could fill the disk.
    names |= {"uvicorn": logging.ERROR, "asyncio": logging.WARNING}
    for name, level in names.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(logging.NOTSET)
