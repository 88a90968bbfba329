"""Fields of requests: scores of prompts, the end of a text, tokens that the tokenizer adds, options of the template."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import running, words
from tokenizers import processors

from outrider.api import load
from outrider.serve import logprobs
from pairs import random_llama, word_tokenizer
from toys import random_table

CHAT: Any = [{"role": "user", "content": "w3 w7"}]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    decoder = words()
    decoder.tokenizer.chat_template = "{{ messages[0].content }}"
    with running(decoder) as server, server.http() as one:
        yield one


def test_prompts_are_scored(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = random_table(50, 0).log_softmax(dim=-1)
    body: dict[str, Any] = {"prompt": "w1 w2", "max_tokens": 0, "echo": True, "prompt_logprobs": 1}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["logprobs"] is None and "2" in choice["prompt_logprobs"][1]
    order = scores[1].argsort(descending=True).tolist()
    for token, place in ((5, order.index(5)), (order[0], 0)):
        body = {"prompt": [[1, token, 9], [4]], "max_tokens": 2, "n": 2, "temperature": 0.1, "top_k": 2}
        body |= {"prompt_logprobs": 3, "logit_bias": {"5": -9}, "logprobs": 1, "echo": True}
        choices = http.post("/v1/completions", json=body).json()["choices"]
        assert [len(choice["prompt_logprobs"]) for choice in choices] == [3, 3, 1, 1]
        assert [choice["prompt_logprobs"][0] for choice in choices] == [None] * 4
        found = choices[1]["prompt_logprobs"][1]
        ranks = {str(i): rank for rank, i in enumerate(order[:3], 1)} | {str(token): place + 1}
        assert {i: entry["rank"] for i, entry in found.items()} == ranks and next(iter(found)) == str(token)
        for i, entry in found.items():
            assert entry["decoded_token"] == f" w{i}" and entry["logprob"] == pytest.approx(float(scores[1, int(i)]))
        assert choices[0]["logprobs"]["token_logprobs"][1] == found[str(token)]["logprob"]
    answer = http.post("/v1/chat/completions", json={"messages": CHAT, "max_tokens": 1, "prompt_logprobs": 0}).json()
    first, second = answer["prompt_logprobs"]
    assert first is None and list(second) == ["7"] and second["7"]["logprob"] == pytest.approx(float(scores[3, 7]))
    monkeypatch.setattr(logprobs, "_MOST_SCORES", 24)
    for n, status in ((4, 200), (5, 400)):  # those of all choices count
        body = {"prompt": [1, 2, 3], "max_tokens": 1, "n": n, "prompt_logprobs": 1}
        assert http.post("/v1/completions", json=body).status_code == status


def test_tokens_that_the_tokenizer_adds() -> None:
    """To text unless left out, to chats if asked for; but no second one to a template's."""
    decoder = words()
    tokenizer = decoder.tokenizer
    tokenizer.add_special_tokens({"bos_token": "w5"})
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing("w5 $A", special_tokens=[("w5", 5)])
    tokenizer.chat_template = "{{ messages[0].content }}"
    with running(decoder) as server, server.http() as client:

        def num(path: str, **body: Any) -> int:
            count: int = client.post(path, json={"max_tokens": 1, **body}).json()["usage"]["prompt_tokens"]
            return count

        for given, of_text, of_chat in ((None, 3, 2), (True, 3, 3), (False, 2, 2)):
            assert num("/v1/completions", prompt="w3 w7", add_special_tokens=given) == of_text
            tokens = client.post("/tokenize", json={"prompt": "w3 w7", "add_special_tokens": given}).json()["tokens"]
            assert tokens == [5, 3, 7][-of_text:]
            assert num("/v1/completions", prompt=[3, 7], add_special_tokens=given) == 2
            assert num("/v1/chat/completions", messages=CHAT, add_special_tokens=given) == of_chat


def test_options_of_the_template() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content }} {% endfor %}{% for one in documents or [] %}w7 {% endfor %}"
        "{% if reasoning_effort %}{{ {'low': 'w4', 'high': 'w5'}[reasoning_effort] }} {% endif %}"
        "{% if enable_thinking is false %}w6 {% endif %}{% if add_generation_prompt %}{% endif %}"
    )
    messages = [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w8"}]
    options: list[tuple[dict[str, Any], list[int]]] = [
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, [8, 5, 6]),
        ({"documents": [{"title": "a", "text": "b"}]}, [8, 7]),
        ({"continue_final_message": True, "add_generation_prompt": False}, [8]),
    ]
    decoder = load(random_llama(), tokenizer=tokenizer)
    with running(decoder) as server, server.http() as client:
        for fields, more in options:
            body = {"messages": messages, **fields}
            (expected,) = decoder.generate([[3, *more]], seed=1, max_new_tokens=8)
            assert client.post("/tokenize", json=body).json()["tokens"] == [3, *more]
            answer = client.post("/v1/chat/completions", json=body | {"seed": 1, "max_tokens": 8}).json()
            assert answer["choices"][0]["message"]["content"] == expected.text
            assert answer["usage"]["prompt_tokens"] == 1 + len(more)
