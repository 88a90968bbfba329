"""A service of your own: one session, whose engine batches the streams of all clients.

pip install fastapi uvicorn
TARGET=fable DRAFT=fable-draft uvicorn --app-dir examples fastapi_stories:app
curl -N 'http://127.0.0.1:8000/story?begin=Once+upon+a+time&seed=1'

A client that disconnects leaves the batch before the next round. ``outrider serve`` has OpenAI's API ready; this is for
an API of your own.
"""

import os
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse

import outrider


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the pair once. The session ends with the service."""
    decoder = outrider.load(os.environ.get("TARGET", "fable"), os.environ.get("DRAFT", "fable-draft"))
    async with decoder.async_session(slots=8) as app.state.session:
        yield


app = FastAPI(lifespan=lifespan)


@app.get("/story")
async def story(begin: str, seed: int | None = None, max_new_tokens: int = 64) -> StreamingResponse:
    """Stream a continuation of a text."""
    chunks = app.state.session.stream(begin, seed=seed, max_new_tokens=max_new_tokens)
    try:
        first = await anext(chunks)  # wrong options and prompts are refused here, before the answer begins
    except outrider.UsageError as error:
        raise HTTPException(400, str(error)) from None

    async def texts() -> AsyncIterator[str]:
        async with aclosing(chunks):
            yield first.text
            async for chunk in chunks:
                yield chunk.text

    return StreamingResponse(texts(), media_type="text/plain")
