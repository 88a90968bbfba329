"""One model at every door, whole and streamed, however long a round is: thoughts, content, calls, and how each ends."""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from openai import OpenAI
from scripted import MARKERS, TEMPLATES, WEATHER, scripted, talker, tool
from servers import Running, running, words

from outrider.errors import OptionError
from outrider.serve.tools import Choice, Tool, ToolUse
from outrider.text.chat import Chat, ChatOptions

DOORS = ("chat/completions", "responses", "messages")
ASK: Any = [{"role": "user", "content": "Will it rain?"}]
PLAIN = "{{ messages[0].content }}"
THINK = {"<think>": False, "</think>": False}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [tool(), tool("time", NOTHING)]


class Said(NamedTuple):
    """An answer: its calls with their arguments, and its end: "stop", "length" or "calls"."""

    thoughts: str
    content: str
    calls: list[tuple[str, str]]
    end: str


def asked(door: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of chats in the words of another door."""
    body = {"model": "toy", "max_tokens": 300} | dict(body)
    if door == "chat/completions":
        return {"messages": ASK} | body
    tools = [one["function"] for one in body.pop("tools", ())]
    if door == "responses":
        body |= {"tools": [{"type": "function", **one} for one in tools], "max_output_tokens": body.pop("max_tokens")}
        return {"input": ASK} | body
    renamed = [{{"parameters": "input_schema"}.get(name, name): one[name] for name in one} for one in tools]
    body |= {"tools": renamed, "stop_sequences": body.pop("stop", None)}
    if (budget := body.pop("thinking_token_budget", None)) is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": budget}
    if (choice := body.pop("tool_choice", None)) is not None:
        is_single = body.pop("parallel_tool_calls", None) is False
        body["tool_choice"] = {"type": {"required": "any"}.get(choice, choice), "disable_parallel_tool_use": is_single}
    return {"messages": ASK} | body


def sent(server: Running, path: str, body: Mapping[str, Any]) -> Any:
    with server.http() as http:
        answer = http.post(f"/v1/{path}", json=body)
    if not body.get("stream"):
        return answer.json()
    lines = answer.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    assert path.startswith("chat") or names == [event["type"] for event in events]
    return events


def said(server: Running, door: str, **body: Any) -> Said:
    found = sent(server, door, asked(door, body))
    return {"responses": of_response, "messages": of_message}.get(door, of_chat)(found)


def of_chat(found: Any) -> Said:
    choices = [one["choices"][0] for one in found] if isinstance(found, list) else found["choices"]
    parts = [choice["delta" if isinstance(found, list) else "message"] for choice in choices]
    texts = ["".join(part.get(key) or "" for part in parts) for key in ("reasoning_content", "content")]
    calls: list[tuple[str, str]] = []
    for one in (one for part in parts for one in part.get("tool_calls") or []):
        if "id" in one:
            assert one.get("index", len(calls)) == len(calls) and one["type"] == "function"
            calls.append((one["function"]["name"], ""))
        calls[-1] = calls[-1][0], calls[-1][1] + one["function"]["arguments"]
    return Said(*texts, calls, {"tool_calls": "calls"}.get(choices[-1]["finish_reason"], choices[-1]["finish_reason"]))


def of_response(found: Any) -> Said:
    response = found[-1]["response"] if isinstance(found, list) else found
    items = response["output"]
    thoughts, content = (
        "".join(one["content"][0]["text"] for one in items if one["type"] == kind) for kind in ("reasoning", "message")
    )
    calls = [(one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
    if isinstance(found, list):
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        whole = {"reasoning_text": thoughts, "output_text": content}
        whole["function_call_arguments"] = "".join(arguments for _, arguments in calls)
        for kind, text in whole.items():
            assert "".join(one["delta"] for one in found if one["type"] == f"response.{kind}.delta") == text
        for kind in ("added", "done"):
            assert sum(one["type"] == f"response.output_item.{kind}" for one in found) == len(items)
    end = "length" if response["status"] == "incomplete" else "calls" if calls else "stop"
    return Said(thoughts, content, calls, end)


def of_message(found: Any) -> Said:
    blocks: list[list[Any]] = []
    if isinstance(found, list):
        begin, *others, ending, end = found
        assert (begin["type"], ending["type"], end["type"]) == ("message_start", "message_delta", "message_stop")
        for event in others:
            assert event["index"] == len(blocks) - (event["type"] != "content_block_start")
            if event["type"] == "content_block_start":
                blocks.append([event["content_block"], ""])
            elif event["type"] == "content_block_delta":
                blocks[-1][1] += next(value for key, value in event["delta"].items() if key != "type")
        assert sum(event["type"] == "content_block_stop" for event in others) == len(blocks)
        reason = ending["delta"]["stop_reason"]
    else:
        blocks = [[one, json.dumps(one["input"]) if "input" in one else one[one["type"]]] for one in found["content"]]
        reason = found["stop_reason"]
    texts = ["".join(text for one, text in blocks if one["type"] == kind) for kind in ("thinking", "text")]
    calls = [(one["name"], text) for one, text in blocks if one["type"] == "tool_use"]
    return Said(*texts, calls, {"max_tokens": "length", "tool_use": "calls"}.get(reason, "stop"))


SCRIPT = ["<think>", "\n", "It may", " rain", ".\n", "</think>", "\n\n", "Yes", ".", '{"a": 1}']
STOP = {"stop": ["Q:", "\n\n"]}
CALL = ["<tool_call>", '{"name": "weather", "arguments"', ': {"city": "Ro', 'me"}}\n', "</tool_call>"]
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
ROME = ("weather", '{"city": "Rome"}')
GEMMA = ["<|channel>", "thought", "\n", "Hm", ".", "<channel|>", "Yes"]
CHANNELS = dict.fromkeys(("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>"), True)
CHANNELS |= dict.fromkeys(("assistant", "analysis", "final", "commentary"), False)
HEADER = "<|channel|>analysis<|message|>{{ '\\n' }}"
HARMONY = ["\n", "It may", " rain", ".", "<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>"]
HARMONY += ["Yes", "."]
AGAIN = "<|start|>assistant<|channel|>analysis<|message|>Or snow<|end|>"  # a second thought
# What a model with these markers says after its template, the request, and what is read of it.
CASES: list[tuple[Mapping[str, bool], Sequence[str], str, dict[str, Any], tuple[Any, ...]]] = [
    (THINK, SCRIPT, PLAIN, {}, ("It may rain.", 'Yes.{"a": 1}', [], "stop")),
    (THINK, SCRIPT, PLAIN, {"max_tokens": 3}, ("It may", "", [], "length")),
    (THINK, SCRIPT, "<think>", {"thinking_token_budget": 2}, ("It may", 'Yes.{"a": 1}', [], "stop")),
    (THINK, SCRIPT, PLAIN, {"thinking_token_budget": 0}, ("", 'Yes.{"a": 1}', [], "stop")),
    # Stop strings wait for the end of a thought.
    (THINK, ["<think>", "Hm, Q: a", "\n\n", "</think>", "\n\n", "Yes", ".", " Q", ": b"], PLAIN, STOP,
     ("Hm, Q: a", "Yes. ", [], "stop")),
    (THINK, ["<think>", "Hm, Q: a", " Q", ": </think>", "\n\n", "Yes.\n", "\nQ: b"], "<think>", STOP,
     ("Hm, Q: a Q:", "Yes.", [], "stop")),
    # Calls in free text; the marker of one format is a special token, that of the other is not.
    (MARKERS["hermes"], ["Let me see", ".\n", *CALL], TEMPLATES["hermes"], {"tools": TOOLS},
     ("", "Let me see.", [ROME], "calls")),
    (MARKERS["mistral"], ["Let me see.", "[TOOL_CALLS]", " [", *CALL[1:3], 'me"}}, ', '{"name": "time"}]'],
     TEMPLATES["mistral"], {"tools": TOOLS}, ("", "Let me see.", [ROME, ("time", "{}")], "calls")),
    (THINK, ["<think>", "Hm", "</think>", "\n\n", TIME[:20], TIME[20:], TIME[:14], TIME[14:]], TEMPLATES["hermes"],
     {"tools": TOOLS}, ("Hm", "", [("time", "{}")] * 2, "calls")),
    # A label is no thought, as in Gemma 4; a budget of nothing ends the thought before its label.
    ({"<|channel>": False, "<channel|>": False}, GEMMA, PLAIN, {"thinking_token_budget": 0}, ("", "Yes", [], "stop")),
    # Channels, as in gpt-oss: no header is content, and a budget leads to the answer.
    (CHANNELS | {"\n": False}, HARMONY, HEADER, {"thinking_token_budget": 2}, ("It may rain", "Yes.", [], "stop")),
    (CHANNELS | {"\n": False}, [*HARMONY[:5], AGAIN, *HARMONY[5:]], HEADER, {},
     ("It may rain.\nOr snow", "Yes.", [], "stop")),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "".join(case[1])[:30] + str([*case[3]]))
def test_endpoints_give_equal_texts(case: Any) -> None:
    markers, script, template, body, expected = case
    with running(scripted(script, template, markers, has_draft=True)) as server:
        for door, is_stream, k in itertools.product(DOORS, (False, True), (0, 1, 8)):
            if door != "messages" or body.get("thinking_token_budget") != 0:
                assert said(server, door, stream=is_stream, num_draft_tokens=k, **body) == expected, (door, is_stream)


def test_thoughts_may_be_left_out_or_be_content() -> None:
    """Without markers they are content, and have no budget."""
    decoder, text = scripted(SCRIPT, PLAIN, THINK), "".join(SCRIPT)
    with running(decoder) as server:
        for door in DOORS:
            assert said(server, door, include_reasoning=False) == ("", 'Yes.{"a": 1}', [], "stop")
        for body, content in (
            ({"separate_reasoning": False}, text),
            ({"separate_reasoning": False, "stop": "rain"}, "<think>\nIt may "),
            ({"stop": ".", "include_stop_str_in_output": True}, "Yes."),
        ):
            assert said(server, "chat/completions", **body).content == content
        usage = sent(server, "chat/completions", asked("chat/completions", {}))["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}
    with running(scripted(SCRIPT, "<think>", THINK), reasoning_parser="none") as server:
        for door in DOORS:
            assert said(server, door).content == "".join(SCRIPT[1:])
            error = sent(server, door, asked(door, {"thinking_token_budget": 3}))["error"]["message"]
            assert "no known markers of thoughts" in error
    # The prompt may have begun the thought; options that would hinder its end are refused.
    continued = scripted(SCRIPT[1:], "{{ messages[0].content }}{{ messages[1].content }}", THINK)
    begun = Chat([*ASK, {"role": "assistant", "content": "<think>Hm,"}], ChatOptions(continue_final_message=True))
    (completion,) = continued.generate([begun], thinking_budget=2)
    assert completion.text == "".join([*SCRIPT[1:3], *SCRIPT[5:]])
    for options in ({"logit_bias": {6: -math.inf}}, {"bad_words": [[6]]}):
        with pytest.raises(OptionError, match=next(iter(options))):
            decoder.generate("a", thinking_budget=1, **options)


def test_demanded_forms_begin_after_thoughts() -> None:
    template = TEMPLATES["hermes"].replace("<tool_call>", "<|channel|>commentary") + "<|start|>assistant"
    tools = [tool("time", NOTHING, strict=True)]
    for decoder, thought in (
        (talker(TEMPLATES["hermes"] + "<think>\n", THINK | {"<tool_call>": False}), "</think>"),
        (talker(template, CHANNELS), "analysis"),
    ):
        bias = {str(decoder.tokenizer.convert_tokens_to_ids(thought)): 50}
        with running(decoder) as server:
            body = {"logit_bias": bias, "thinking_token_budget": 2}
            found = said(server, "chat/completions", **body, structured_outputs={"regex": "(yes|no)"})
            assert found.content in ("yes", "no")
            found = said(server, "chat/completions", **body, tools=tools, tool_choice="required")
            assert found.content == "" and {name for name, _ in found.calls} == {"time"}


def test_a_demanded_call_and_its_result(server: Running) -> None:
    """Equal at every door; the whole history goes back and forth, since nothing is kept."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    histories: list[Any] = [
        {"messages": [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
                      {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "Sun."}]}]},
        {"input": [*ASK, {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'},
                   {"type": "function_call_output", "call_id": "c1", "output": "Sun."}]},
        {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "weather",
                                                               "input": {"city": "Rome"}}]},
                      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "Sun."}]}]},
    ]  # fmt: skip
    found, answers = [], []
    for door, history in zip(DOORS, histories, strict=True):
        for is_stream in (False, True):
            own = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
            one = said(server, door, stream=is_stream, **own)
            ((name, arguments),) = one.calls
            assert (one.content, one.end, name) == ("", "calls", "weather")
            found.append(json.loads(arguments))
            assert sorted(found[-1]) == ["city", "days"] and found[-1] == found[0]
        answers.append(said(server, door, max_tokens=20, temperature=0, ignore_eos=True, **history))
    assert answers[0] == answers[1] == answers[2] and answers[0].end == "length"
    text = '<user>Will it rain?<assistant><tool_call>weather{"city": "Rome"}<tool>Sun.<assistant>'
    usage = sent(server, "responses", asked("responses", histories[1]))["usage"]
    assert usage["input_tokens"] == len(server.model.decoder.tokenizer(text).input_ids)
    for most, is_stream in itertools.product(range(1, 50, 8), (False, True)):  # half a marker is no text
        body = {"tools": TOOLS[:1], "tool_choice": "required", "seed": 1, "max_tokens": most, "stream": is_stream}
        one = said(server, "chat/completions", **body)
        assert (one.content, one.end) == ("", "length")
    assert one.calls


