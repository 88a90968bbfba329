"""Chat templates write the texts, and refuse with the errors, of Transformers' ``apply_chat_template``."""

import ast
import enum
import inspect
from collections import UserDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.text import templates
from outrider.text.fast_tokenizer import FastTokenizer
from pairs import word_tokenizer

HARD = """\
{%- set ns = namespace(n=0, last='') -%}
{% macro shown(m, again=true) %}
<{{ m.role | upper }}>{{ m['content'] | trim }}{% if again %}{{ m.reasoning }}{% endif %}
{% endmacro %}
  {# a comment #}
{{ bos_token }}{{ strftime_now('%Y') }} {{ dict(a=1, b='ü<>&').items() | list }} {{ dict.fromkeys([1, 2]) }}
{% for m in messages %}
    {%- if m.role == 'skip' %}{% continue %}{% endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {% generation %}{% set own = m.role %}{{ shown(m, loop.first) }}{% endgeneration %}
{{ own }}|{% set ns.n = ns.n + 1 %}{{ m | tojson }}{{ m.thinking }}{{ m.reasoning_content }}
    {% if m.content is string and m.content.startswith('w') %}w{{ m.content.split() | length }}{% endif %}
    {% if m.content is not string and m.content is iterable %}
        {% for p in m.content %}{{ p.text }}{% endfor %}
    {% endif %}
    {% for call in m.tool_calls or [] %}
        {{ call.function.arguments | tojson(indent=2) }}{{ call | items | list }}
    {% endfor %}
{% endfor %}
{{ ns.n }} {{ tools | tojson(sort_keys=true, separators=(',', ':')) if tools }} {{ documents }}
{{ date or eos_token }} {{ extra }}
{% if tools is not none and tools %}{{ tools[0].function.parameters.properties.keys() | list }}{% endif %}
{% if add_generation_prompt %}<assistant>{% endif %}
"""
RAISING = (
    "{{ messages.append(1) }}{{ messages | tojson }}",
    "{{ ''.__class__ }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ namespace(_a=1) }}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ namespace(self=1).self }}{{ dict.mro }}",
    "{{ 1 + messages[0].content }}",
    "{% for m in messages %}",
    "{% generation %}a",
    "{{ messages[0].content | nonsense }}",
    "{{ [1] | tojson(indent='  ') }}{{ range(3) | tojson }}",
    "{{ unknown.field.of }}",
    "{{ raise_exception('no ' + messages[0].role) }}",
    "{{ raise_exception(3) }}{{ content }}",
    "{{ messages | map(attribute='content') | join(', ') }}{{ 'content' }}{% set messages = [] %}{{ messages }}",
    "content {{ messages[-1].content[:3] }}",
)


class Color(enum.StrEnum):
    RED = "red"


def weather(city: str, days: int = 1) -> str:
    """Tell the weather.

    Args:
        city: its name
        days: how many (choices: [1, 2])
    """
    return city * days


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


USER = {"role": "user", "content": " w1 w2 \n"}
TOOL = {"type": "function", "function": {"name": "w7", "parameters": {"type": "object", "properties": {"ä": {}}}}}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [_call("w7", word="<ä>", n=[1, None, 2.5])], "name": None}
CHATS: list[tuple[list[Any], dict[str, Any]]] = [
    ([USER], {}),
    ([USER], {"add_generation_prompt": True, "enable_thinking": False, "date": "w3"}),
    ([{"role": "system", "content": "w0"}, USER, {"role": "assistant", "content": "Grüße 世界 🙂 "}], {}),
    ([USER, {"role": "assistant", "content": "w3 ", "thinking": "hm"}], {"continue_final_message": True}),
    ([USER, {"role": "assistant", "content": "w3\n\n"}, USER], {"continue_final_message": True}),
    ([USER, ANSWER, {"role": "tool", "content": "w2", "tool_call_id": "c1"}], {"tools": [TOOL]}),
    ([USER, ANSWER], {"tools": [weather, TOOL], "add_generation_prompt": True}),
    ([USER, ANSWER], {"continue_final_message": True}),
    ([USER] * 7, {"documents": [{"title": "w5", "text": "w6"}], "extra": [Color.RED, 2.0, True]}),
    ([USER, {"role": "skip", "content": ""}], {"extra": {"a": (1, {2: 1}), "b": UserDict(c=1)}}),
    (
        [{"role": "user", "content": [{"type": "text", "text": "w1"}, {"type": "image"}]}],
        {"add_generation_prompt": True},
    ),
    ([{"role": "user", "content": [{"type": "text", "text": "w1 "}]}], {"continue_final_message": True}),
    ([{"role": "user", "content": [{"type": "image"}]}], {"continue_final_message": True}),
    ([USER], {"continue_final_message": True, "add_generation_prompt": True}),
    ([SimpleNamespace(role="user", content="w2", model_dump=lambda: {**USER})], {"bos_token": "w9"}),
    (["w1"], {}),
    ([], {}),
    ([USER], {"tools": ["w1"]}),
    ([USER], {"documents": ["w1"]}),
    ([USER], {"chat_template": "{{ messages[0].content }}!"}),
]


