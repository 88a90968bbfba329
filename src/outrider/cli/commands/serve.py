"""``outrider serve``: OpenAI-compatible HTTP server."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Option

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import GenerationConfigOption, field_of, parse_k
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
_server = partial(field_of, "Server")


@dataclass(frozen=True)
class ServeOptions:
    """Options of the server."""

    num_slots: int = _server(DEFAULT_NUM_SLOTS, "Sequences generated concurrently.", "--slots", min=1, metavar="N")
    context_len: int | None = _server(
        None,
        "Maximum tokens of a sequence, prompt included. Default: the target's context, at most 8192.",
        "--context",
        min=2,
        metavar="N",
    )
    host: str = _server("127.0.0.1", "Address to listen on. Any but loopback requires --api-key.")
    port: int = _server(8000, "Port to listen on; 0 takes a free one.")
    api_key: list[str] | None = _server(
        None,
        "API key for clients. Repeatable, one per client. Prefer the environment variable (keys separated by spaces): "
        "other users can see command lines.",
        envvar="OUTRIDER_API_KEY",
        metavar="KEY",
    )
    served_model_name: list[str] | None = _server(
        None, "Model name for clients. Repeatable. Default: the target's, as all commands show it.", metavar="NAME"
    )
    max_queue: int = _server(256, "Maximum sequences waiting for a slot; more get 503.", min=0, metavar="N")
    max_per_client: int | None = _server(
        None,
        "Maximum sequences per client, running or waiting; more get 429. Default: three quarters of --slots and "
        "--max-queue together.",
        min=1,
        metavar="N",
    )
    max_connections: int = _server(1024, "Maximum connections; requests on further ones get 503.", min=2, metavar="N")
    has_priority_across_clients: bool = _server(
        False,
        "Compare request priorities across clients. Default: clients take turns, and priority orders the requests of "
        "one client.",
        "--priority-across-clients",
    )
    queue_timeout_s: float = _server(
        600.0,
        "Maximum seconds that a request waits for a slot; then it gets 503.",
        "--queue-timeout",
        min=1e-3,
        metavar="S",
    )
    tool_parser: str = _server(
        "auto",
        "How the model writes calls of tools: auto (by its chat template), hermes (Qwen too), llama3_json, mistral, "
        "openai (gpt-oss).",
        metavar="NAME",
    )
    reasoning_parser: str = _server(
        "auto",
        "How the model marks its thoughts, which become reasoning_content: auto, none, think (<think>), mistral "
        "([THINK]), gemma4, harmony (gpt-oss). Default: by its tokens.",
        metavar="NAME",
    )
    shared_prompt: list[Path] | None = _server(
        None,
        "System prompt, or beginning of texts, that clients with different keys share. Repeatable.",
        metavar="FILE",
    )
    shutdown_timeout_s: float = _server(
        30.0, "Seconds that running requests may continue after SIGTERM.", "--shutdown-timeout", min=0, metavar="S"
    )


@flat
def serve(
    pair: PairOptions,
    given: ServeOptions,
    num_draft_tokens: str = Option(
        "auto",
        *("-k", "--num-draft-tokens"),
        help="Tokens drafted per round, or auto. auto adapts K to the load; requests with a seed use 4.",
        rich_help_panel="Models",
    ),
    generation_config: GenerationConfigOption = "auto",
) -> None:
    """Serve a target and its draft over OpenAI's API.

    Endpoints: /v1/chat/completions, /v1/responses, /v1/completions and others; the page at / shows a race."""
    for name, seconds in (("--queue-timeout", given.queue_timeout_s), ("--shutdown-timeout", given.shutdown_timeout_s)):
        if not seconds <= 1e6:  # nor infinite
            raise OptionError(name, seconds, "seconds, at most 1e6")
    k = parse_k(num_draft_tokens, "this command takes one number, or auto")[0]
    from outrider.models.sampling_defaults import check_choice

    # A key read from a file may end in a newline.
    keys = tuple(key.strip() for key in given.api_key or () if key.strip())
    if is_one_of_several():
        raise OptionError("torchrun", "outrider serve", "a server is one process: use --device-map to spread a model")
    names, draft = given.served_model_name or [short_name(pair.target)], pair.single_draft
    check_choice(generation_config)
    shared = {path: read_text(path).removesuffix("\n") for path in given.shared_prompt or ()}
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
    if not keys and not is_loopback(given.host):
        raise OptionError("--host", given.host, "without --api-key only loopback is allowed: use 127.0.0.1")

    def load() -> Decoder:
        _LOG.info("loading %s: %s with draft %s; %s/health is 503 until ready", names[0], pair.target, draft, url)
        decoder = pair.load(generation_config=generation_config)
        tool_format_of(decoder.tokenizer, given.tool_parser)  # before the server is ready
        thinking_of(decoder.tokenizer, given.reasoning_parser)
        return replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)

    listener = listen(given.host, given.port)
    url = f"http://{f'[{given.host}]' if ':' in given.host else given.host}:{listener.getsockname()[1]}"

    def on_ready(model: ServedModel) -> None:
        gc.freeze()  # full collections stop all threads, for half a second if they go through all modules
        for line in startup_lines(model.decoder, model.schedule, given.num_slots, model.capacity):
            _LOG.info("%s", line)
        key = "any API key" if not keys else "with an API key"
        _LOG.info("ready: %s/v1 (model %s, %s)", url, names[0], key)
        _LOG.info("web page with a race of plain and speculative decoding: %s", url)

    read = {"api_keys": keys, "shared_prompts": tuple(shared.values()), "context_len": given.context_len or 8192}
    values = asdict(given) | read
    options = ServerOptions(**{field.name: values[field.name] for field in fields(ServerOptions)})
    with listener, _log_on_stderr():
        Server(names, load, options, listener, on_ready).run()


@contextmanager
def _log_on_stderr() -> Iterator[None]:
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
