"""Fields of vLLM: which tokens may be generated, which have text, and how much of a prompt is kept."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from scripted import MARKERS, TEMPLATES, scripted
from servers import running, words


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running(words()) as server, server.http() as one:
        yield one


def test_only_some_tokens_are_allowed(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": [1], "max_tokens": 30, "temperature": 2, "allowed_token_ids": [3, 7]}
    texts = [http.post("/v1/completions", json=body | {"seed": seed}).json()["choices"][0]["text"] for seed in range(2)]
    assert {word for text in texts for word in text.split()} == {"w3", "w7"}
    text = http.post("/v1/completions", json=body | {"logit_bias": {"7": -100, "9": 100}}).json()["choices"][0]["text"]
    assert {*text.split()} == {"w3"}


def test_the_last_prompt_tokens_are_kept(http: httpx.Client) -> None:
    for most, kept in [(2, [8, 9]), (50, list(range(60))[-50:]), (-1, list(range(60))[-59:])]:
        prompt = [*range(10)] if most == 2 else [i % 50 for i in range(60)]
        body = {"prompt": prompt, "max_tokens": 5, "seed": 1, "truncate_prompt_tokens": most}
        answer = http.post("/v1/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == len(kept)
    body = {"prompt": "w1 w2 w3", "max_tokens": 1000, "temperature": 0, "echo": True}
    for most, start in [(-1, "w3"), (2, "w2 w3"), (10, "w1 w2 w3")]:
        choice = http.post("/v1/completions", json=body | {"truncate_prompt_tokens": most}).json()["choices"][0]
        assert choice["text"].split()[: len(start.split())] == start.split()
    same = http.post("/v1/completions", json={"prompt": [8, 9], "max_tokens": 5, "seed": 1}).json()
    body = {"prompt": [*range(10)], "max_tokens": 5, "seed": 1, "truncate_prompt_tokens": 2}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == same["choices"][0]["text"]


@pytest.mark.parametrize(
    "body",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [50]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": "w1"},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"truncate_prompt_tokens": 64},
        {"skip_special_tokens": 1},
    ],
)
def test_the_field_is_named(http: httpx.Client, body: dict[str, Any]) -> None:
    response = http.post("/v1/completions", json={"prompt": [1], "max_tokens": 1} | body)
    assert response.status_code == 400 and response.json()["error"]["param"] == next(iter(body))


def test_allowed_tokens_hide_no_invalid_bias(http: httpx.Client) -> None:
    for bias in ({"50": 1}, {"9": "a"}):
        body = {"prompt": [1], "max_tokens": 1, "allowed_token_ids": [3], "logit_bias": bias}
        answer = http.post("/v1/completions", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "logit_bias"


def test_special_tokens_may_have_text() -> None:
    decoder = scripted(["Yes", "[TOOL_CALLS]", "no"], TEMPLATES["mistral"], MARKERS["mistral"])
    with running(decoder) as server, server.http() as client:
        for skips, text in [(True, "Yesno"), (False, "Yes[TOOL_CALLS]no")]:
            answer = client.post("/v1/completions", json={"prompt": "a", "skip_special_tokens": skips})
            assert answer.json()["choices"][0]["text"] == text
