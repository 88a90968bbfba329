"""Sessions of an event loop, in plain tasks."""

import asyncio
import sys
from typing import Any

import pytest
import torch

from outrider.decoder import Decoder
from outrider.decoding.engine import Engine
from outrider.drafters.base import NO_DRAFTER
from outrider.errors import NumericsError, OptionError, SessionError
from outrider.records import Chunk
from outrider.runtime.lm import LM
from pairs import random_llama
from toys import llama_pair

LIMIT_S = 60.0  # until a test that hangs is given up


def test_tasks_share_a_session() -> None:
    """As many as there are slots, and more; one is cancelled, and the others do not notice."""
    target, drafter = llama_pair()
    decoder = Decoder(target, None, frozenset(), drafter)
    prompts = [[7, 3, 9, 4, 5, 1, 2, 8] * 2 + [i] for i in range(6)]
    alone = [decoder.generate([one], seed=i, max_new_tokens=12)[0].token_ids for i, one in enumerate(prompts)]

    async def all_tasks() -> list[tuple[int, ...]]:
        async with decoder.async_session(slots=2) as session:

            async def one(i: int) -> tuple[int, ...]:
                stream = session.stream(prompts[i], seed=i, max_new_tokens=12)
                return tuple([token_id async for chunk in stream for token_id in chunk.token_ids])

            cancelled = asyncio.create_task(session.generate([prompts[0]], max_new_tokens=200))
            tasks = [asyncio.create_task(one(i)) for i in range(6)]
            await asyncio.sleep(0)
            cancelled.cancel()
            return await asyncio.gather(*tasks)

    assert asyncio.run(all_tasks()) == alone


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of options, of a row, of the engine, and of a session that is closed. None of them ends the session."""
    model = random_llama(tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = torch.nan
    decoder = Decoder(LM(model, name="m", vocab_size=97, context_len=64), None, frozenset(), NO_DRAFTER)
    options: dict[str, Any] = {"seed": 4, "max_new_tokens": 8, "logit_bias": {77: -1e9}}

    def failing(*_: Any) -> None:
        raise RuntimeError("no more")

    async def all_errors() -> None:
        session = decoder.async_session()
        with pytest.raises(SessionError, match="async with"):
            await session.generate([[1]])
        async with session:
            with pytest.raises(SessionError, match="open already"):
                await session.__aenter__()
            with pytest.raises(OptionError, match="temperature"):
                await session.generate([[1]], temperature=-1)
            with pytest.raises(NumericsError, match="prompt 1"):
                await session.generate([[1], [77]], **options)
            with monkeypatch.context() as patch:
                patch.setattr(Engine, "step", failing)
                with pytest.raises(SessionError, match="RuntimeError"):
                    await session.generate([[1]], **options)
            with pytest.raises(SessionError, match="SystemExit"):  # a thread that ends with it says nothing
                await asyncio.wait_for(session.generate([[1]], **options, processor=sys.exit), LIMIT_S)
            assert await session.generate([[1]], **options) == decoder.generate([[1]], **options)
            stream = session.stream([1], **options)
            chunks: list[Chunk] = [await anext(stream)]
        with pytest.raises(SessionError, match="closed before"):
            chunks += [chunk async for chunk in stream]
        with pytest.raises(SessionError, match="closed: open another"):
            await session.generate([[1]])

    asyncio.run(all_errors())
