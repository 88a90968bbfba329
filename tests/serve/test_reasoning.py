"""Thoughts over HTTP: apart from the content, whether the template or the model begins them; and constraints after."""

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError
from scripted import TEMPLATES, scripted, talker, tool
from servers import Running, running

from outrider.errors import OptionError
from outrider.text.chat import Chat, ChatOptions

ASK: Any = [{"role": "user", "content": "Will it rain?"}]
MARKERS = {"<think>": False, "</think>": False}
SCRIPT = ["<think>", "\n", "It may", " rain", ".\n", "</think>", "\n\n", "Yes", ".", '{"a": 1}']


@pytest.fixture(scope="module", params=["{{ messages[0].content }}", "<think>"])
def server(request: pytest.FixtureRequest) -> Iterator[Running]:
    """The model begins thoughts, or its template does."""
    with running(scripted(SCRIPT, request.param, MARKERS)) as one:
        yield one


def test_thoughts_are_no_content(server: Running) -> None:
    with server.openai() as client:
        body: Any = {"model": "toy", "messages": ASK}
        message = client.chat.completions.create(**body).choices[0].message
        assert (message.reasoning_content, message.content) == ("It may rain.", 'Yes.{"a": 1}')
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "It may rain."
        assert "".join(delta.content or "" for delta in deltas) == message.content
        all_text = "".join(SCRIPT[server.model.decoder.tokenizer.chat_template == SCRIPT[0] :])
        for name, content in (("include_reasoning", message.content), ("separate_reasoning", all_text)):
            answer = client.chat.completions.create(**body, extra_body={name: False})
            details, other = answer.usage.completion_tokens_details, answer.choices[0].message  # type: ignore[union-attr]
            assert (details and details.reasoning_tokens) == (4 if name == "include_reasoning" else None)
            assert not hasattr(other, "reasoning_content") and other.content == content
        assert client.completions.create(model="toy", prompt="a", max_tokens=50).choices[0].text == "".join(SCRIPT)


BUDGETS = {"chat/completions": {"thinking_token_budget": 2}, "responses": {"thinking_budget_tokens": 2}}
BUDGETS["messages"] = {"thinking": {"type": "enabled", "budget_tokens": 2}}  # type: ignore[dict-item]


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "<think>"])
def test_thoughts_have_a_budget(template: str) -> None:
    """At every door, whole and streamed, however long a round is: the draft goes on thinking."""
    decoder = scripted(SCRIPT, template, MARKERS, has_draft=True)
    with running(decoder) as server:
        for (door, budget), is_stream, k in itertools.product(BUDGETS.items(), (False, True), (0, 1, 8)):
            found = said(server, door, is_stream=is_stream, num_draft_tokens=k, **budget)
            assert found[:2] == ("It may", 'Yes.{"a": 1}')
        with server.http() as http:
            body = {"messages": ASK, "separate_reasoning": False}
            for budget, num in ((0, 0), (2, 2), (-1, 4), (50, 4)):
                body |= {"thinking_token_budget": budget}
                (choice,) = http.post("/v1/chat/completions", json=body).json()["choices"]
                begun = template == "<think>"
                assert choice["message"]["content"] == "".join([*SCRIPT[begun : num + 1], *SCRIPT[5:]])
    # Of a chat that goes on, and of a prompt that is none, in the library and at the server.
    continued = scripted(SCRIPT[1:], "{{ messages[0].content }}{{ messages[1].content }}", MARKERS)
    begun = Chat([*ASK, {"role": "assistant", "content": "<think>Hm,"}], ChatOptions(continue_final_message=True))
    (completion,) = continued.generate([begun], thinking_budget=2)
    assert completion.text == "".join([*SCRIPT[1:3], *SCRIPT[5:]])
    with running(continued) as server, server.http() as http:
        body = {"prompt": "<think>Hm,", "thinking_token_budget": 2, "max_tokens": 50}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == completion.text
    (alone,) = decoder.generate([[1]], thinking_budget=1)
    assert alone.text == "".join([SCRIPT[1], *SCRIPT[5:]])