def _templates() -> Iterator[str]:
    """All that are written out in tests and benchmarks, and those above."""
    yield from (HARD, *RAISING)
    for folder in ("tests", "benchmarks"):
        for file in sorted((Path(__file__).parents[2] / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                text = node.value if isinstance(node, ast.Constant) else None
                if isinstance(text, str) and ("{%" in text or "{{" in text) and file != Path(__file__):
                    yield text


def _both(template: Any) -> tuple[PreTrainedTokenizerFast, FastTokenizer]:
    theirs = word_tokenizer()
    theirs.bos_token, theirs.chat_template = "w1", template
    return theirs, FastTokenizer(theirs.backend_tokenizer, dict(theirs.special_tokens_map), template)


def _result(tokenizer: Any, messages: list[Any], options: dict[str, Any]) -> Any:
    try:
        text = tokenizer.apply_chat_template(messages, **options, tokenize=False)
        return text.replace("CONTINUE_FINAL_MESSAGE_TAG", templates._END.strip())  # a template may write it twice
    except Exception as error:  # templates raise what they like
        # The words are Jinja's and the template's own, but for checks of the chat.
        return type(error), "" if type(error) in (ValueError, TypeError) else str(error)


def test_texts_and_errors_are_those_of_transformers() -> None:
    num_texts = num_errors = 0
    for template in dict.fromkeys(_templates()):
        theirs, ours = _both(template)
        for messages, options in CHATS:
            want, found = _result(theirs, messages, options), _result(ours, messages, options)
            if not (isinstance(want, tuple) and "underscore" in want[1]):  # words of theirs
                assert found == want, (template, messages, options)
            else:
                assert found[0] is want[0]
            num_texts, num_errors = num_texts + isinstance(want, str), num_errors + isinstance(want, tuple)
    assert num_texts > 400 and num_errors > 100


def test_templates_are_chosen_by_name_and_tools() -> None:
    named = {"default": "w1", "tool_use": "{{ tools | length }}", "short": "w3"}
    for template in (named, {"short": "w3"}, "w1", None):
        theirs, ours = _both(template)
        for tools in (None, [], [TOOL]):
            for own in (None, "short", "other", "{{ eos_token }}"):
                options = {"tools": tools, "chat_template": own}
                assert _result(ours, [USER], options) == _result(theirs, [USER], options), (template, options)
    assert ours.apply_chat_template([USER], chat_template="w1 w2").input_ids == [1, 2]


def test_options_of_transformers_are_no_variables() -> None:
    theirs, ours = _both("{{ max_length }}")
    own, others = ({*inspect.signature(one.apply_chat_template).parameters} for one in (ours, theirs))
    for name in others - own:
        with pytest.raises(TypeError, match=name):
            ours.apply_chat_template([USER], **{name: 1})


@pytest.mark.parametrize(
    "template", [HARD, "{% generation %}{{ a }}{% endgeneration %}{{ range(b) }}{{ raise_exception(c) }}"]
)
def test_variables_that_a_template_reads(template: str) -> None:
    from transformers.utils.chat_template_utils import _get_template_variables

    assert templates.variables_of(template) == _get_template_variables(template)
