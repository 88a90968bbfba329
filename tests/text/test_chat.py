"""Messages in parts: their text is written, in the form that the template takes; what is not text is refused."""

from typing import Any

import pytest

from outrider.errors import PromptError
from outrider.text.chat import chat_text
from pairs import word_tokenizer

OF_STRINGS = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
OF_PARTS = "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ p.text }}{% endfor %} {% endfor %}"


def with_template(template: str) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", [OF_STRINGS, OF_PARTS])
def test_parts_of_text_are_text(template: str) -> None:
    """As text or in parts, for templates that take either."""
    want = "[system] w0 [user] w1 w2 "
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    for content in ("w1 w2", parts):
        messages = [{"role": "system", "content": "w0"}, {"role": "user", "content": content}]
        assert chat_text(with_template(template), messages) == want


@pytest.mark.parametrize("change", ["[:4]", " | upper", ".replace('1', '')", ".title().strip()"])
def test_a_template_may_change_the_text(change: str) -> None:
    """Then the text is not in what it writes. That of a list, as Python shows it, may be, or the template fails."""
    template = "{{ messages[0].content" + change + " }}"
    want = {"[:4]": "w1 w", " | upper": "W1 W2", ".replace('1', '')": "w w2", ".title().strip()": "W1 W2"}[change]
    assert chat_text(with_template(template), [{"role": "user", "content": "w1 w2"}]) == want


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "url": "a.png"}], "message 0 has a part of type 'image': only text can be given here"),
        ([{"type": "text", "text": "w1"}, {"type": "image_url", "image_url": {}}], "a part of type 'image_url'"),
        (["w1"], "a part of type 'str'"),
        ({"type": "text", "text": "w1"}, "the content of message 0 is text, or a list of parts of text"),
        (5, "the content of message 0"),
    ],
)
def test_what_is_not_text_is_refused(content: Any, message: str) -> None:
    """Rather than written as Python shows it."""
    with pytest.raises(PromptError, match=message):
        chat_text(with_template(OF_STRINGS), [{"role": "user", "content": content}])


@pytest.mark.parametrize("message", [{"content": "w1"}, {"role": None, "content": "w1"}, "w1"])
def test_messages_have_a_role(message: Any) -> None:
    with pytest.raises(PromptError, match="message 1 is not an object with a 'role' and a 'content'"):
        chat_text(with_template(OF_STRINGS), [{"role": "user", "content": "w1"}, message])


def test_a_message_may_have_no_text() -> None:
    """Calls of tools are the template's own matter."""
    template = "{% for m in messages %}{{ m.content or m.tool_calls }} {% endfor %}"
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": None, "tool_calls": ["w2"]}]
    assert chat_text(with_template(template), messages) == "w1 ['w2'] "
