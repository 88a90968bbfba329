"""Fields of chats that go to the chat template: honoured where it reads them, else refused by name."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Running, running

from outrider.api import load
from pairs import random_llama, word_tokenizer

_TEMPLATE = (
    "{% for message in messages %}{{ message.content }} {% endfor %}{% for one in documents or [] %}w7 {% endfor %}"
    "{% if reasoning_effort %}{{ {'low': 'w4', 'high': 'w5'}[reasoning_effort] }} {% endif %}"
    "{% if enable_thinking is false %}w6 {% endif %}{% if add_generation_prompt %}{% endif %}"
)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = _TEMPLATE
    with running(load(random_llama(), tokenizer=tokenizer)) as one:
        yield one


@pytest.mark.parametrize(
    ("fields", "more"),
    [
        ({}, [8]),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, [8, 5, 6]),
        ({"documents": [{"title": "a", "text": "b"}]}, [8, 7]),
        ({"continue_final_message": True, "add_generation_prompt": False}, [8]),
    ],
    ids=str,
)
def test_options_of_the_template(server: Running, fields: dict[str, Any], more: list[int]) -> None:
    """In a request, and where its tokens are counted."""
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w8"}]
    body = {"messages": messages, **fields}
    (expected,) = server.model.decoder.generate([[3, *more]], seed=1, max_new_tokens=8)
    with server.http() as http:
        assert http.post("/tokenize", json=body).json()["tokens"] == [3, *more]
        answer = http.post("/v1/chat/completions", json=body | {"seed": 1, "max_tokens": 8}).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == 1 + len(more)


_ONE_SYSTEM = (
    "{% if messages[1].role == 'system' %}{{ raise_exception('one system message') }}{% endif %}"
    "{% set roles = {'system': 'w9', 'user': 'w8', 'assistant': 'w7'} %}"
    "{% for m in messages %}{{ roles[m.role] }} {{ m.content }} {% endfor %}"
)


def test_messages_as_openai_takes_them() -> None:
    """Without a text, refused, and with several messages of the system for a template of one."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = _ONE_SYSTEM
    messages = [
        {"role": "developer", "content": "w1"},
        {"role": "system", "content": "w2"},
        {"role": "user", "content": []},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": "w3"},
        {"role": "assistant", "content": None, "refusal": "w4"},
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "w6"}]},
    ]
    ids = [9, 1, 2, 8, 7, 8, 3, 7, 4, 8, 5, 7, 6]
    with running(load(random_llama(), tokenizer=tokenizer)) as server, server.http() as http:
        body = {"messages": messages, "max_tokens": 1, "top_k": 1}
        assert http.post("/tokenize", json={"messages": messages}).json()["tokens"] == ids
        answer = http.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["prompt_tokens"] == len(ids)
        # Output of the assistant has its refusals in parts there.
        items = [one if one.get("content") is not None else one | {"content": one["refusal"] or ""} for one in messages]
        body = {"instructions": "w1", "input": items[1:], "max_output_tokens": 1, "top_k": 1}
        assert http.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == len(ids)
