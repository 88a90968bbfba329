"""Sessions: calls that share one engine, whose cache keeps the prefixes of earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from outrider.decoding.batch import final_length
from outrider.errors import OptionError
from outrider.requests.calls import BlockingCalls
from outrider.requests.engine_loop import EngineLoop, RequestState
from outrider.runtime.lm import LM


class Session(BlockingCalls):
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

    def _open(
        self, prompts: Any, sampling: Any, resume_ids: Any, n: int, options: Mapping[str, Any]
    ) -> tuple[list[RequestState], EngineLoop]:
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
