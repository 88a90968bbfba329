"""A session: calls that share one engine, whose cache keeps the prefixes of earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from outrider.decoding.batch import final_length
from outrider.errors import OptionError
from outrider.options import Sampling, SamplingChanges, check_num_slots
from outrider.records import Chunk, Completion
from outrider.requests.call import GenerateCall, collect
from outrider.requests.shared_engine import SharedEngine
from outrider.requests.state import RequestState
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.tokenizer import Prompt

_LEAST_CAPACITY = 2048  # tokens of a slot, so that most sessions never grow


class SessionCalls:
    """The requests of a session, and its engine."""

    def __init__(self, call: GenerateCall, slots: int, capacity: int | None) -> None:
        check_num_slots(slots, "slots")
        self._call, self._capacity = call, capacity
        least, context_len = _LEAST_CAPACITY, call.target.context_len
        most = context_len
        if capacity is not None:
            is_number = isinstance(capacity, int) and not isinstance(capacity, bool)
            if not is_number or not 2 <= capacity <= context_len:
                remedy = f"a whole number of tokens from 2 to {context_len}, the context of {call.target.name}"
                raise OptionError("capacity", capacity, remedy)
            least = most = call.with_drafts(capacity)
        self.engine = SharedEngine(partial(call.engine, slots), least_capacity=least, most_capacity=most)

    def one(
        self,
        prompt: Prompt,
        sampling: Sampling | None,
        changes: Mapping[str, Any],
        resume_ids: Sequence[int],
        **more: Any,
    ) -> list[RequestState]:
        """See ``Session.stream``."""
        return self._checked(replace(self._call, **more).one(prompt, sampling, changes, resume_ids))

    def many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None,
        changes: Mapping[str, Any],
        resume_ids: Sequence[Sequence[int]] | None,
        n: int = 1,
        **more: Any,
    ) -> list[RequestState]:
        """See ``Session.stream_many``."""
        return self._checked(replace(self._call, **more).states(prompts, sampling, changes, resume_ids, n))

    def room(self, state: RequestState) -> int:
        """See ``GenerateCall.room``."""
        return self._call.room(state)

    def chunks(self, states: Sequence[RequestState]) -> Iterator[Chunk]:
        """See ``GenerateCall.chunks_on``."""
        return self._call.chunks_on(self.engine, states)

    def _checked(self, states: list[RequestState]) -> list[RequestState]:
        self.engine.check_open()
        for state in states:
            num_tokens = final_length(self._call.target, state.request)
            if self._capacity is not None and num_tokens > self._capacity:
                remedy = f"the prompt makes it {num_tokens} tokens, but the session has room for {self._capacity}"
                raise OptionError("max_new_tokens", state.request.sampling.max_new_tokens, remedy)
        return states


class Session:
    """Calls that share one engine: a prompt that begins like an earlier one is not fed again, and concurrent streams
    are batched. See ``Decoder.session``.

    The methods are those of ``Decoder``, and a given seed has the same output. Rows join and leave between rounds.
    Iterating over one stream generates for all; the others keep their chunks until they are read. Several threads may
    share a session; they take turns. A stream that is dropped leaves before the next round. An error of one row ends
    its stream; one of the engine (or Ctrl-C in the middle of a round) ends all open streams, and the next call begins
    with an empty cache.
    """

    def __init__(self, calls: SessionCalls) -> None:
        self._calls = calls

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[Chunk]:
        """Generate for one prompt: see ``Decoder.stream``. It joins when the first chunk is asked for."""
        return self._calls.chunks(self._calls.one(prompt, sampling, changes, resume_ids, reports_drafts=reports_drafts))

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> Iterator[Chunk]:
        """Generate for several prompts concurrently: see ``Decoder.stream_many``."""
        states = self._calls.many(prompts, sampling, changes, resume_ids, n, reports_drafts=reports_drafts)
        return self._calls.chunks(states)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> list[Completion]:
        """Generate, and wait for all completions: see ``Decoder.generate``."""
        states = self._calls.many(prompts, sampling, changes, resume_ids, n)
        return collect(states, self._calls.chunks(states))

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Iterator[Chunk]:
        """Generate the answer to a chat: see ``Decoder.stream_chat``."""
        chat, others = chat_of(messages, options)
        return self.stream(chat, sampling, **others)

    def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Completion:
        """Generate the answer to a chat, and wait for it: see ``Decoder.chat``."""
        chat, others = chat_of(messages, options)
        (completion,) = self.generate(chat, sampling, **others)
        return completion

    def close(self) -> None:
        """End open streams, and free the cache."""
        self._calls.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
