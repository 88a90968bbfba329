"""Requests that are not served, and their errors; in the openai client's own exceptions where it has some."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from servers import Running, running, words

from outrider.serve.fields import check_names
from outrider.serve.http_errors import Refusal
from outrider.serve.protocol import ParsedRequest, parse_body, parse_chat, parse_completions
from pairs import embedded, word_tokenizer

_NUM_MALFORMED = 300
INFINITY = float("inf")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(embedded(), context_len=128, names=("fable",)) as one:
        yield one


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a response with this status."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert 0 < len(error["message"]) <= 400
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", INFINITY),
        ("repetition_penalty", INFINITY),
        ("logit_bias", {"1": INFINITY}),
        ("n", INFINITY),
        ("seed", INFINITY),
        ("top_p", 0),
        ("top_p", 1.5),
        ("min_p", 2),
        ("top_k", -2),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("frequency_penalty", "much"),
        ("min_tokens", -1),
        ("min_tokens", 17),
        pytest.param("temperature", 10**400, id="beyond floats"),
        ("min_tokens", "1"),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [999999]),
        ("stop_token_ids", "1"),
        ("bad_words", [""]),
        ("bad_words", "word"),
        ("bad_words", [[999999]]),
        ("bad_words", ["word"] * 1001),
        ("processor", "word"),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["a"]),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("n", 0),
        ("n", 17),
        ("best_of", 2),
        ("logprobs", 21),
        ("logprobs", True),
        ("seed", "1"),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", 7),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1001),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999999": 1}),
        ("logit_bias", {"1": "x"}),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", True),
        ("stream_options", []),
        ("echo", 0),
        ("ignore_eos", "no"),
        ("model", 7),
        ("acceptance", "rejection"),
        ("acceptance", "none"),
        ("num_draft_tokens", 5),
        ("num_draft_tokens", -1),
        ("draft", "ngram"),
        ("prompt", ""),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", {}),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", ["a", 1]),
        ("prompt", ["a"] * 500),
        ("prompt", [-1]),
        ("prompt", [10**6]),
        ("prompt", [1] * 128),
        ("suffix", "end"),
        ("use_beam_search", True),
        ("response_format", {"type": "structural_tag"}),
        ("response_format", "json"),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_object", "schema": [1]}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}),
        ("structured_outputs", [1]),
        ("structured_outputs.regex", "(a"),
        ("structured_outputs.choice", []),
        ("structured_outputs.structural_tag", "x"),
        ("guided_json", "{"),
        ("guided_regex", "(a"),
        ("guided_choice", [1]),
        ("guided_grammar", "start: x"),
        ("guided_grammar", "start: T\nT: " + " & ".join(f"/.*a{i}.*b{i}.*/" for i in range(30))),
        ("guided_choice", ["\ud800"]),
        ("guided_regex", "a" * 300_000),
        ("prompt_logprobs", 21),
        ("tools", [{}]),
    ],
)
def test_the_field_is_named(http: httpx.Client, field: str, value: object) -> None:
    outer, _, inner = field.partition(".")
    given = {outer: {inner: value}} if inner else {field: value}
    body = json.dumps({"prompt": "A", "max_tokens": 1} | given).replace("Infinity", "1e999")
    error = refused(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field


def test_a_grammar_that_comes_to_its_limits(http: httpx.Client) -> None:
    """Is a mistake of the client, although it shows only while the text is generated."""
    ambiguous = 'start: a\na: a a | /[a-z ]/ | ""'
    bias = {str(token_id): -1e6 for token_id in embedded().eos_ids}
    body = {"prompt": "A", "seed": 1, "max_tokens": 100, "guided_grammar": ambiguous, "logit_bias": bias}
    error = refused(http.post("/v1/completions", json=body))
    assert error["param"] == "guided_grammar" and "Too many items" in error["message"]


def test_thousands_of_choices(http: httpx.Client) -> None:
    labels = [f"label number {i * 7919} of {i}" for i in range(3000)]
    body = {"prompt": "A", "seed": 1, "max_tokens": 100, "guided_choice": labels}
    answer = http.post("/v1/completions", json=body).raise_for_status().json()
    assert answer["choices"][0]["text"] in labels


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", None, "messages"),
        ("messages", "Hello", "messages"),
        ("messages", [], "messages"),
        ("messages", [1], "messages[0]"),
        ("messages", [{"content": "x"}], "messages[0]"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ("top_logprobs", 1, "top_logprobs"),
        ("logprobs", 2, "logprobs"),
        ("tool_choice", "required", "tool_choice"),
        ("echo", True, "echo"),
    ],
)
def test_the_field_of_a_chat_is_named(http: httpx.Client, field: str, value: object, param: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    error = refused(http.post("/v1/chat/completions", json=body))
    assert error["param"] in (param, param.partition(".")[0])


def test_a_model_without_a_chat_template(http: httpx.Client) -> None:
    error = refused(http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}))
    assert "no chat template" in error["message"]


@pytest.mark.parametrize(
    "fields", [{"content": "w1", "name": 5}, {"content": "\ud800"}, {"content": "\ud800", "name": "x"}]
)
def test_messages_that_a_template_does_not_take(fields: dict[str, Any]) -> None:
    """Whatever its error is, and half characters in its text and in its error."""
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        "{% for one in messages %}{% if one.name %}{{ raise_exception(one.name + one.content) }}{% endif %}"
        "{{ one.content }}{% endfor %}"
    )
    with running(replace(words(), tokenizer=tokenizer)) as server, server.http() as http:
        body = json.dumps({"messages": [{"role": "user", **fields}]})
        response = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert refused(response)["param"] == "messages"


@pytest.mark.parametrize("value", [None, {"type": "text"}])
def test_fields_that_ask_for_nothing(http: httpx.Client, value: object) -> None:
    body = {"prompt": "A", "max_tokens": 1, "response_format": value, "suffix": None, "best_of": 1, "tools": []}
    assert http.post("/v1/completions", json=body).status_code == 200


_OF_OTHER_SERVERS = {  # values that would change the text, and values that ask for nothing
    "typical_p": (0.9, 1.0),
    "mirostat": (2, 0),
    "dry_multiplier": (0.8, 0),
    "xtc_probability": (0.1, 0.0),
    "no_repeat_ngram_size": (3, 0),
    "suppress_tokens": ([5], []),
    "guidance_scale": (1.5, 1),
    "num_beams": (4, 1),
    "lora_request": ({"lora_name": "x"}, None),
    "enable_thinking": (False, None),
    "stop_regex": ("a+", None),
    "repeat_last_n": (64, -1),
    "do_sample": (False, True),
    "return_token_ids": (True, False),
    "flavour": ("sweet", None),
    "messages": ([{"role": "user", "content": "x"}], None),
}


@pytest.mark.parametrize("field", _OF_OTHER_SERVERS)
def test_a_field_that_may_change_the_text_is_refused(http: httpx.Client, field: str) -> None:
    changes, neutral = _OF_OTHER_SERVERS[field]
    body = {"prompt": "A", "max_tokens": 1}
    assert refused(http.post("/v1/completions", json=body | {field: changes}))["param"] == field
    assert http.post("/v1/completions", json=body | {field: neutral}).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": 0}, "stop"),
        ({"stop": False}, "stop"),
        ({"stop": {}}, "stop"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"n_predict": -1}, "n_predict"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_new_tokens": 17}, "min_new_tokens"),
        ({"n_predict": 3, "max_tokens": 4}, "n_predict"),
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "root = a"}, "ebnf"),
        ({"json_schema": "{"}, "json_schema"),
        ({"grammar": "start: x", "regex": "a"}, "grammar"),
        ({"priority": "high"}, "priority"),
    ],
    ids=str,
)
def test_the_name_that_the_client_used(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    assert refused(http.post("/v1/completions", json={"prompt": "A"} | fields))["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_fields_of_tokenizing(http: httpx.Client, path: str) -> None:
    body = {"prompt": "A"} if path == "/tokenize" else {"tokens": [1]}
    assert http.post(path, json=body).status_code == 200
    assert refused(http.post(path, json=body | {"chat_template": "x"}))["param"] == "chat_template"


def test_the_fields_of_openai_are_known() -> None:
    """Each is served, refused with a reason of its own, or without effect."""
    for kind, types in (("completions", completion_create_params), ("chat", chat_create_params)):
        for name in types.CompletionCreateParamsBase.__annotations__:
            try:
                check_names({name: "some value"}, kind)
            except Refusal as refusal:
                assert refusal.param == name and "not supported" in str(refusal)


def test_fields_without_effect(http: httpx.Client) -> None:
    more = {"user": "me", "metadata": {"a": "b"}, "store": True, "cache_prompt": True, "priority": -3}
    assert http.post("/v1/completions", json={"prompt": "A", "max_tokens": 1} | more).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", b'{"prompt": NaN}', b"[" * 100_000, b'"x"'])
def test_bodies_that_are_no_object(http: httpx.Client, body: bytes) -> None:
    refused(http.post("/v1/completions", content=body, headers={"content-type": "application/json"}))


def test_other_refusals(http: httpx.Client) -> None:
    assert refused(http.get("/v1/nothing"), 404)["type"] == "NotFoundError"
    response = http.get("/v1/completions")
    refused(response, 405)
    assert response.headers["allow"] == "POST"
    refused(http.post("/tokenize", json={"prompt": "A", "add_special_tokens": 1}))
    refused(http.post("/v1/completions", content=b'{"prompt": "A"}', headers={"content-type": "text/plain"}), 415)
    error = refused(http.post("/v1/completions", json={"prompt": "A", "model": "gpt"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found" and "fable" in error["message"]
    refused(http.get("/v1/models/gpt"), 404)
    for path in ("/tokenize", "/detokenize", "/v1/race"):
        refused(http.post(path, json={"prompt": "A", "model": "gpt"}), 404)
    for path in ("/tokenizer_info", "/v1/race/choices"):
        refused(http.get(path, params={"model": "gpt"}), 404)
    assert refused(http.post("/tokenize", json={"prompt": "A", "model": 7}))["param"] == "model"
    half = b'{"prompt": "a \\ud800 b"}'
    error = refused(http.post("/v1/completions", content=half, headers={"content-type": "application/json"}))
    assert error["param"] == "prompt"
    refused(http.post("/tokenize", json={"prompt": [1]}))
    refused(http.post("/detokenize", json={"tokens": [10**9]}))
    refused(http.post("/detokenize", json={}))
    too_long = {"prompt": "A" * 5_000_000}
    refused(http.post("/v1/completions", json=too_long), 413)


def test_errors_do_not_echo_the_request(http: httpx.Client) -> None:
    for body in ({"prompt": "A", "model": "m" * 10**6}, {"prompt": "A", "temperature": "t" * 10**6}):
        assert len(http.post("/v1/completions", json=body).content) < 1000
    error = refused(http.post("/v1/completions", json={"prompt": "A", "x" * 10**6: 1}))
    assert len(error["param"]) <= 400


def test_a_name_may_have_half_a_character(http: httpx.Client) -> None:
    """Which UTF-8 cannot repeat."""
    chat, text = b'"messages": [{"role": "user", "content": "A"}]', b'"prompt": "A"'
    for path, prompt in (("/v1/completions", text), ("/v1/chat/completions", chat), ("/tokenize", text)):
        body = b'{%s, "\\ud800": 1}' % prompt
        error = refused(http.post(path, content=body, headers={"content-type": "application/json"}))
        assert error["param"] == "\\ud800"


def test_what_the_openai_client_makes_of_them(server: Running) -> None:
    with server.openai() as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.completions.create(model="fable", prompt="A", temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="A")


def test_keys() -> None:
    with running(words(), api_keys=("secret",), names=("toy",)) as server, server.http() as http:
        for path in ("/v1/models", "/v1/completions", "/tokenize", "/nothing"):
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
                response = http.get(path, headers=headers)
                assert refused(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/metrics", "/version"):
            assert http.get(path).status_code == 200
        with server.openai() as client:
            assert client.completions.create(model="toy", prompt="w1", max_tokens=1).choices
        with server.openai().with_options(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_other_names_of_this_machine(http: httpx.Client) -> None:
    """Those that a page of another site may have made up."""
    for host in ("example.org", "example.org:8000", "localhost.example.org", "10.0.0.1", "[", "[::1", "@", ""):
        refused(http.get("/v1/models", headers={"host": host}), 403)
    for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200


def test_no_other_site_may_read_answers(http: httpx.Client) -> None:
    headers = {"origin": "https://example.org", "access-control-request-method": "POST"}
    for response in (http.options("/v1/completions", headers=headers), http.get("/v1/models", headers=headers)):
        assert not any(name.startswith("access-control") for name in response.headers)


# Malformed bodies

_NAMES = st.sampled_from(
    "prompt messages model max_tokens temperature top_p top_k min_p n stop seed logit_bias logprobs top_logprobs echo "
    "stream stream_options draft num_draft_tokens acceptance tools suffix response_format user".split()
)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_BODIES = st.dictionaries(_NAMES | st.text(max_size=5), _VALUES, max_size=6)


def _with_prompt(body: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "w1", "max_tokens": 2} | body


@settings(max_examples=_NUM_MALFORMED)
@given(_BODIES | _BODIES.map(_with_prompt))
def test_any_object_is_understood_or_refused(body: dict[str, Any]) -> None:
    for parse in (parse_completions, parse_chat):
        try:
            assert isinstance(parse(parse_body(json.dumps(body).encode())), ParsedRequest)
        except Refusal as refusal:
            assert refusal.status == 400
            json.dumps(refusal.to_json())


def test_any_body_is_answered() -> None:
    """Over HTTP: never a fault of ours, and the server is as good as before."""
    seen = set()
    with running(words(context_len=40)) as server, server.http() as http:

        @settings(max_examples=_NUM_MALFORMED)
        @given(
            (_BODIES.map(_with_prompt) | _BODIES).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=30)
        )
        def check(body: bytes) -> None:
            response = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400, 404), (body, response.text)
            if response.status_code != 200:
                refused(response, response.status_code)
            seen.add(response.status_code)

        check()
        assert seen >= {200, 400}
        assert http.get("/health").status_code == 200
        assert server.num_open == 0
        assert server.metric("outrider:num_free_slots") == 4
