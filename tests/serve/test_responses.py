"""``/v1/responses`` with the openai client: text, thoughts, calls and their results, whole and as events."""

import json
from typing import Any

from openai import OpenAI
from scripted import MARKERS, TEMPLATES, scripted, tool
from servers import running

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER
from pairs import word_tokenizer
from toys import random_table, table_lm

THINK = {"<think>": False, "</think>": False}
SCRIPT = ["<think>", "It may", " rain.", "</think>", "\n\n", "Let me ", "see.", "<tool_call>", '{"name": "weather", ',
          '"arguments": {"city"', ': "Rome"}}', "</tool_call>"]  # fmt: skip
FLAT: Any = {"type": "function", **tool()["function"]}


def test_items_whole_and_as_events() -> None:
    decoder = scripted(SCRIPT, TEMPLATES["hermes"], MARKERS["hermes"] | THINK)
    with running(decoder) as server, server.openai() as client:
        body: Any = {"model": "toy", "input": "Will it rain?", "tools": [FLAT]}
        response = client.responses.create(**body)
        thoughts, message, call = response.output
        assert thoughts.type == "reasoning" and thoughts.content and thoughts.content[0].text == "It may rain."
        assert message.type == "message" and response.output_text == "Let me see."
        assert call.type == "function_call" and (call.name, call.arguments) == ("weather", '{"city": "Rome"}')
        assert response.status == "completed" and response.usage and response.usage.output_tokens == len(SCRIPT) + 1
        with client.responses.stream(**body) as stream:
            events = list(stream)
            final = stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output_text == "Let me see." and final.output[2].arguments == '{"city": "Rome"}'  # type: ignore[union-attr]
        kinds = [event.type for event in events]
        assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
        for kind, count in [("output_item.added", 3), ("output_item.done", 3), ("content_part.done", 2)]:
            assert kinds.count(f"response.{kind}") == count
        assert "response.function_call_arguments.delta" in kinds and "response.reasoning_text.delta" in kinds


def test_a_conversation_with_a_tool(client: OpenAI) -> None:
    """The whole history goes back and forth: nothing is kept."""
    chosen: Any = {"type": "function", "name": "weather"}
    history: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Will it rain?"}]}]
    body: Any = {"model": "toy", "instructions": "Be brief.", "tools": [FLAT], "max_output_tokens": 300}
    response = client.responses.create(**body, input=history, tool_choice=chosen)
    (call,) = response.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    history += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "Sun."}]
    schema = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}
    form: Any = {"type": "json_schema", "name": "answer", "schema": schema | {"additionalProperties": False}}
    answer = client.responses.create(**body, input=history, tool_choice="none", text={"format": form}, store=False)
    assert isinstance(json.loads(answer.output_text)["rain"], bool)
    assert answer.usage and response.usage and answer.usage.input_tokens != response.usage.input_tokens
    cut = client.responses.create(model="toy", input="Hm", max_output_tokens=2, top_p=0.5)
    assert cut.status == "incomplete" and cut.incomplete_details and (cut.temperature, cut.top_p) == (1.0, 0.5)
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_an_error_in_a_stream() -> None:
    """An event of the type "error", numbered like the others."""
    tokenizer = word_tokenizer(50)
    tokenizer.chat_template = "w1"
    decoder = Decoder(table_lm(random_table(50, 0), context_len=1_000_000), tokenizer, frozenset(), NO_DRAFTER)
    with running(decoder, num_slots=1, context_len=1_000_000) as server, server.openai() as client:
        events = []
        for event in client.responses.create(model="toy", input="Hm", stream=True):
            events.append(event)
            if len(events) == 5:
                server.server.stop()
    last = events[-1]
    assert last.type == "error" and "shutting down" in last.message
    assert last.sequence_number == len(events) - 1 and last.code == "unavailable" and last.param is None
