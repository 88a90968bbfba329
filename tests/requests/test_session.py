"""Sessions: engine and prefixes stay between calls, streams come and go, and the output is the decoder's own."""

import asyncio
import gc
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from hybrids import hybrid, hybrid_lm
from outrider import decoder as decoder_module
from outrider.decoder import Decoder
from outrider.decoding.engine import Engine
from outrider.drafters.base import NO_DRAFTER
from outrider.drafters.lookups import ngram_drafter
from outrider.errors import NumericsError, OptionError, SessionError
from outrider.records import Chunk
from outrider.runtime.lm import LM
from outrider.runtime.transformers_forward import TransformersForward
from pairs import random_llama
from toys import llama_pair

PROMPT = [7, 3, 9, 4, 5, 1, 2, 8] * 3


def _decoder(**options: Any) -> Decoder:
    target, drafter = llama_pair()
    return Decoder(target, None, frozenset(), drafter, **options)


def _broken() -> tuple[Decoder, dict[str, Any]]:
    """With a NaN at token 77, and options by which no text has it."""
    model = random_llama(tie_word_embeddings=False)
    model.get_input_embeddings().weight.data[77] = torch.nan
    decoder = Decoder(
        LM(TransformersForward(model), name="m", vocab_size=97, context_len=64), None, frozenset(), NO_DRAFTER
    )
    return decoder, {"seed": 4, "max_new_tokens": 8, "logit_bias": {77: -1e9}}


def _ids(stream: Iterable[Chunk]) -> tuple[int, ...]:
    return tuple(i for chunk in stream for i in chunk.token_ids)


@pytest.mark.each_execution
def test_the_output_is_the_decoders_own() -> None:
    """Turns of a conversation, in a session and alone: with a prefix in the cache or without."""
    decoder = _decoder(acceptance="block", num_draft_tokens=4)
    prompt, options = list(PROMPT), {"max_new_tokens": 9, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1}
    with decoder.session(slots=2) as session:
        for turn in range(3):
            (alone,) = decoder.generate([prompt], seed=turn, **options)
            (one,) = session.generate([prompt], seed=turn, **options)
            assert one.token_ids == alone.token_ids and one.stats == alone.stats
            assert one.text == alone.text and one.num_prompt_tokens == len(prompt)
            assert one.num_cached_tokens >= (len(prompt) - 11) * (turn > 0)
            prompt += [*one.token_ids, 5, turn]


def test_streams_join_and_leave() -> None:
    decoder = _decoder()
    prompts = [[*PROMPT[i:], i] for i in range(4)]
    alone = [_ids(decoder.stream(one, seed=i, max_new_tokens=14)) for i, one in enumerate(prompts)]
    with decoder.session(slots=2) as session:
        streams = [session.stream(one, seed=i, max_new_tokens=14) for i, one in enumerate(prompts)]
        got: list[tuple[int, ...]] = [()] * 4
        for _ in range(2):
            for i in (0, 1):
                got[i] += next(streams[i]).token_ids
        del streams[0]
        gc.collect()
        assert len(got[0]) < 14
        for i in (3, 2, 1):  # the one that began first ends last: its chunks were kept
            got[i] += _ids(streams[i - 1])
        assert got[1:] == alone[1:] and got[0] == alone[0][: len(got[0])]
        assert [_ids(session.stream(prompts[0], seed=0, max_new_tokens=14))] == alone[:1]
        many = list(session.stream_many(prompts, seed=0, max_new_tokens=14, reports_drafts=True))
        assert [_ids(chunk for chunk in many if chunk.row == i) for i in range(4)] == alone
        assert all(chunk.drafted is not None for chunk in many)
        with ThreadPoolExecutor(4) as pool:  # threads take turns
            got = list(pool.map(lambda i: _ids(session.stream(prompts[i], seed=i, max_new_tokens=14)), range(4)))
        assert got == alone


def test_the_cache_grows_when_no_row_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """A longer sequence waits, those behind it too, and no chunk is lost."""
    monkeypatch.setattr(decoder_module, "_LEAST_SESSION_CAPACITY", 48)
    decoder, sizes, make = _decoder(), list[int](), Decoder.engine

    def noted(decoder: Decoder, num_slots: int, capacity: int, **options: Any) -> Engine:
        sizes.append(capacity)
        return make(decoder, num_slots, capacity, **options)

    monkeypatch.setattr(Decoder, "engine", noted)
    lengths = [20, 40, 8]
    with decoder.session(slots=2) as session:
        streams = [session.stream(PROMPT, seed=i, max_new_tokens=n) for i, n in enumerate(lengths)]
        first = next(streams[0]).token_ids
        third, second = _ids(streams[2]), _ids(streams[1])
        assert sizes == [48, 96]
        got = [first + _ids(streams[0]), second, third]
    assert got == [_ids(decoder.stream(PROMPT, seed=i, max_new_tokens=n)) for i, n in enumerate(lengths)]


def test_a_capacity_is_a_limit() -> None:
    decoder = _decoder()
    with decoder.session(capacity=40) as session:
        with pytest.raises(OptionError, match="makes it 41 tokens, but the session has room for 40"):
            session.generate([PROMPT], max_new_tokens=17)
        assert len(session.generate([PROMPT], max_new_tokens=16)[0].token_ids) == 16
    for options in ({"slots": 0}, {"capacity": 257}, {"acceptance": "all"}):
        with pytest.raises(OptionError, match=next(iter(options))):
            decoder.session(**options)


