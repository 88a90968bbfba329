"""Requests that are not served, and their errors; in the openai client's own exceptions where it has some."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import tool
from servers import Running, running, words

from pairs import embedded

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with running(embedded(), context_len=128, names=("fable",)) as one, one.http() as client:
        yield client


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 400
    return error


BAD_VALUES: dict[str, list[Any]] = {
    "temperature": [-1, "hot", float("inf"), 10**400],
    "top_p": [1.5],
    "min_tokens": [17, "1"],
    "stop_token_ids": [[999999], "1", [3] * 1001],
    "bad_words": [[""], "word", [[999999]], ["word"] * 1001, ["word" * 17_000], [[3] * 70_000]],
    "max_tokens": [0, 1.5],
    "logprobs": [21, True],
    "seed": [float("inf")],
    "stop": ["", 7, 0, {}, ["a"] * 17, "a" * 1001],
    "logit_bias": [[1], {"x": 1}, {"999999": 1}, {"1": "x"}, {"1": float("inf")}],
    "acceptance": ["rejection"],
    "num_draft_tokens": [5],
    "prompt": ["", None, [], [[]], [True], ["a", 1], ["a"] * 500, [10**6], [1] * 128],
    "response_format": [{"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}],
    "structured_outputs.regex": ["(a"],
    "guided_grammar": ["start: x"],
    "prompt_logprobs": [True, -1],
}


def test_refusals_name_the_field(http: httpx.Client) -> None:
    """Under the name that the client used; and by the openai client."""
    asked: list[tuple[str, dict[str, Any]]] = [
        ("repeat_penalty", {"prompt": "A", "repeat_penalty": 0}),
        ("n_predict", {"prompt": "A", "n_predict": 3, "max_tokens": 4}),
        ("grammar", {"prompt": "A", "grammar": "start: x", "regex": "a"}),
        ("prompt_logprobs", {"prompt": "A", "prompt_logprobs": 1, "stream": True}),
    ]
    for field, values in BAD_VALUES.items():
        outer, _, inner = field.partition(".")
        given = [{outer: {inner: value}} if inner else {field: value} for value in values]
        asked += [(field, {"prompt": "A", "max_tokens": 1} | one) for one in given]
    for param, body in asked:
        sent = json.dumps(body).replace("Infinity", "1e999")
        error = refused(http.post("/v1/completions", content=sent, headers=JSON))
        assert (error["type"], error["param"]) == ("invalid_request_error", param), body


def test_a_grammar_that_comes_to_its_limits_is_a_mistake_of_the_client(http: httpx.Client) -> None:
    """Although it shows only while the text is generated."""
    ambiguous = 'start: a\na: a a | /[a-z ]/ | ""'
    bias = {str(token_id): -1e6 for token_id in embedded().eos_ids}
    body = {"prompt": "A", "seed": 1, "max_tokens": 100, "guided_grammar": ambiguous, "logit_bias": bias}
    error = refused(http.post("/v1/completions", json=body))
    assert error["param"] == "guided_grammar" and "Too many items" in error["message"]
    both = {"prompt": "A", "guided_grammar": 'start: "hen"', "structured_outputs": {"grammar": 'start: "hen"'}}
    assert http.post("/v1/completions", json=both).json()["choices"][0]["text"] == "hen"
    error = refused(http.post("/v1/completions", json=both | {"guided_grammar": 'start: "fox"'}))
    assert "all constrain the output" in error["message"]


CHAT, RESPONSES, MESSAGES, RACE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/race"
ASK = {"role": "user", "content": "w1"}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "w1", "max_tokens": 2},
    CHAT: {"messages": [ASK], "max_tokens": 2},
    RESPONSES: {"input": "w1", "max_output_tokens": 2},
    MESSAGES: {"messages": [ASK], "max_tokens": 2},
    "/tokenize": {"messages": [ASK]},
    RACE: {"prompt": "w1", "max_tokens": 2, "drafter": "ngram"},
}
DEEP = {"name": "time", "arguments": "[" * 100_000}
OF_ENDPOINTS: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "messages", {"messages": [{"role": "assistant", "tool_calls": [{"function": DEEP}]}]}),
    (CHAT, "echo", {"echo": True}),
    (CHAT, "tools", {"tools": [tool(), tool()]}),
    (CHAT, "tools", {"tools": [tool(schema={"properties": {"a": {"type": "nothing"}}}, strict=True)]}),
    (CHAT, "tool_choice", {"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "time"}}}),
    (CHAT, "guided_regex", {"tools": [tool()], "guided_regex": "a+", "tool_choice": "required"}),
    (CHAT, "stop", {"tools": [tool()], "tool_choice": "required", "stop": "a"}),
    (CHAT, "chat_template_kwargs", {"chat_template_kwargs": {"flavour": "sweet"}}),
    (CHAT, "reasoning_effort", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
    (CHAT, "add_generation_prompt", {"continue_final_message": True, "add_generation_prompt": True}),
    (RACE, "drafter", {"drafter": "another"}),
    (RESPONSES, "store", {"store": True}),
    (RESPONSES, "input", {"input": "Hm" * 2000}),
    (RESPONSES, "input", {"input": [{"type": "function_call"} | DEEP]}),
    (RESPONSES, "text.format", {"text": {"format": {"type": "json_schema", "schema": {"pattern": 5}}}}),
    (RESPONSES, "reasoning.effort", {"reasoning": {"effort": "high"}}),
    (MESSAGES, "messages[0].content[0]", {"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}),
    (MESSAGES, "system", {"system": [{"type": "image", "source": {"type": "url", "url": "https://a.b/c"}}]}),
    (MESSAGES, "thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (MESSAGES, "output_config.effort", {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}),
    (MESSAGES, "output_config.format", {"output_config": {"format": {"type": "json_object"}}}),
]


def test_refusals_name_the_field_of_each_endpoint(server: Running) -> None:
    """As it is called there, in the message too."""
    of_chats = ("messages", "max_completion_tokens", "response_format", "reasoning_effort", "chat_template_kwargs")
    with server.http() as http:
        for path, param, body in OF_ENDPOINTS:
            error = refused(http.post(path, json=ASKED[path] | body))
            assert (error["type"], error["param"]) == ("invalid_request_error", param), (path, body)
            assert path != RESPONSES or not error["message"].startswith(of_chats)


def test_fields_that_may_change_the_text_are_refused(http: httpx.Client) -> None:
    body, neutral = {"prompt": "A", "max_tokens": 1}, {}
    for field, changes, idle in (
        ("typical_p", 0.9, 1.0),
        ("xtc_probability", 0.1, 0.0),
        ("suppress_tokens", [5], []),
        ("lora_request", {"lora_name": "x"}, None),
        ("enable_thinking", False, None),
        ("repeat_last_n", 64, -1),
        ("do_sample", False, True),
        ("suffix", "end", ""),
        ("thinking_token_budget", 0, -1),
        ("samplers", [], None),
        ("flavour", "sweet", None),
        ("messages", [{"role": "user", "content": "x"}], None),
    ):
        assert refused(http.post("/v1/completions", json=body | {field: changes}))["param"] == field
        neutral[field] = idle
    neutral |= {"user": "me", "metadata": {"a": "b"}, "store": True, "cache_prompt": True, "priority": -3}
    neutral |= {"response_format": None, "best_of": 1, "tools": [], "stream_options": {"include_usage": None}}
    assert http.post("/v1/completions", json=body | neutral).status_code == 200


def test_server_refuses_bad_requests(http: httpx.Client) -> None:
    """Errors do not repeat the request, whatever its length."""
    path = "/v1/completions"
    assert refused(http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    assert "are not served" in refused(http.post("/v1/embeddings", json={"input": "A"}), 404)["message"]
    response = http.get(path)
    refused(response, 405)
    assert response.headers["allow"] == "POST"
    refused(http.post(path, content=b'{"prompt": "A"}', headers={"content-type": "text/plain"}), 415)
    error = refused(http.post(path, json={"prompt": "A", "model": "gpt"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found" and "fable" in error["message"]
    for other in ("/tokenize", "/detokenize", "/v1/race"):
        refused(http.post(other, json={"prompt": "A", "model": "gpt"}), 404)
    for body in ({"prompt": [1]}, {"prompt": "A", "add_special_tokens": 1}, {"prompt": "A", "model": 7}):
        refused(http.post("/tokenize", json=body))
    refused(http.post("/detokenize", json={"tokens": [10**9]}))
    refused(http.post(path, json={"prompt": "A" * 5_000_000}), 413)
    half = b'{"prompt": "a \\ud800 b"}'  # a character
    for content in (b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, half):
        refused(http.post(path, content=content, headers=JSON))
    endless = '{"input": "Hm", "metadata": {"a": 1e999}}'  # which JSON cannot repeat in the response
    assert refused(http.post("/v1/responses", content=endless, headers=JSON))["param"] == "metadata"
    for more in ({"model": "m" * 10**6}, {"temperature": "t" * 10**6}, {"x" * 10**6: 1}):
        assert len(http.post(path, json={"prompt": "A"} | more).content) < 1000


def test_server_checks_api_keys() -> None:
    with running(words(), api_keys=("secret",), names=("toy",)) as server, server.http() as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/v1/race/choices", "/page/other.js"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
                assert refused(http.get(path, headers=headers), 401)["code"] == "invalid_api_key"
        for path in ("/health", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        assert "script-src 'self'" in http.get("/").headers["content-security-policy"]
        with server.openai() as client:
            assert client.completions.create(model="toy", prompt="w1", max_tokens=1).choices
        with server.openai().with_options(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_other_names_of_this_machine(http: httpx.Client) -> None:
    for host in ("example.org", "example.org:8000", "localhost.example.org", "10.0.0.1", "[", "[::1", "@", ""):
        error = refused(http.get("/v1/models", headers={"host": host}), 403)
        assert error["type"] == "permission_error" and "--api-key" in error["message"]
    for host in ("localhost", "localhost:8000", "localhost.", "127.0.0.1", "127.0.0.2:8000", "[::1]:8000"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200
    # No other site may read answers.
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for response in (http.options("/v1/completions", headers=headers), http.get("/v1/models", headers=headers)):
        assert not any(name.startswith("access-control") for name in response.headers)


def test_server_answers_any_body() -> None:
    decoder = words(context_len=40)
    decoder.tokenizer.chat_template = "w1"
    names = (
        "prompt messages model max_tokens temperature top_p top_k n stop seed logit_bias logprobs top_logprobs echo "
        "stream stream_options draft num_draft_tokens tools response_format input system text reasoning instructions "
        "tool_choice thinking"
    )
    leaves = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | st.text(max_size=8)
    lists = st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    )
    bodies = st.dictionaries(st.sampled_from(names.split()), lists, max_size=6)
    with running(decoder) as server, server.http() as http:

        @settings(max_examples=200)
        @given(st.sampled_from([*ASKED]), st.booleans(), bodies | st.binary(max_size=30))
        def check(path: str, has_prompt: bool, body: dict[str, Any] | bytes) -> None:
            sent = json.dumps((ASKED[path] if has_prompt else {}) | body) if isinstance(body, dict) else body
            response = http.post(path, content=sent, headers=JSON)
            if response.status_code != 200:
                refused(response, 404 if response.status_code == 404 else 400)

        check()
        for path, body in ASKED.items():
            assert http.post(path, json=body).status_code == 200
        assert server.num_open == 0 and server.metric("outrider:num_free_slots") == 4
