"""The calls that generate, written once for decoders and sessions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from outrider.options import CallOptions, Sampling
from outrider.records import Chunk, Completion
from outrider.requests.engine_loop import EngineLoop, RequestState, collect
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.prompts import one_prompt
from outrider.text.tokenizer import Prompt


class GenerationCalls(ABC):
    """Calls that generate, over requests and the loop that runs them."""

    __slots__ = ()

    @abstractmethod
    def _open(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        resume_ids: Sequence[Sequence[int]] | None,
        n: int,
        options: Mapping[str, Any],
    ) -> tuple[list[RequestState], EngineLoop]:
        """Check a call, and make its requests. Raises OptionError, PromptError, SessionError."""

    def _open_one(
        self, prompt: Prompt, sampling: Sampling | None, resume_ids: Sequence[int], options: Mapping[str, Any]
    ) -> tuple[list[RequestState], EngineLoop]:
        return self._open(one_prompt(prompt), sampling, [resume_ids], 1, options)

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        **options: Unpack[CallOptions],
    ) -> Iterator[Chunk]:
        """Generate for one prompt, one chunk per round. Arguments and errors: see ``stream_many``.

        The iterator may be dropped at any time. A call with ``resume_ids``, the tokens generated so far, continues from
        there; stop strings and characters may span the cut. ``max_new_tokens`` counts the tokens of ``resume_ids`` too.
        Cut at the end of a round (after a chunk; under ``gumbel`` anywhere), a given seed yields the output of the
        uncut stream.
        """
        states, loop = self._open_one(prompt, sampling, resume_ids, options)
        return loop.chunks(states)

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> Iterator[Chunk]:
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
        states, loop = self._open(prompts, sampling, resume_ids, n, options)
        return loop.chunks(states)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Generate for one prompt or several, and wait for all. Arguments and errors: see ``stream_many``.

        Returns:
            ``n`` completions for each prompt, in order.
        """
        states, loop = self._open(prompts, sampling, resume_ids, n, options)
        return collect(states, loop.chunks(states))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Iterator[Chunk]:
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
    ) -> Completion:
        """Generate the answer to a chat, and wait for it. Arguments and errors: see ``stream_chat``. (``generate``
        takes several chats.)"""
        chat, others = chat_of(messages, options)
        (completion,) = self.generate(chat, sampling, **others)
        return completion
