"""``outrider chat``: a conversation in the terminal."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.options import (
    EndOptions,
    GenerationConfigOption,
    NumDraftTokensOption,
    SamplingOptions,
    flat,
    over_checkpoint,
)
from outrider.cli.shared.output import console_for, say
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.template_options import TemplateOptions
from outrider.errors import FileError, OptionError, OutriderError
from outrider.records import Chunk, Completion, Timing
from outrider.text.chat import Chat, ChatOptions

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from outrider.decoder import Decoder
    from outrider.requests.session import Session

_ANSWER_TOKENS = 1024
_PASTE_S = 0.03  # lines that arrive so soon after another are one text
_COMMANDS = ("/reset", "/system", "/help", "/quit")
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
    sampling: SamplingOptions,
    end: EndOptions,
    template: TemplateOptions,
    target_name: Annotated[str | None, typer.Argument(metavar="TARGET", help="In place of --target.")] = None,
    draft_name: Annotated[str | None, typer.Argument(metavar="DRAFT", help="In place of --draft.")] = None,
    num_draft_tokens: NumDraftTokensOption = None,
    seed: Annotated[int | None, typer.Option(help="Base seed; answer i gets seed + i. Default: random.")] = None,
    generation_config: GenerationConfigOption = "auto",
) -> None:
    """Chat with a model. Accepted drafted tokens are underlined.

    Each line of standard input is a message. A model without a chat template continues the text instead."""
    pair = _named(pair, target_name, draft_name)
    with _loading_line(pair.target, pair.single_draft):
        sampling = over_checkpoint(sampling, context, generation_config, pair.target, pair.models)
        draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
        options = sampling.to_options(seed=seed, num_seeds=1, **end.to_options(_ANSWER_TOKENS))
        decoder = pair.load()
        decoder = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
    is_chat = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    if not is_chat:
        if template.is_chat:
            remedy = f"{decoder.target.name} has no chat template: leave out this, --system and --chat-template-kwargs"
            raise OptionError("--chat", True, remedy)
        options |= end.to_options()
    conversation = ChatConversation(template.options) if is_chat else Continuation(decoder.target.name)
    with decoder.session(slots=1) as session:
        console = console_for(None)
        _Terminal(decoder, session, conversation, options, console).run(_lines_of(console))


@dataclass(slots=True)
class ChatConversation:
    """Messages in a chat template."""

    options: ChatOptions
    messages: list[Mapping[str, Any]] = field(default_factory=list)

    def prompt(self, text: str) -> Chat | None:
        """The prompt for an answer to this text; None if there is nothing to answer."""
        return Chat([*self.messages, {"role": "user", "content": text}], self.options) if text.strip() else None

    def add(self, text: str, answer: str) -> None:
        self.messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        self.messages.clear()

    def set_system(self, text: str) -> None:
        """Set the system message; an empty one is none."""
        self.options = replace(self.options, system=text or None)


@dataclass(slots=True)
class Continuation:
    """One text. User and base model write parts of it in turn, the user each on a line of its own."""

    model: str
    text: str = ""

    def prompt(self, text: str) -> str | None:
        return "\n".join(part for part in (self.text, text) if part.strip()) or None

    def add(self, text: str, answer: str) -> None:
        self.text = (self.prompt(text) or "") + answer

    def reset(self) -> None:
        self.text = ""

    def set_system(self, text: str) -> None:
        raise OptionError("system", text, f"{self.model} has no chat template, so there is no system message")


def _named(pair: PairOptions, target: str | None, draft: str | None) -> PairOptions:
    """Options with the models of the arguments. Raises OptionError."""
    for option, argument, value, default in (
        ("--target", target, pair.target, PairOptions.target),
        ("--draft", draft, pair.draft, None),
    ):
        if argument is not None and value != default:
            raise OptionError(option, value, f"give it or the argument {argument!r}, not both")
    target_name = pair.target if target is None else target
    return replace(pair, target=target_name, draft=pair.draft if draft is None else [draft])


def _loading_line(target: str, draft: str) -> Status:
    """A line while models are loaded, which begins with imports of seconds. It is for terminals, and removed at the
    end."""
    from rich.console import Console
    from rich.text import Text

    return Console(stderr=True).status(Text(f"loading {target} with {draft} ..."))  # names may contain brackets


def _lines_of(console: Console) -> Iterator[str]:
    """Messages of the user, to the end of input."""
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


@dataclass(slots=True)
class _Terminal:
    """Answers messages.

    Attributes:
        options: of the first answer; later ones get the seeds after its seed.
        console: for the answers; all else goes to standard error.
    """

    decoder: Decoder
    session: Session
    conversation: ChatConversation | Continuation
    options: dict[str, Any]
    console: Console

    def run(self, texts: Iterator[str]) -> None:
        is_terminal = self.console.file.isatty()
        if is_terminal:
            self._say(self._title)
        for text in texts:
            command, rest = (*text.split(maxsplit=1), "", "")[:2]
            if command == "/quit":
                return
            try:
                # A word alone may be a command mistyped; a text that begins with a path is a message.
                if command in _COMMANDS or (command.startswith("/") and not rest):
                    self._obey(command, rest.strip())
                else:
                    self._answer(text)
            except OutriderError as error:
                if not is_terminal:
                    raise
                self._say(f"error: {error} (/reset forgets the conversation)")

    @property
    def _title(self) -> str:
        target, draft = self.decoder.target.name, self.decoder.drafter.name
        models = target if draft == "none" else f"{target} with {draft}"
        how = "" if isinstance(self.conversation, ChatConversation) else ": a base model, which continues your text"
        return f"{models}{how} (/help)"

    def _obey(self, command: str, rest: str) -> None:
        if command == "/help":
            self._say(_HELP)
        elif command == "/reset":
            self.conversation.reset()
        elif command == "/system":
            self.conversation.set_system(rest)
        else:
            self._say(f"there is no command {command}\n{_HELP}")

    def _answer(self, text: str) -> None:
        prompt = self.conversation.prompt(text)
        if prompt is None:
            return
        ids = self.decoder.encode(prompt)
        chunks: list[Chunk] = []
        with _interrupts() as is_interrupted:
            stream = self.session.stream(ids, **self.options)
            try:
                for chunk in stream:
                    chunks.append(chunk)
                    self._write(chunk)
                    if is_interrupted():
                        break
            except KeyboardInterrupt:
                pass
            finally:
                del stream  # cancels the row
                self.console.file.write("\n")
                self.console.file.flush()
        if self.options["seed"] is not None:
            self.options["seed"] += 1
        if chunks:
            answer = Completion.of(chunks, len(ids))
            self.conversation.add(text, answer.text)
            timing = sum((chunk.timing for chunk in chunks), Timing())
            self._say(_status(answer, timing, self.options["max_new_tokens"]))

    def _write(self, chunk: Chunk) -> None:
        from rich.control import strip_control_codes
        from rich.segment import Segment, Segments
        from rich.style import Style

        for text, origin in chunk.pieces:
            if self.console.is_terminal:
                style = Style(underline=True) if origin == "accepted" else None
                # A string would have its tabs expanded, as if each piece began a line.
                self.console.print(Segments([Segment(strip_control_codes(text), style)]), soft_wrap=True)
            else:
                self.console.file.write(text)
        self.console.file.flush()

    def _say(self, message: str) -> None:
        from rich.console import Console

        Console(stderr=True, highlight=False).print(message, style="dim", markup=False, soft_wrap=True)


def _status(answer: Completion, timing: Timing, max_new_tokens: int) -> str:
    tau, num_tokens = answer.stats.mean_acceptance_length, len(answer.token_ids)
    parts = [
        f"{num_tokens} tokens",
        f"{num_tokens / timing.total_s:.1f} tokens/s",
        f"tau {1.0 if tau is None else tau:.2f}",
        f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached",
    ]
    if answer.finish_reason is None:
        parts.append("stopped")
    if answer.finish_reason == "length":
        parts.append(f"-n {max_new_tokens} reached" if num_tokens == max_new_tokens else "the context is full")
    return ", ".join(parts)