def test_a_call_that_a_stop_string_cuts_is_incomplete() -> None:
    with running(scripted(CALL, TEMPLATES["hermes"], MARKERS["hermes"])) as server:
        found = sent(server, "responses", asked("responses", {"tools": TOOLS, "stop": "Ro"}))
    assert [(one["type"], one["status"]) for one in found["output"]] == [("function_call", "incomplete")]


def test_one_call_at_a_time() -> None:
    """Named, or by the field of each API."""
    tools = [Tool.model_validate({"name": name, "input_schema": {"type": "object"}}) for name in "ab"]
    for choice, is_parallel in (("auto", None), ("auto", False), (Choice(type="function", name="a"), None)):
        used = ToolUse.of(tools, choice, is_parallel)  # type: ignore[arg-type]
        assert used is not None and used.is_parallel == (choice == "auto" and is_parallel is None)
    used = ToolUse.of(tools, Choice(type="any", disable_parallel_tool_use=True))
    assert used is not None and used.is_forced and not used.is_parallel


def test_unknown_formats_are_refused() -> None:
    """Rather than answered with calls as content; unless no tool may be called."""
    with running(talker("{{ tools }}{{ messages }}", {}), num_slots=1) as server:
        for door in DOORS:
            body = asked(door, {"tools": TOOLS, "max_tokens": 1})
            assert "--tool-parser" in sent(server, door, body)["error"]["message"]
            assert said(server, door, tools=TOOLS, max_tokens=1, tool_choice="none", ignore_eos=True).end == "length"
    script = ["Let me see", ".\n", *CALL]
    with running(scripted(script, TEMPLATES["hermes"], MARKERS["hermes"])) as server:
        for more in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            assert said(server, "chat/completions", **more) == ("", "".join(script), [], "stop")


