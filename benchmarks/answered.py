"""Checks of a server's answers: a text has its tokens and one end; an error has a status, OpenAI's form, and the field
where one is wrong; nobody gets both."""

from __future__ import annotations

import json
from typing import Any

import httpx


class Wrong(Exception):
    """An answer that should have been another."""


def text(response: httpx.Response, num_tokens: int) -> list[dict[str, Any]]:
    """The choices of an answer."""
    if response.status_code != 200:
        raise Wrong(f"{response.status_code}: {response.text}")
    answer = response.json()
    if answer["usage"]["completion_tokens"] != num_tokens or "error" in answer:
        raise Wrong(f"{num_tokens} tokens were asked for: {response.text}")
    if any(choice["finish_reason"] != "length" for choice in answer["choices"]):
        raise Wrong(f"no end: {response.text}")
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], num_tokens: int) -> list[dict[str, Any]]:
    """The choice of a streamed answer, as if it were whole."""
    async with http.stream("POST", "/v1/completions", json=body) as response:
        await response.aread()
    blocks = [block for block in response.text.split("\n\n") if block and not block.startswith(":")]
    if response.status_code != 200 or blocks.pop() != "data: [DONE]":
        raise Wrong(f"no end of the stream: {response.text}")
    *chunks, last = (json.loads(block.removeprefix("data: ")) for block in blocks)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    if reasons != [None] * (len(reasons) - 1) + ["length"] or last["usage"]["completion_tokens"] != num_tokens:
        raise Wrong(response.text)
    choices = [chunk["choices"][0] for chunk in chunks]
    return [choices[-1] | {"text": "".join(choice["text"] for choice in choices)}]


def refused(response: httpx.Response, status: int, param: str | None = None) -> int:
    if response.status_code != status:
        raise Wrong(f"{response.status_code} in place of {status}: {response.text}")
    error = response.json()["error"]
    if not error["message"] or (param is not None and error["param"] != param):
        raise Wrong(f"an error that does not tell: {response.text}")
    return status
