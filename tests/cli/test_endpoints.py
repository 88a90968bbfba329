"""Samples from servers, as they answer, cut to the fields that matter: llama.cpp's of xllamacpp 2026.10.11549,
llama-cpp-python 0.3.36, Transformers 5.24; vLLM's follows its vllm/entrypoints/openai/completion/protocol.py."""

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest

from outrider.errors import OptionError, WorkerError
from outrider.offline import endpoints
from outrider.offline.endpoints import Endpoint, samples
from outrider.options import Sampling
from outrider.text.chat import Chat, ChatOptions
from pairs import byte_level_tokenizer, metaspace_tokenizer

Handler = Callable[[httpx.Request], httpx.Response]
Answer = Callable[[dict[str, Any]], Any]
USAGE = {"completion_tokens": 3, "prompt_tokens": 2, "total_tokens": 5}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Handler], None]:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    client = httpx.Client
    return lambda handler: monkeypatch.setattr(
        endpoints.httpx, "Client", partial(client, transport=httpx.MockTransport(handler))
    )


def _handler(owner: str, sent: list[dict[str, Any]], answer: Answer, **listed: Any) -> Handler:
    """A server that lists one model, with these fields, keeps the bodies of requests, and answers them."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "m", "owned_by": owner} | listed]})
        sent.append(json.loads(request.content) | {"path": request.url.path})
        found = answer(sent[-1])
        return found if isinstance(found, httpx.Response) else httpx.Response(200, json=found)

    return handle


def _completion(finish: str = "length", *, logprobs: Any = None, **more: Any) -> dict[str, Any]:
    choice = {"text": " dreamed this,", "index": 0, "logprobs": logprobs, "finish_reason": finish}
    return {"choices": [choice | more.pop("choice", {})], "object": "text_completion", "usage": USAGE, **more}


def _open(url: str = "http://m", prompt: str | Chat = "The king", **more: Any) -> Endpoint:
    options = {"model": None, "engine": "auto", "sampling": Sampling(temperature=0.7, max_new_tokens=3)}
    return Endpoint.open(url, prompt=prompt, **options | {"tokenizer": byte_level_tokenizer(["nt"])} | more)


def test_each_server_is_asked_in_its_own_words(serve: Callable[[Handler], None]) -> None:
    ids = [4040, 440, 12]
    llama_cpp = _completion(__verbose={"content": " dreamed this,", "tokens": ids, "stop_type": "limit"})
    vllm = _completion("stop", choice={"token_ids": [4040, 440, 0], "prompt_token_ids": [1, 2]})
    own = _completion(logprobs={"tokens": [f"token_id:{one}" for one in ids], "token_logprobs": [-1.0] * 3})
    for owner, engine, answer, token_ids, num_tokens, sends in (
        ("llamacpp", "llama.cpp", llama_cpp, ids, 3, {"top_k": 0, "min_p": 0.0, "return_tokens": True}),
        ("vllm", "vllm", vllm, [4040, 440, 0], 2, {"top_k": 0, "min_p": 0.0, "return_token_ids": True}),
        ("outrider", "outrider", own, ids, 3, {"return_tokens_as_token_ids": True, "logprobs": 1}),
        ("me", "llama-cpp-python", _completion("stop"), None, 3, {"top_k": 0, "repeat_penalty": 1.0}),
        ("someone", "openai", _completion("stop"), None, 2, {"top_p": 1.0, "logprobs": 1}),
    ):
        sent: list[dict[str, Any]] = []
        serve(_handler(owner, sent, lambda body, answer=answer: answer))
        one = _open("http://m/v1/")
        assert one.engine == engine and one.model == "m" and sent[0]["max_tokens"] == 1
        found = one.sample("The king", seed=7)
        assert found.get("token_ids") == token_ids and found["text"] == " dreamed this,"
        assert found["num_tokens"] == num_tokens and found["num_prompt_tokens"] == 2 and found["seed"] == 7
        assert found["has_ended"] is (answer["choices"][0]["finish_reason"] == "stop")
        wanted = {"prompt": "The king", "temperature": 0.7, "max_tokens": 3, "seed": 7, "path": "/v1/completions"}
        assert sent[1].items() >= (wanted | sends).items()
    sent = []  # Transformers takes its options as JSON
    serve(_handler("", sent, lambda body: _completion("stop"), created=0, status={"value": "loaded"}))
    assert "token_ids" not in _open().sample("a", seed=1)
    config = json.loads(sent[1]["generation_config"])
    assert config["do_sample"] is True and config["temperature"] == 0.7 and config["top_k"] == 0
    _open(sampling=Sampling(temperature=0.0))
    assert json.loads(sent[2]["generation_config"]) == {"do_sample": False} and "logprobs" not in sent[2]


def test_tokens_as_text_become_ids_where_the_spelling_is_one_tokens_own(serve: Callable[[Handler], None]) -> None:
    tokenizer = byte_level_tokenizer(["nt"])
    spelt = _completion(logprobs={"tokens": ["w", "e", "nt"], "token_logprobs": [-1.0] * 3})
    serve(_handler("someone", [], lambda body: spelt))
    assert _open().sample("a", seed=1)["token_ids"] == tokenizer.convert_tokens_to_ids(["w", "e", "nt"])
    # Bytes, and text that is a part of a character; another tokenizer drops the space of a first token.
    parts = [{"token": "w", "bytes": [119]}, {"token": "\ufffd", "bytes": None}]
    for logprobs in ({"content": parts[:1]}, {"content": parts}):
        serve(_handler("someone", [], lambda body, given=logprobs: _completion(logprobs=given) | {"usage": {}}))
        assert ("token_ids" in _open().sample("a", seed=1)) is (len(logprobs["content"]) == 1)
    assert "token_ids" not in _open(tokenizer=metaspace_tokenizer()).sample("a", seed=1)


def test_endpoints_receive_chats(serve: Callable[[Handler], None]) -> None:
    content = [{"id": 5, "token": "w", "bytes": [119], "logprob": -1.0}]
    choice = {"message": {"content": "w"}, "finish_reason": "stop", "logprobs": {"content": content}}
    sent: list[dict[str, Any]] = []
    serve(_handler("someone", sent, lambda body: {"choices": [choice]}))
    chat = Chat([{"role": "user", "content": "Hi"}], ChatOptions(system="Be brief."))
    assert _open(prompt=chat).sample(chat, seed=1)["token_ids"] == [5]
    assert sent[0]["path"] == "/v1/chat/completions" and sent[0]["logprobs"] is True
    assert [one["role"] for one in sent[0]["messages"]] == ["system", "user"]
    content[:] = [{"token": "token_id:6", "bytes": [119], "logprob": -1.0}]  # our own, whose bytes do not matter
    usage = {"completion_tokens": 1}
    serve(_handler("outrider", sent, lambda body: {"choices": [choice], "usage": usage}))
    one = _open(prompt=chat)
    for num_tokens, finish, is_whole in ((2, "stop", True), (2, "length", False), (3, "stop", False)):
        usage["completion_tokens"], choice["finish_reason"] = num_tokens, finish
        assert ("token_ids" in one.sample(chat, seed=1)) is is_whole
    with pytest.raises(OptionError, match="no token ids of whole answers"):  # a thought is apart
        _open(prompt=chat)


def test_errors_say_what_to_do(serve: Callable[[Handler], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def guard(request: httpx.Request) -> httpx.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        return httpx.Response(401, json={"error": {"message": "wrong key"}})

    def gone(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused")

    two = httpx.Response(200, json={"data": [{"id": "a"}, {"id": "b"}]})
    any_one = _handler("someone", [], lambda body: _completion())
    for handler, more, kind, message in (
        (guard, {}, WorkerError, "answers 401: wrong key: set the environment variable OPENAI_API_KEY"),
        (gone, {}, OptionError, "no server answers there .Connection refused"),
        (lambda request: two, {}, OptionError, "the server has several: a, b"),
        (any_one, {"sampling": Sampling(logit_bias={3: 1.0})}, OptionError, "--logit-bias .* has no field"),
    ):
        serve(handler)
        with pytest.raises(kind, match=message):
            _open(**more)


def test_a_busy_server_is_asked_again_and_a_lost_one_given_up(serve: Callable[[Handler], None]) -> None:
    tries: list[int] = []

    def answer(body: dict[str, Any]) -> Any:
        if body["max_tokens"] == 1:
            return _completion()
        tries.append(body["seed"])
        if body["seed"] == 9:
            raise httpx.ReadError("gone")
        return _completion() if tries.count(body["seed"]) > 2 else httpx.Response(503, headers={"Retry-After": "2"})

    serve(_handler("vllm", [], answer))
    one = _open()
    found = dict(samples(one, ((index, "a", index) for index in range(5)), 2, 1000.0))
    assert sorted(found) == list(range(5)) and len(tries) == 15
    with pytest.raises(WorkerError, match="does not answer .gone.: the samples so far are kept"):
        dict(samples(one, [(0, "a", 9)], 1, None))