def test_errors_leave_the_session_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, options = _broken()
    want = _ids(decoder.stream([1, 2], **options))
    with decoder.session() as session:
        with pytest.raises(NumericsError, match="prompt 1: .* position 1"):
            session.generate([[1, 2], [77]], **options)
        with pytest.raises(OptionError, match="did you mean temperature"):
            session.stream([1], temprature=1.0)
        with pytest.raises(OptionError, match="where the session is opened"):
            session.generate([[1]], acceptance="gumbel")  # type: ignore[call-arg]
        other = session.stream([3], **options)
        next(other)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Engine, "step", Mock(side_effect=KeyboardInterrupt))
            session.generate([[1, 2]], **options)
        with pytest.raises(SessionError, match=r"has stopped \(KeyboardInterrupt\): start again"):
            list(other)
        assert _ids(session.stream([1, 2], **options)) == want
        last = session.stream([1, 2], **options)
        next(last)
    with pytest.raises(SessionError, match="closed before"):
        list(last)
    with pytest.raises(SessionError, match="closed: open another"):
        session.stream([1])


def test_a_late_close_leaves_those_in_its_place_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a stream whose engine is gone; in the new engine another has its number."""
    decoder, options = _broken()
    want = _ids(decoder.stream([1, 2], **options))
    with decoder.session() as session:
        old = [session.stream([1, 2], **options) for _ in range(2)]
        for stream in old:
            next(stream)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError):
            patch.setattr(Engine, "step", Mock(side_effect=RuntimeError))
            list(old[0])
        new = [session.stream([1, 2], **options) for _ in range(2)]
        begun = [next(stream).token_ids for stream in new]
        old[1].close()
        session.loop.step()
        assert len(session.loop._rows) == 2  # else who reads a stream would wait for ever
        assert [first + _ids(stream) for first, stream in zip(begun, new, strict=True)] == [want, want]


def test_closing_ends_who_runs_and_who_waits_for_a_larger_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_module, "_LEAST_SESSION_CAPACITY", 16)
    session, ended = _decoder().session(), list[tuple[str, int]]()
    for name, prompt in (("runs", PROMPT[:4]), ("waits", PROMPT)):
        states, loop = session._open([prompt], None, None, 1, {"max_new_tokens": 12})  # 2 rounds are not enough
        loop.submit(states, lambda _, item, name=name: ended.append((name, isinstance(item, SessionError))))
        loop.step()
    assert {name for name, _ in ended} == {"runs"}
    session.close()
    assert [name for name, is_error in ended if is_error] == ["runs", "waits"]


def test_a_hook_cannot_use_its_own_session() -> None:
    """It would wait for itself. Another session serves it, and the first one stays usable."""
    decoder = _decoder()
    with decoder.session() as session, decoder.session() as other:
        open_stream = session.stream(PROMPT, seed=1, max_new_tokens=30)
        next(open_stream)
        uses: tuple[Any, ...] = (lambda ids: next(open_stream), lambda ids: session.close())
        for use in uses:
            with pytest.raises(NumericsError, match="a hook cannot use the session that calls it"):
                session.generate([PROMPT], max_new_tokens=2, processor=use)
            open_stream = session.stream(PROMPT, seed=1, max_new_tokens=30)
            next(open_stream)
        alone = decoder.generate([PROMPT], seed=1, max_new_tokens=3)[0].token_ids
        hook = lambda ids: other.generate([[1]], max_new_tokens=1) and None  # noqa: E731
        assert session.generate([PROMPT], seed=1, max_new_tokens=3, processor=hook)[0].token_ids == alone


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_copies_are_those_of_their_own_calls(is_hybrid: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Completion i takes seed + i; the prompt is fed once."""
    target, fed, prefill = hybrid_lm(hybrid("lfm2")), list[int](), LM.prefill
    decoder = Decoder(target, None, frozenset(), ngram_drafter()) if is_hybrid else _decoder()

    def counted(self: LM, ids: Any, starts: torch.Tensor, ends: torch.Tensor, *rest: Any, **more: Any) -> Any:
        fed.extend([int((ends - starts).sum())] if self.name == "target" else [])
        return prefill(self, ids, starts, ends, *rest, **more)

    prompts, options = [PROMPT, PROMPT[::-1]], {"max_new_tokens": 7}
    alone = [decoder.generate([prompts[i // 3]], seed=5 + i, **options)[0].token_ids for i in range(6)]
    assert [one.token_ids for one in decoder.generate(prompts, n=3, seed=5, **options, num_slots=2)] == alone
    monkeypatch.setattr(LM, "prefill", counted)
    with decoder.session(slots=6) as session:
        done = session.generate(prompts, n=3, seed=5, **options)
    assert [one.token_ids for one in done] == alone and [one.seed for one in done] == [5, 6, 7, 8, 9, 10]
    assert sum(fed) == 2 * (len(PROMPT) - 1)


def test_tasks_share_a_session() -> None:
    decoder, prompts = _decoder(), [[*PROMPT, i] for i in range(6)]
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


def test_async_session_errors_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of options, of a row, of the engine, and of a session that is closed. None of them ends the session."""
    decoder, options = _broken()

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
                patch.setattr(Engine, "step", Mock(side_effect=RuntimeError))
                with pytest.raises(SessionError, match="RuntimeError"):
                    await session.generate([[1]], **options)
            with pytest.raises(SessionError, match="SystemExit"):  # a thread that ends with it says nothing
                await asyncio.wait_for(session.generate([[1]], **options, processor=sys.exit), 60.0)
            assert await session.generate([[1]], **options) == decoder.generate([[1]], **options)
            stream = session.stream([1], **options | {"max_new_tokens": 62})
            chunks: list[Chunk] = [await anext(stream)]
        with pytest.raises(SessionError, match="closed before"):
            chunks += [chunk async for chunk in stream]
        with pytest.raises(SessionError, match="closed: open another"):
            await session.generate([[1]])

    asyncio.run(all_errors())
