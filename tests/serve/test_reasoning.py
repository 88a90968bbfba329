"""Thoughts over HTTP: apart from the content, whether the template or the model begins them; and constraints after."""

from typing import Any

import pytest
from scripted import TEMPLATES, scripted, talker, tool
from servers import running

ASK: Any = [{"role": "user", "content": "Will it rain?"}]
MARKERS = {"<think>": False, "</think>": False}
SCRIPT = ["<think>", "\n", "It may", " rain", ".\n", "</think>", "\n\n", "Yes", ".", '{"a": 1}']


def test_thoughts_are_no_content() -> None:
    with running(scripted(SCRIPT, "{{ messages[0].content }}", MARKERS)) as server, server.openai() as client:
        body: Any = {"model": "toy", "messages": ASK}
        message = client.chat.completions.create(**body).choices[0].message
        assert (message.reasoning_content, message.content) == ("It may rain.", 'Yes.{"a": 1}')
        deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**body, stream=True)]
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "It may rain."
        assert "".join(delta.content or "" for delta in deltas) == message.content
        for name in ("include_reasoning", "separate_reasoning"):
            other = client.chat.completions.create(**body, extra_body={name: False}).choices[0].message
            assert not hasattr(other, "reasoning_content")
            assert other.content == (message.content if name == "include_reasoning" else "".join(SCRIPT))
        assert client.completions.create(model="toy", prompt="a", max_tokens=50).choices[0].text == "".join(SCRIPT)


@pytest.mark.parametrize("template", ["{{ messages[0].content }}", "<think>"])
def test_their_tokens_are_counted(template: str) -> None:
    """Whoever begins them; without the markers, and where they are not sent; up to a cut."""
    with running(scripted(SCRIPT, template, MARKERS)) as server, server.openai() as client:
        begins = template != "<think>"
        for max_tokens, expected in ((50, 4), (3, 2 + (not begins)), (1, int(not begins))):
            body: Any = {"model": "toy", "messages": ASK, "max_tokens": max_tokens}
            for extra in ({}, {"include_reasoning": False}):
                usage = client.chat.completions.create(**body, extra_body=extra).usage
                assert usage.completion_tokens_details.reasoning_tokens == expected
            *_, last = client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
            assert last.usage.completion_tokens_details.reasoning_tokens == expected
            of_response: Any = {"model": "toy", "input": "Will it rain?", "max_output_tokens": max_tokens}
            response = client.responses.create(**of_response)
            assert response.usage is not None
            assert response.usage.output_tokens_details.reasoning_tokens == expected
        plain = client.chat.completions.create(model="toy", messages=ASK, extra_body={"separate_reasoning": False})
        assert plain.usage is not None and plain.usage.completion_tokens_details is None


def test_constraints_begin_after_them() -> None:
    with (
        running(talker(TEMPLATES["hermes"] + "<think>\n", MARKERS | {"<tool_call>": False})) as server,
        server.openai() as client,
    ):
        end_id = server.model.decoder.tokenizer.convert_tokens_to_ids("</think>")
        body: Any = {"model": "toy", "messages": ASK, "logit_bias": {str(end_id): 50}}
        tools: Any = [tool("time", {"type": "object", "additionalProperties": False})]
        extra = {"structured_outputs": {"regex": "(yes|no)"}}
        assert client.chat.completions.create(**body, extra_body=extra).choices[0].message.content in ("yes", "no")
        body["messages"] = [{"role": "user", "content": "Call."}]
        message = client.chat.completions.create(**body, tools=tools, tool_choice="required").choices[0].message
        assert message.tool_calls is not None and message.tool_calls[0].function.name == "time"


def test_the_template_may_begin_them() -> None:
    template = "<think>"
    with running(scripted(SCRIPT, template, MARKERS)) as server, server.openai() as client:
        message = client.chat.completions.create(model="toy", messages=ASK).choices[0].message
        assert (message.reasoning_content, message.content) == ("It may rain.", 'Yes.{"a": 1}')
    with running(scripted(SCRIPT, template, MARKERS), reasoning_parser="none") as server, server.openai() as client:
        message = client.chat.completions.create(model="toy", messages=ASK).choices[0].message
        assert message.content == "".join(SCRIPT[1:]) and not hasattr(message, "reasoning_content")


def test_a_thought_can_be_continued() -> None:
    """The last message tells where the output begins."""
    decoder = scripted(SCRIPT[1:], "{{ messages[0].content }}{{ messages[1].content }}", MARKERS)
    with running(decoder) as server, server.openai() as client:
        for begun, thoughts, content in (
            ("<think>Hm,", "\nIt may rain.", 'Yes.{"a": 1}'),
            ("<think>Hm</think>Well", None, "".join(SCRIPT[1:])),
        ):
            messages = [*ASK, {"role": "assistant", "content": begun}]
            extra = {"continue_final_message": True, "add_generation_prompt": False}
            answer = client.chat.completions.create(model="toy", messages=messages, extra_body=extra)
            message = answer.choices[0].message
            assert (getattr(message, "reasoning_content", None), message.content) == (thoughts, content)
            assert answer.usage is not None and answer.usage.completion_tokens_details is not None
            assert answer.usage.completion_tokens_details.reasoning_tokens == (4 if thoughts else 0)