CHANNELS = dict.fromkeys(("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"), True)
WORDS = dict.fromkeys(("assistant", "analysis", "final", "commentary"), False)


def test_channels_are_told_apart() -> None:
    """As in gpt-oss: no header is content, a budget leads to the answer, constraints begin after its header."""
    header = "<|channel|>analysis<|message|>{{ '\\n' }}"
    script = ["\n", "It may", " rain", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
    script += ["Yes", "."]
    markers = {**CHANNELS, **WORDS, "\n": False}
    with running(scripted(script, header, markers, has_draft=True)) as server:
        for is_stream, k in ((False, 0), (True, 8)):
            for budget, thoughts in ((0, ""), (2, "It may rain"), (-1, "It may rain.")):
                extra = {"thinking_token_budget": budget, "num_draft_tokens": k}
                found = said(server, "chat/completions", is_stream=is_stream, **extra)
                assert found[:2] == (thoughts, "Yes.")
    template = TEMPLATES["hermes"].replace("<tool_call>", "<|channel|>commentary") + "<|start|>assistant"
    with running(talker(template, CHANNELS | WORDS)) as server, server.openai() as client:
        analysis = server.model.decoder.tokenizer.convert_tokens_to_ids("analysis")
        tools: Any = [tool("time", {"type": "object", "additionalProperties": False}, strict=True)]
        for bias, budget in (({str(analysis): 50}, 2), ({}, 0)):
            body: Any = {"model": "toy", "messages": ASK, "logit_bias": bias, "max_tokens": 100}
            extra = {"thinking_token_budget": budget}
            form = {"structured_outputs": {"regex": "(yes|no)"}} | extra
            message = client.chat.completions.create(**body, extra_body=form).choices[0].message
            assert message.content in ("yes", "no") and hasattr(message, "reasoning_content") == bool(budget)
            asked = {"tools": tools, "tool_choice": "required", "extra_body": extra}
            message = client.chat.completions.create(**body, **asked).choices[0].message
            assert message.tool_calls is not None and message.tool_calls[0].function.name == "time"
            assert not message.content
        with pytest.raises(BadRequestError, match="make tool_choice required"):
            client.chat.completions.create(**body, tools=tools)


def test_without_markers_thoughts_are_content_and_have_no_budget() -> None:
    decoder = scripted(SCRIPT, "<think>", MARKERS)
    with running(decoder, reasoning_parser="none") as server, server.http() as http:
        message = http.post("/v1/chat/completions", json={"messages": ASK}).json()["choices"][0]["message"]
        assert message["content"] == "".join(SCRIPT[1:]) and "reasoning_content" not in message
        names = ("thinking_token_budget", "thinking_budget_tokens", "thinking.budget_tokens")
        for (path, budget), name in zip(BUDGETS.items(), names, strict=True):
            asked = {"input": "Hm?"} if path == "responses" else {"messages": ASK}
            error = http.post(f"/v1/{path}", json=asked | budget).json()["error"]
            assert name in error["message"] and "no known markers of thoughts" in error["message"]
    with pytest.raises(OptionError, match="forbids </think>"):
        decoder.generate("a", thinking_budget=1, logit_bias={6: -math.inf})
    with pytest.raises(OptionError, match="stop token"):
        decoder.generate("a", thinking_budget=1, min_tokens=5, stop_token_ids=[6])
    with pytest.raises(OptionError, match="bad_words"):
        decoder.generate("a", thinking_budget=1, bad_words=[[6]])
    with pytest.raises(OptionError, match="thinking_budget = -1"):
        decoder.generate("a", thinking_budget=-1)


def said(server: Running, door: str, *, is_stream: bool, **body: Any) -> tuple[str, str, str | None]:
    """Thoughts and content of an answer, and the stop string that ended it (which responses do not tell)."""
    asked = {"input": "Will it rain?"} if door == "responses" else {"messages": ASK}
    if "stop" in body and door == "messages":
        body["stop_sequences"] = body.pop("stop")
    asked |= {"max_tokens": 50} if door == "messages" else {}
    with server.http() as http:
        answer = http.post(f"/v1/{door}", json={"model": "toy", "stream": is_stream} | asked | body)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if door == "chat/completions":
        choices = [event["choices"][0] for event in events] if is_stream else answer.json()["choices"]
        parts = [choice["delta" if is_stream else "message"] for choice in choices]
        texts = ["".join(part.get(key) or "" for part in parts) for key in ("reasoning_content", "content")]
        return texts[0], texts[1], choices[-1]["stop_reason"]
    if door == "responses":
        output = (events[-1]["response"] if is_stream else answer.json())["output"]
        by_type = {item["type"]: item["content"][0]["text"] for item in output}
        return by_type.get("reasoning", ""), by_type.get("message", ""), None
    if not is_stream:
        blocks = {block["type"]: block[block["type"]] for block in answer.json()["content"]}
        return blocks.get("thinking", ""), blocks.get("text", ""), answer.json()["stop_sequence"]
    deltas = [event["delta"] for event in events if "delta" in event]
    texts = ["".join(delta.get(key, "") for delta in deltas) for key in ("thinking", "text")]
    return texts[0], texts[1], deltas[-1]["stop_sequence"]


STOPPED: list[tuple[list[str], str, tuple[str, str]]] = [
    (["<think>", "Hm, Q: a", "\n\n", "</think>", "\n\n", "Yes", ".", " Q", ": b"], "", ("Hm, Q: a", "Yes. ")),
    (["<think>", "Hm, Q: a", " Q", ": </think>", "\n\n", "Yes.\n", "\nQ: b"], "<think>", ("Hm, Q: a Q:", "Yes.")),
    (["<think>", "Q: a", "</", "thi", "nk>", "Yes Q", ":"], "", ("Q: a", "Yes ")),  # a marker of several tokens
    (["<think>", "Q: a Q", "</th", "ink>: \n\nYes Q: b"], "", ("Q: a Q", ": ")),  # the end and a stop in one
    (["\n", " Yes", ".", " Q:", " b"], "", ("", "\n Yes. ")),  # no thought
    (["</think>", "\n\n", "Yes", ". Q: <think>", "Q"], "</think>", ("", "Yes. ")),
    (["<think>", "Q: a", " Q:"], "", ("Q: a Q:", "")),  # cut
]


def test_stop_strings_wait_for_the_end_of_a_thought() -> None:
    """However long a round is, whole and streamed."""
    stop = ["Q:", "\n\n"]
    for script, template, expected in STOPPED:
        decoder = scripted(script, template or "{{ messages[0].content }}", MARKERS, has_draft=True)
        with running(decoder) as server:
            for door, is_stream, k in itertools.product(BUDGETS, (False, True), (0, 1, 8)):
                thoughts, content, reason = said(server, door, is_stream=is_stream, stop=stop, num_draft_tokens=k)
                assert (thoughts, content) == expected
                assert reason in ([None] if door == "responses" or script[-1] == " Q:" else stop)


def test_whoever_reads_no_thoughts_stops_in_them() -> None:
    """Neither do stop tokens wait."""
    with running(scripted(SCRIPT, "{{ messages[0].content }}", MARKERS)) as server, server.http() as http:
        for path, body, text in [
            ("completions", {"prompt": "a", "stop": "rain"}, "<think>\nIt may "),
            ("chat/completions", {"messages": ASK, "stop": "rain", "separate_reasoning": False}, "<think>\nIt may "),
            ("chat/completions", {"messages": ASK, "stop_token_ids": [5]}, ""),
            ("chat/completions", {"messages": ASK, "stop": ".", "min_tokens": 10}, 'Yes.{"a": 1}'),
            ("chat/completions", {"messages": ASK, "stop": ".", "include_stop_str_in_output": True}, "Yes."),
        ]:
            (choice,) = http.post(f"/v1/{path}", json=body).json()["choices"]
            assert choice.get("text", choice.get("message", {}).get("content")) == text
