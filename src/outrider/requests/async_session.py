"""A session for an event loop: a thread steps the engine, and many tasks share it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from outrider.errors import OutriderError, SessionError
from outrider.options import Sampling, SamplingChanges
from outrider.records import Chunk, Completion
from outrider.requests.call import chunk_of
from outrider.requests.loop_thread import LoopThread
from outrider.requests.session import SessionCalls
from outrider.requests.shared_engine import Item, SharedRow
from outrider.requests.state import RequestState
from outrider.text.chat import ChatChanges
from outrider.text.chat_images import chat_of
from outrider.text.tokenizer import Prompt

_LOG = logging.getLogger(__name__)


class AsyncSession:
    """``Session`` for one event loop. See ``Decoder.async_session``.

    Concurrent tasks are batched. A task that is cancelled, or closes its stream (``contextlib.aclosing``), leaves
    before the next round. Chunks for a slow reader wait in memory. Errors come from the iterator, those of options too.
    """

    def __init__(self, calls: SessionCalls) -> None:
        self._calls, self._is_open = calls, False
        self._thread = LoopThread("outrider-session")
        self._queues: set[asyncio.Queue[tuple[int, Item]]] = set()  # of open streams
        self._arrived: list[tuple[asyncio.Queue[tuple[int, Item]], int, Item]] = []  # in the current step

    def stream(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        resume_ids: Sequence[int] = (),
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> AsyncGenerator[Chunk]:
        """Generate for one prompt: see ``Decoder.stream``."""
        make = partial(self._calls.one, prompt, sampling, changes, resume_ids, reports_drafts=reports_drafts)
        return self._stream(make)

    def stream_many(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        reports_drafts: bool = False,
        **changes: Unpack[SamplingChanges],
    ) -> AsyncGenerator[Chunk]:
        """Generate for several prompts concurrently: see ``Decoder.stream_many``."""
        more: dict[str, Any] = {"reports_drafts": reports_drafts}
        return self._stream(partial(self._calls.many, prompts, sampling, changes, resume_ids, n, **more))

    async def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        n: int = 1,
        resume_ids: Sequence[Sequence[int]] | None = None,
        **changes: Unpack[SamplingChanges],
    ) -> list[Completion]:
        """Generate, and wait for all completions: see ``Decoder.generate``."""
        states = await asyncio.to_thread(self._calls.many, prompts, sampling, changes, resume_ids, n)
        async with aclosing(self._chunks(states)) as chunks:
            async for chunk in chunks:
                states[chunk.row].chunks.append(chunk)
        return [state.completion for state in states]

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        self._thread.post(self._close_on_thread)
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def _stream(self, make: Callable[[], list[RequestState]]) -> AsyncGenerator[Chunk]:
        states = await asyncio.to_thread(make)  # tokenizing is slow
        async with aclosing(self._chunks(states)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _chunks(self, states: Sequence[RequestState]) -> AsyncGenerator[Chunk]:
        if not self._is_open:
            raise SessionError("the session is not open: use it as 'async with decoder.async_session() as session'")
        arrived: asyncio.Queue[tuple[int, Item]] = asyncio.Queue()
        receive = partial(self._receive_on_thread, arrived)
        rows = [SharedRow(i, state, self._calls.room(state), receive) for i, state in enumerate(states)]
        self._queues.add(arrived)
        self._thread.post(partial(self._calls.engine.submit, rows))
        num_open = len(rows)
        try:
            while num_open:
                number, item = await arrived.get()
                chunk = chunk_of(number, item, len(rows))
                num_open -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._queues.remove(arrived)
            self._thread.post(partial(self._calls.engine.drop, rows))  # after they were submitted

    def _end_streams(self) -> None:
        """End all streams, also those whose rows the thread had not taken when it failed."""
        self._is_open = False
        for arrived in self._queues:
            arrived.put_nowait((0, SessionError("the thread of the session has failed: open another session")))

    # In the thread

    def _receive_on_thread(self, arrived: asyncio.Queue[tuple[int, Item]], number: int, item: Item) -> None:
        self._arrived.append((arrived, number, item))

    def _step_on_thread(self) -> bool:
        try:
            has_more = self._calls.engine.step()
        except BaseException as error:  # SystemExit of a hook, too. All rows have received it; the next engine is new
            has_more = False
            if not isinstance(error, OutriderError):
                _LOG.exception("the engine of a session has failed")
        self._deliver_on_thread()
        return has_more

    def _close_on_thread(self) -> None:
        self._calls.engine.close()
        self._deliver_on_thread()

    def _fail_on_thread(self, error: Exception) -> None:
        _LOG.error("the thread of a session has failed", exc_info=error)
        self._close_on_thread()
        self._thread.call(self._end_streams)

    def _deliver_on_thread(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._thread.call(_deliver, arrived)


def _deliver(arrived: Sequence[tuple[asyncio.Queue[tuple[int, Item]], int, Item]]) -> None:
    for queue, number, item in arrived:
        queue.put_nowait((number, item))
