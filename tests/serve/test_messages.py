"""Anthropic's ``/v1/messages``: text, thoughts, calls, images and errors, whole and streamed."""

import json
from collections.abc import Mapping
from typing import Any

from scripted import WEATHER, scripted
from servers import Running, running, words

URL = "/v1/messages"
TOOL = {"name": "weather", "description": "Tells something.", "input_schema": WEATHER}
ASK = {"role": "user", "content": "Rome?"}


def send(server: Running, path: str = URL, headers: Mapping[str, str] | None = None, **body: Any) -> dict[str, Any]:
    with server.http() as http:
        response = http.post(path, json={"model": "toy", "max_tokens": 200, "seed": 1} | body, headers=headers)
        return {"status": response.status_code, **response.json()}


def streamed(server: Running, **body: Any) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Blocks of the message that a client puts together, and its end."""
    body = {"model": "toy", "max_tokens": 200, "seed": 1, "stream": True} | body
    with server.http() as http:
        lines = http.post(URL, json=body).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [f"event: {event['type']}" for event in events] == [line for line in lines if line.startswith("event: ")]
    begin, *others, ending, end = events
    assert (begin["type"], ending["type"], end["type"]) == ("message_start", "message_delta", "message_stop")
    assert begin["message"]["content"] == [] and begin["message"]["stop_reason"] is None
    found: list[tuple[str, Any]] = []
    for event in others:
        assert event["index"] == len(found) - (event["type"] != "content_block_start")
        if event["type"] == "content_block_start":
            found.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            found[-1] = found[-1][0], found[-1][1] + text
    assert sum(event["type"] == "content_block_stop" for event in others) == len(found)
    return [(kind, json.loads(text) if kind == "tool_use" else text) for kind, text in found], ending["delta"]


def blocks(message: dict[str, Any]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """The same of a message in one piece."""
    keys = {"tool_use": "input"}
    found = [(one["type"], one[keys.get(one["type"], one["type"])]) for one in message["content"]]
    return found, {key: message[key] for key in ("stop_reason", "stop_sequence")}


def test_a_call_and_its_result(server: Running) -> None:
    """Whole and streamed, equal to what a chat says."""
    body = {"messages": [ASK], "tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = send(server, **body)
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", "toy")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("tool_use", None)
    (call,) = whole["content"]
    assert (call["type"], call["name"], sorted(call["input"])) == ("tool_use", "weather", ["city", "days"])
    assert streamed(server, **body) == blocks(whole)
    function = {"name": "weather", "description": "Tells something.", "parameters": WEATHER}
    chat = {"messages": [ASK], "tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    same = send(server, "/v1/chat/completions", **chat, parallel_tool_calls=False)
    (said,) = same["choices"][0]["message"]["tool_calls"]
    assert json.loads(said["function"]["arguments"]) == call["input"]
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == same["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == same["usage"]["completion_tokens"]
    assert send(server, messages=[ASK], tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})["content"]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sun"}]}
    history = [ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    chat_history = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [said | {"id": call["id"]}]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sun"},
    ]
    answer = send(server, messages=history, max_tokens=20)
    want = send(server, "/v1/chat/completions", messages=chat_history, max_tokens=20)
    assert answer["content"][0]["text"] == want["choices"][0]["message"]["content"]
    assert answer["stop_reason"] == "max_tokens"


def test_thoughts_and_ends() -> None:
    markers = {"<think>": False, "</think>": False}
    said = scripted(["<think>", "hm", "</think>", "sun", " today"], "{{ messages[0].content }}", markers)
    with running(said) as server:
        whole = send(server, messages=[ASK], ignore_eos=None)
        thoughts, text = whole["content"]
        assert thoughts == {"type": "thinking", "thinking": "hm", "signature": ""}
        assert (text["type"], text["text"], whole["stop_reason"]) == ("text", "sun today", "end_turn")
        assert streamed(server, messages=[ASK]) == blocks(whole)
        assert send(server, messages=[ASK], include_reasoning=False)["content"] == [text]
        assert streamed(server, messages=[ASK], include_reasoning=False)[0] == [("text", "sun today")]
        cut = send(server, messages=[ASK], stop_sequences=[" tod"])
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("stop_sequence", " tod")
        assert cut["content"][1]["text"] == "sun"
        assert send(server, messages=[ASK], max_tokens=2)["stop_reason"] == "max_tokens"


def test_fields(server: Running) -> None:
    """The same as in a chat: system, a prefix of the answer, a schema."""
    system = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "brief"},
    ]
    found = send(server, system=system, messages=[ASK], max_tokens=20, metadata={"user_id": "me"})
    chat = {"messages": [{"role": "system", "content": "Be brief"}, ASK], "max_tokens": 20}
    same = send(server, "/v1/chat/completions", **chat)
    assert found["content"][0]["text"] == same["choices"][0]["message"]["content"]
    counted = send(server, f"{URL}/count_tokens", system=system, messages=[ASK])
    assert counted == {"status": 200, "input_tokens": same["usage"]["prompt_tokens"]}
    long = [{"role": "user", "content": "Rome? " * 1000}]  # more than the context
    assert send(server, f"{URL}/count_tokens", messages=long)["input_tokens"] > 5000
    found = send(server, f"{URL}/count_tokens", messages=[])
    assert (found["status"], found["type"], found["error"]["param"]) == (400, "error", "messages")
    form = {"type": "json_schema", "schema": WEATHER}
    text = send(server, messages=[ASK], output_config={"format": form})["content"][0]["text"]
    assert sorted(json.loads(text)) == ["city", "days"]


def test_errors_have_the_form_of_this_endpoint() -> None:
    with running(words(), api_keys=("secret",)) as server:
        found = send(server, messages=[ASK])
        assert (found["status"], found["type"]) == (401, "error")
        assert found["error"]["type"] == "authentication_error"
        found = send(server, headers={"x-api-key": "secret"}, messages=[ASK], model="none")
        assert (found["status"], found["error"]["type"]) == (404, "not_found_error")
        found = send(server, headers={"x-api-key": "secret"}, messages=[ASK])  # without a template
        assert (found["status"], found["error"]["param"]) == (400, "messages")
