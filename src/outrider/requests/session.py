"""Sessions: calls that share one engine, whose cache keeps the prefixes of earlier calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Self, Unpack

from outrider.decoding.batch import final_length
from outrider.errors import OptionError, OutriderError, SessionError
from outrider.options import CallOptions, Sampling
from outrider.records import Chunk, Completion
from outrider.requests.calls import GenerationCalls
from outrider.requests.engine_loop import EngineLoop, LoopThread, RequestState, chunk_of, collect
from outrider.runtime.lm import LM
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.tokenizer import Prompt

_LOG = logging.getLogger(__name__)
_Opened = tuple[list[RequestState], EngineLoop]
_Arrived = asyncio.Queue[tuple[int, Chunk | OutriderError]]


class Session(GenerationCalls):
    """Calls that share one engine: a prompt that begins like an earlier one is not fed again, and concurrent streams
    are batched. See ``Decoder.session``.

    The methods are those of ``Decoder``, and a given seed has the same output. Rows join and leave between rounds; a
    stream joins when its first chunk is asked for. Iterating over one stream generates for all; the others keep their
    chunks until they are read. Several threads may share a session; they take turns. A stream that is dropped leaves
    before the next round. An error of one row ends its stream; one of the engine (or Ctrl-C in the middle of a round)
    ends all open streams, and the next call begins with an empty cache.
    """

    def __init__(
        self, requests: Callable[..., list[RequestState]], loop: EngineLoop, target: LM, capacity: int | None
    ) -> None:
        """Requests are made from the arguments of ``_open``. A capacity counts the tokens of a row, prompt included."""
        self._requests, self.loop, self._target, self._capacity = requests, loop, target, capacity

    def _open(self, prompts: Any, sampling: Any, resume_ids: Any, n: int, options: Mapping[str, Any]) -> _Opened:
        states = self._requests(prompts, sampling, resume_ids, n, options)
        self.loop.check_open()
        for state in states:
            num_tokens = final_length(self._target, state.request)
            if self._capacity is not None and num_tokens > self._capacity:
                remedy = f"the prompt makes it {num_tokens} tokens, but the session has room for {self._capacity}"
                raise OptionError("max_new_tokens", state.request.sampling.max_new_tokens, remedy)
        return states, self.loop

    def close(self) -> None:
        """End open streams, and free the cache."""
        self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class AsyncSession:
    """``Session`` for one event loop: a thread steps the engine, and many tasks share it. See
    ``Decoder.async_session``.

    Concurrent tasks are batched. A task that is cancelled, or closes its stream (``contextlib.aclosing``), leaves
    before the next round. Chunks for a slow reader wait in memory. Errors come from the iterator, those of options too.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._is_open = session, False
        self._thread = LoopThread("outrider-session")
        self._streams: set[_Arrived] = set()
        self._received: list[tuple[_Arrived, int, Chunk | OutriderError]] = []  # by the thread, in the current step

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Chunk]:
        """Generate for one prompt: see ``Decoder.stream``."""
        return self._stream(partial(self._session._open_one, prompt, sampling, resume_ids, options))

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> AsyncGenerator[Chunk]:
        """Generate for several prompts concurrently: see ``Decoder.stream_many``."""
        return self._stream(partial(self._session._open, prompts, sampling, resume_ids, n, options))

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **options: Unpack[CallOptions],
    ) -> list[Completion]:
        """Generate, and wait for all completions: see ``Decoder.generate``."""
        opened = await asyncio.to_thread(self._session._open, prompts, sampling, resume_ids, n, options)
        async with aclosing(self._stream(lambda: opened)) as chunks:
            return collect(opened[0], [chunk async for chunk in chunks])

    def stream_chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> AsyncGenerator[Chunk]:
        """Generate the answer to a chat: see ``Decoder.stream_chat``."""
        chat, others = chat_of(messages, options)
        return self.stream(chat, sampling, **others)

    async def chat(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        sampling: Sampling | None = None,
        **options: Unpack[ChatChanges],
    ) -> Completion:
        """Generate the answer to a chat, and wait for it: see ``Decoder.chat``."""
        chat, others = chat_of(messages, options)
        (completion,) = await self.generate(chat, sampling, **others)
        return completion

    async def __aenter__(self) -> Self:
        if self._is_open:
            raise SessionError("the session is open already: each 'async with' needs its own")
        self._thread.start(self._step_on_thread, begin=lambda: None, fail=self._fail_on_thread)
        self._is_open = True
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_open = False
        self._thread.post(self._close_on_thread)
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def _stream(self, open_: Callable[[], _Opened]) -> AsyncGenerator[Chunk]:
        states, loop = await asyncio.to_thread(open_)  # tokenizing is slow
        if not self._is_open:
            raise SessionError("the session is not open: use it as 'async with decoder.async_session() as session'")
        arrived: _Arrived = asyncio.Queue()

        def receive_on_thread(number: int, item: Chunk | OutriderError) -> None:
            self._received.append((arrived, number, item))

        num_open = len(states)
        self._streams.add(arrived)
        self._thread.post(partial(loop.submit, states, receive_on_thread))
        try:
            while num_open:
                chunk = chunk_of(*await arrived.get(), len(states))
                num_open -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._streams.remove(arrived)
            self._thread.post(partial(loop.cancel, states))  # after they were submitted

    def _step_on_thread(self) -> bool:
        try:
            has_more = self._session.loop.step()
        except BaseException as error:  # SystemExit of a hook, too. All rows have received it; the next engine is new
            has_more = False
            if not isinstance(error, OutriderError):
                _LOG.exception("the engine of a session has failed")
        self._deliver_on_thread()
        return has_more

    def _close_on_thread(self) -> None:
        self._session.close()
        self._deliver_on_thread()

    def _deliver_on_thread(self) -> None:
        """Hand what a step has given to the event loop, in one call."""

        def deliver(received: Sequence[tuple[_Arrived, int, Chunk | OutriderError]]) -> None:
            for arrived, number, item in received:
                arrived.put_nowait((number, item))

        received, self._received = self._received, []
        self._thread.call(deliver, received)

    def _fail_on_thread(self, error: BaseException) -> None:

        def end_streams() -> None:
            self._is_open = False
            for arrived in self._streams:
                arrived.put_nowait((0, SessionError("the thread of the session has failed: open another session")))

        _LOG.error("the thread of a session has failed", exc_info=error)
        self._close_on_thread()
        self._thread.call(end_streams)
