"""The calls that generate, written once for decoders and sessions, of event loops too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack

from outrider.options import CallOptions, Sampling
from outrider.records import Chunk, Completion
from outrider.requests.engine_loop import EngineLoop, RequestState, collect
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.prompts import one_prompt
from outrider.text.tokenizer import Prompt

_Stream = TypeVar("_Stream")
_Completions = TypeVar("_Completions")
_Completion = TypeVar("_Completion")


class GenerationCalls(ABC, Generic[_Stream, _Completions, _Completion]):
    """Calls that generate, over three methods; ``call`` is prompts, sampling, ``resume_ids``, n and options."""

    __slots__ = ()

    @abstractmethod
    def _stream(self, *call: Any) -> _Stream:
        """Generate, chunk by chunk."""

    @abstractmethod
    def _complete(self, *call: Any) -> _Completions:
        """Generate, and wait for all."""

    @abstractmethod
    def _only(self, completions: _Completions) -> _Completion:
        """The completion of a single prompt."""

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        **options: Unpack[CallOptions],
    ) -> _Stream:
        """Generate for one prompt, one chunk per round. Arguments and errors: see ``stream_many``.

        The iterator may be dropped at any time. A call with ``resume_ids``, the tokens generated so far, continues from
        there; stop strings and characters may span the cut. ``max_new_tokens`` counts the tokens of ``resume_ids`` too.
        Cut at the end of a round (after a chunk; under ``gumbel`` anywhere), a given seed yields the output of the
        uncut stream.
        """
        return self._stream(one_prompt(prompt), sampling, [resume_ids], 1, options)

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> _Stream:
        """Generate for several prompts concurrently, one chunk per row and round.

        Args:
            prompts: texts, lists of token ids, or chats; or one of these; or the output of a tokenizer, with its mask.
            sampling: options of all prompts, or a list with one for each; None for the defaults of the target's
                checkpoint. A single ``seed`` is the base seed; row i gets seed + i. (A list has the seed of each
                prompt's first row.) Without a seed each row draws its own.
            n: completions of each prompt, in turn: completion j of prompt i is row i n + j. The prompt is fed once.
            resume_ids: for each completion the tokens generated before (see ``stream``).
            options: fields of ``Sampling`` in place of those of ``sampling``; and the other fields of ``CallOptions``.

        Raises:
            OptionError, PromptError, SessionError: from the call, not from the first chunk.
            NumericsError: from the iterator.
        """
        return self._stream(prompts, sampling, resume_ids, n, options)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> _Completions:
        """Generate for one prompt or several, and wait for all. Arguments and errors: see ``stream_many``.

        Returns:
            ``n`` completions for each prompt, in order.
        """
        return self._complete(prompts, sampling, resume_ids, n, options)

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> _Stream:
        """Generate the answer to a chat, one chunk per round.

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``; a string is one message of the user.
            options: fields of ``ChatOptions`` (``system``, ``tools``, ``chat_template_kwargs``, ...), which go to the
                chat template; and options of ``stream``.

        Raises:
            PromptError: there is no chat template, or it does not accept the messages.
            OptionError: an option is invalid, or the template does not read it.
        """
        chat, others = chat_of(messages, options)
        return self.stream(chat, sampling, **others)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> _Completion:
        """Generate the answer to a chat, and wait for it. Arguments and errors: see ``stream_chat``. (``generate``
        takes several chats.)"""
        chat, others = chat_of(messages, options)
        return self._only(self.generate(chat, sampling, **others))


class BlockingCalls(GenerationCalls[Iterator[Chunk], list[Completion], Completion]):
    """Calls over requests and the loop that runs them, in the thread of the caller."""

    __slots__ = ()

    @abstractmethod
    def _open(
        self, prompts: Any, sampling: Any, resume_ids: Any, n: int, options: Mapping[str, Any]
    ) -> tuple[list[RequestState], EngineLoop]:
        """Check a call, and make its requests. Raises OptionError, PromptError, SessionError."""

    def _stream(self, *call: Any) -> Iterator[Chunk]:
        states, loop = self._open(*call)
        return loop.chunks(states)

    def _complete(self, *call: Any) -> list[Completion]:
        states, loop = self._open(*call)
        return collect(states, loop.chunks(states))

    def _only(self, completions: list[Completion]) -> Completion:
        (completion,) = completions
        return completion
