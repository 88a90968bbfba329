"""Chat templates: programs in Jinja, by the authors of models, that write the text of a chat.

They run in a sandbox and see plain values alone. Variables, functions and errors are those of Transformers'
``apply_chat_template``, whose texts are the same (tests/text/test_templates.py). Jinja is imported here and nowhere
else, since many runs have no chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from types import FunctionType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of a message's thoughts, which templates read
_PLAIN: dict[type, Callable[[Any], Any]] = {str: str.__str__, int: int.__int__, float: float.__float__}
_END = "HERE THE OUTPUT GOES ON "  # after a message that is continued; templates may strip the space


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
) -> str:
    """Text of a chat. Raises TemplateError, or any error of Python's: the template does not accept it."""
    if not (read := [*map(_message, _plain(messages))]):
        raise ValueError("the chat has no messages")
    if continue_final_message and add_generation_prompt:
        raise ValueError("a chat whose last message goes on has no prompt for a new one")
    program = _compiled(template)
    schemas = None if tools is None else [_plain(_schema(tool)) for tool in tools]
    if not all(isinstance(document, Mapping) for document in documents or ()):
        raise TypeError("a document is an object with a 'title' and a 'text'")
    last = _marked(template, read[-1]) if continue_final_message else ""
    text = program.render(
        _plain(variables),
        messages=read,
        tools=schemas,
        documents=_plain(documents),
        add_generation_prompt=add_generation_prompt,
    )
    if not continue_final_message:
        return text
    at = text.rfind(_END.strip())
    if at < 0 or last.strip() not in text:
        raise ValueError("the chat template changes the last message, so that it cannot be continued")
    return text[:at] if text.startswith(_END, at) else text[:at].rstrip()


@lru_cache(maxsize=8)
def variables_of(template: str) -> frozenset[str]:
    """Variables that a template reads."""
    return frozenset(find_undeclared_variables(_compiled(template).environment.parse(template)))


def _message(message: Any) -> dict[str, Any]:
    """A message without fields that are None, which many templates write as a word; its thoughts have all names."""
    if not isinstance(message, dict):
        raise TypeError(f"a message is an object, not {message!r:.200}")
    read = {name: value for name, value in message.items() if value is not None}
    thoughts = next((read[name] for name in _THOUGHTS if name in read), None)
    return read if thoughts is None else {"thinking": thoughts, **read, "reasoning_content": thoughts}


def _marked(template: str, message: dict[str, Any]) -> str:
    """The text of a message, or its last part of text, to which ``_END`` is added. Raises ValueError: there is none."""
    content = message.get("content")
    if content is None or "content" not in template:
        raise ValueError("the last message cannot be continued: it has no content, or the chat template reads none")
    if isinstance(content, str):
        message["content"] = content + _END
        return content
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("the last message cannot be continued: it has no text")
    text: str = part["text"]
    part["text"] += _END
    return text


def _schema(tool: Any) -> Any:
    if isinstance(tool, Mapping):
        return tool
    if not isinstance(tool, FunctionType | MethodType):
        raise ValueError(f"a tool is a JSON schema or a Python function, not {tool!r:.200}")
    from transformers.utils import get_json_schema

    return get_json_schema(tool)


def _plain(value: Any) -> Any:
    """A value made of nothing that could run: other objects have methods, which a template could call. Raises
    TypeError."""
    if value is None or isinstance(value, bool):
        return value
    for kind, plain in _PLAIN.items():
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_plain, value)] if isinstance(value, list) else tuple(map(_plain, value))
    if callable(getattr(value, "model_dump", None)):  # of Pydantic
        return _plain(value.model_dump())
    raise TypeError(f"chats and their variables are values of JSON, not {value!r:.200}")


@lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _json
    environment.globals |= {"raise_exception": _raise, "dict": _Dict(), "namespace": _Namespace}
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


class _Generation(Extension):
    """The tag around text that a model has written, which has a scope of its own."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Dict:
    """``dict`` for templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """``namespace`` for templates, whose names do not begin with an underscore, as those of Python's own do."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"chat templates store nothing in {name!r}: names do not begin with an underscore")
        super().__setitem__(name, value)


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON of a value, with these options alone: others call functions outside of the sandbox."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)
