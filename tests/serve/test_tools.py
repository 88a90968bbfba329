"""Calls of tools over HTTP, with the openai client: forced by grammars, or found in what a model says."""

import json
from typing import Any

import pytest
from openai import OpenAI
from scripted import MARKERS, TEMPLATES, scripted, talker, tool
from servers import Running, running

ASK: Any = [{"role": "user", "content": "Will it rain?"}]
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


def streamed(client: OpenAI, **body: Any) -> tuple[str, list[Any], list[str]]:
    """Content, calls and finish reasons of a stream; deltas are added as OpenAI says."""
    content, calls, reasons = "", [], []
    for chunk in client.chat.completions.create(model="toy", stream=True, **body):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            assert part.function is not None
            if part.id is not None:
                assert part.index == len(calls) and part.type == "function" and part.function.name
                calls.append([part.id, part.function.name, ""])
            calls[part.index][2] += part.function.arguments or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
    return content, calls, reasons


def test_a_named_tool_is_called(client: OpenAI) -> None:
    tools = [tool(), tool("time", NOTHING)]
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    body: Any = {"messages": ASK, "tools": tools, "tool_choice": chosen, "seed": 3}
    (choice,) = client.chat.completions.create(model="toy", **body).choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Rome", "Oslo") and arguments["days"] in (1, 2)
    content, ((id_, *streamed_call),), reasons = streamed(client, **body)
    assert (content, streamed_call, reasons) == ("", ["weather", call.function.arguments], ["tool_calls"])
    assert id_.startswith("call_") and id_ != call.id


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_forced_call_that_is_cut_shows_no_marker(kind: str) -> None:
    """There is no text beside a call that is forced: half a marker is none."""
    with running(talker(TEMPLATES[kind], MARKERS[kind]), num_slots=2) as server, server.openai() as client:
        for most in range(1, 50, 8):
            body: Any = {"messages": ASK, "tools": [tool()], "tool_choice": "required", "seed": 1, "max_tokens": most}
            (choice,) = client.chat.completions.create(model="toy", **body).choices
            content, calls, reasons = streamed(client, **body)
            assert not choice.message.content and not content and reasons == [choice.finish_reason] == ["length"]
            assert [name for _, name, _ in calls] == [one.function.name for one in choice.message.tool_calls or []]
    assert calls


def test_unknown_formats_are_refused() -> None:
    """Rather than answered with calls as content; unless no tool may be called."""
    with running(talker("{{ tools }}{{ messages }}", {}), num_slots=1) as other, other.http() as http:
        body = {"messages": ASK, "tools": [tool()], "max_tokens": 1}
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400 and "--tool-parser" in response.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).status_code == 200


def test_histories_reach_the_template(client: OpenAI, server: Running) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    asked: Any = {"role": "assistant", "content": None, "tool_calls": [call]}
    answered: Any = {"role": "tool", "tool_call_id": "abcdefghi", "content": [{"type": "text", "text": "Sun."}]}
    messages = [*ASK, asked, answered]
    answer = client.chat.completions.create(model="toy", messages=messages, tools=[tool()], max_tokens=3)
    tokenizer = server.model.decoder.tokenizer
    call_text = '<tool_call>weather{"city": "Rome"}'
    text = f"{json.dumps(tool())}\n<user>Will it rain?<assistant>{call_text}<tool>Sun.<assistant>"
    assert answer.usage is not None and answer.usage.prompt_tokens == len(tokenizer(text).input_ids)


PIECES = [" [{", '"name": "weather", "arguments"', ': {"city": "Ro', 'me"}}, ', '{"name": "time"}]']
SCRIPTS = {  # the marker of one is a special token, that of the other is not
    "hermes": ["Let me see", ".\n", "<tool_call>", "\n", PIECES[0][2:], *PIECES[1:3], 'me"}}\n', "</tool_call>"],
    "mistral": ["Let me see", ".", "[TOOL_CALLS]", *PIECES],
}


def test_calls_are_found_in_free_text() -> None:
    """Under auto; markers may be special tokens, which are in the text of no other request."""
    for kind, script in SCRIPTS.items():
        with running(scripted(script, TEMPLATES[kind], MARKERS[kind])) as server, server.openai() as client:
            body: Any = {"messages": ASK, "tools": [tool(), tool("time", NOTHING)], "max_tokens": 100}
            (choice,) = client.chat.completions.create(model="toy", **body).choices
            found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
            assert found == [("weather", '{"city": "Rome"}'), ("time", "{}")][: 2 if kind == "mistral" else 1]
            assert choice.message.content == "Let me see." and choice.finish_reason == "tool_calls"
            content, calls, reasons = streamed(client, **body)
            assert (content, [(name, given) for _, name, given in calls]) == ("Let me see.", found)
            assert reasons == ["tool_calls"]
            (choice,) = client.chat.completions.create(model="toy", **body, stop='"Ro').choices
            assert choice.finish_reason == "stop" and len(choice.message.tool_calls or []) == 1
            text = "".join(piece for piece in script if not MARKERS[kind].get(piece))
            for more in ({"tools": []}, {"tool_choice": "none"}):
                (choice,) = client.chat.completions.create(model="toy", **body | more).choices
                assert choice.message.content == text and choice.message.tool_calls is None
                assert choice.finish_reason == "stop"