def test_messages_are_those_of_a_chat(server: Running) -> None:
    parts = [{"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "brief"}]
    found = sent(server, "messages", asked("messages", {"system": parts, "max_tokens": 20, "seed": 1}))
    chat = [{"role": "system", "content": "Be brief"}, *ASK]
    same = sent(server, "chat/completions", {"messages": chat, "max_tokens": 20, "seed": 1})
    assert found["content"][0]["text"] == same["choices"][0]["message"]["content"]
    counted = sent(server, "messages/count_tokens", {"system": parts, "messages": ASK})
    assert counted == {"input_tokens": same["usage"]["prompt_tokens"]}
    form = {"format": {"type": "json_schema", "schema": WEATHER}}
    assert sorted(json.loads(said(server, "messages", output_config=form).content)) == ["city", "days"]
    with running(words(), api_keys=("secret",)) as other, other.http() as http:
        for key, kind in (("", "authentication_error"), ("secret", "invalid_request_error")):  # without a template
            error = http.post("/v1/messages", json=asked("messages", {}), headers={"x-api-key": key}).json()
            assert (error["type"], error["error"]["type"]) == ("error", kind)


def test_responses_with_the_openai_client(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form: Any = {"type": "json_schema", "name": "answer", "schema": schema | {"additionalProperties": False}}
    body: Any = {"model": "toy", "instructions": "Be brief.", "input": "Hm", "text": {"format": form}, "store": False}
    with client.responses.stream(**body) as stream:
        kinds = [event.type for event in stream]
        assert isinstance(json.loads(stream.get_final_response().output_text)["rain"], bool)
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    cut = client.responses.create(model="toy", input="Hm", max_output_tokens=2, top_p=0.5)
    assert cut.status == "incomplete" and (cut.temperature, cut.top_p) == (1.0, 0.5)
    assert cut.incomplete_details and cut.incomplete_details.reason == "max_output_tokens"
