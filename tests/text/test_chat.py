"""Chats: messages in parts, and options, in the form that the template takes. Nothing is dropped silently."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.decoder import Decoder
from outrider.drafters.lookups import ngram_drafter
from outrider.errors import OptionError, PromptError
from outrider.text.chat import Chat, ChatOptions, chat_text, ends_text, turn_end
from pairs import word_tokenizer
from toys import as_lm, tiny_llama

OF_STRINGS = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
OF_PARTS = "{% for m in messages %}[{{ m.role }}] {% for p in m.content %}{{ p.text }}{% endfor %} {% endfor %}"
WITH_TOOLS = (  # with a default that is set only where it is missing, and the tag of Transformers
    "{% if not date is defined %}{% set date = 'w9' %}{% endif %}{{ date }} "
    "{% for tool in tools or [] %}<{{ tool.function.name }}> {% endfor %}"
    "{% for d in documents or [] %}({{ d.title }}) {% endfor %}"
    "{% for m in messages %}[{{ m.role }}] {% generation %}{{ m.content or '' }}{% endgeneration %}"
    "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if enable_thinking is false %}</think>{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "w7", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "w1"}


def with_template(template: Any) -> Any:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def written(template: Any, messages: Any, **options: Any) -> str:
    return chat_text(with_template(template), Chat(messages, ChatOptions(**options)))


def test_parts_of_text_are_text() -> None:
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    for template in (OF_STRINGS, OF_PARTS):
        for content in ("w1 w2", parts):
            assert written(template, [{"role": "user", "content": content}], system="w0") == "[system] w0 [user] w1 w2 "
        messages = [USER, {"role": "assistant", "content": "w2 w3"}]
        assert written(template, messages, continue_final_message=True) == "[user] w1 [assistant] w2 w3"
    for change, want in ((" | upper", "W1 W2"), ("[:4]", "w1 w"), (".replace('1', '')", "w w2")):
        assert written("{{ messages[0].content" + change + " }}", "w1 w2") == want


NO_CHATS: list[tuple[Any, str]] = [
    ([], "a chat is a list of messages, at least one"),
    ([{"role": None, "content": "w1"}], "message 0 is not an object with a 'role' and a 'content'"),
    ([{"role": "user"}], "the content of message 0 is text"),
    ([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], "message 0 has a part of type 'image': only"),
    ([{"role": "user", "content": 5}], "the content of message 0 is text, or a list of parts of text"),
]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"tools": {"name": "w7"}}, "tools = .* is invalid: a list"),
    ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs = .* an object"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "no new message begins"),
]
NOT_READ: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL]}, "tools = .* the model's chat template does not read it"),
    ({"chat_template": "rag"}, "chat_template = 'rag' .* no named templates"),
    ({"chat_template_kwargs": {"thinking": True}}, "does not read 'thinking', but enable_thinking, style"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "does not read 'reasoning_effort'"),
    ({"system": "w0"}, "system = 'w0' is invalid: the model's chat template skips system messages"),
]


def test_what_is_no_chat_and_what_no_template_reads_is_refused() -> None:
    for messages, message in NO_CHATS:
        with pytest.raises(PromptError, match=message):
            Chat(messages)
    for options, message in BAD_OPTIONS:
        with pytest.raises(OptionError, match=message):
            ChatOptions(**options)
    template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
        "{% if enable_thinking or style %}{{ eos_token }}{% endif %}"
    )
    for options, message in NOT_READ:
        with pytest.raises(OptionError, match=message):
            written(template, "w1", **options)
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    for failing in ("{{ 1 // 0 }}", "{{ 2.0**5000 }}", "{{ ''.encode('zz') }}", "{{ 'a' * 10**15 }}", endless):
        with pytest.raises(PromptError, match="chat template does not accept these messages: .*[a-z]"):
            written(failing, "w1")


def test_an_assistant_may_refuse_or_say_nothing() -> None:
    """As in OpenAI's chats. Templates know no refusals: these are text."""
    for answer, want in (
        ({"content": None, "refusal": None, "tool_calls": []}, ""),
        ({"content": "w4 ", "refusal": "w5", "tool_calls": [TOOL]}, "w4 w5"),
    ):
        chat = Chat([USER, {"role": "assistant", **answer}])
        assert chat_text(with_template(OF_STRINGS), chat) == f"[user] w1 [assistant] {want} "


def test_options_reach_the_template() -> None:

    assert written(WITH_TOOLS, "w1") == "w9 [user] w1 [assistant]"
    assert written(WITH_TOOLS, "w1", add_generation_prompt=False) == "w9 [user] w1 "
    assert written(WITH_TOOLS, "w1", chat_template_kwargs={"enable_thinking": False}).endswith("[assistant]</think>")
    given = {"tools": [TOOL], "documents": [{"title": "w5", "text": ""}], "chat_template_kwargs": {"date": "w8"}}
    assert written(WITH_TOOLS, "w1", **given) == "w8 <w7> (w5) [user] w1 [assistant]"
    assert written(OF_STRINGS, "w1", chat_template="{{ messages[0].content }}!") == "w1!"
    call = {"id": "c1", "type": "function", "function": {"name": "w7", "arguments": {"w": 1}}}
    called = {"role": "assistant", "tool_calls": [call]}
    want = 'w9 <w7> [user] w1 [assistant] {"name": "w7", "arguments": {"w": 1}} [tool] w2 [assistant]'
    assert written(WITH_TOOLS, [USER, called, {"role": "tool", "content": "w2"}], tools=[TOOL]) == want
    templates = {"default": "w1 {{ add_generation_prompt }}", "tool_use": "w2 {{ tools | length }}", "short": "w3"}
    found = [written(templates, "w1", **own) for own in ({}, {"tools": [TOOL]}, {"chat_template": "short"})]
    assert found == ["w1 True", "w2 1", "w3"]
    # No effort is no thinking, whatever a template calls it; most have no word for it.
    for template, want in (("{{ reasoning_effort }}", "none"), ("{{ enable_thinking }}", "False"), ("w", "w")):
        assert written(template, "w1", chat_template_kwargs={"reasoning_effort": "none"}) == want


def test_system_messages_are_joined_where_the_template_takes_one() -> None:
    """Those at the beginning. The role ``developer`` is another name for the same."""
    first = [{"role": "system", "content": "w1"}, {"role": "developer", "content": "w2"}]
    only = "{% if messages[1].role != 'user' %}{{ raise_exception('one system message') }}{% endif %}" + OF_STRINGS
    skips = OF_STRINGS.replace("in messages", "in messages if m == messages[0] or m.role == 'user'")
    for template, want in ((OF_STRINGS, "w1 [system] w2"), (only, "w1\n\nw2"), (skips, "w1\n\nw2")):
        assert written(template, [*first, USER]) == f"[system] {want} [user] w1 "
        assert written(template, [first[1], USER]) == "[system] w2 [user] w1 "
    with pytest.raises(OptionError, match="the chat has a system message"):
        Chat([first[1], USER], ChatOptions(system="w1"))
    with pytest.raises(PromptError, match="chat template"):
        written(only, [USER, *first, USER])


def test_a_message_that_the_template_skips_is_refused() -> None:
    template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    with pytest.raises(PromptError, match="skips messages of the role 'system'"):
        written(template, [{"role": "system", "content": "w1"}, {"role": "user", "content": "w1 w2"}])
    template = "{% for m in messages %}{% if 'w3' not in m.content %}{{ m.content }} {% endif %}{% endfor %}"
    messages = [USER, *[{"role": "tool", "content": "w2"}] * 50]
    messages[30] = {"role": "tool", "content": "w3"}
    with pytest.raises(PromptError, match="skips messages of the role 'tool'"):
        written(template, messages)
    for template in ("{{ raise_exception('no system') }}", "{% if %}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(PromptError, match="the model's chat template does not accept these messages: "):
            written(template, "w1")


_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEMPLATES = {
    _CHATML: "<|im_end|>",
    # As in channels: other turns end with another token.
    "{% for m in messages %}{{ m.content }}{{ ' <eos>' if loop.last else '<|im_end|>' }}{% endfor %}": "<eos>",
    "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}": "<eos>",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": None,
    # The same token ends a thought, or the content before a call.
    "{% for m in messages %}{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_end|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}": None,
    "{% for m in messages %}{{ m.content }}<|im_end|>"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}<|im_end|>{% endfor %}{% endfor %}": None,
    "{{ raise_exception('only tools') }}": None,
}


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>", "bos_token": "<|im_start|>"})
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_end|>s"]})
    tokenizer.chat_template = template
    return tokenizer


def test_the_end_that_a_template_writes() -> None:
    for template, name in _TEMPLATES.items():
        tokenizer = _tokenizer(template)
        assert turn_end(tokenizer) == (None if name is None else tokenizer.convert_tokens_to_ids(name))
    assert turn_end(None) is turn_end(_tokenizer()) is None


def test_chats_end_there_and_other_texts_do_not() -> None:
    tokenizer = _tokenizer(_CHATML)
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<eos>"])
    lm = as_lm(tiny_llama(vocab_size=len(tokenizer)))
    decoder = Decoder(lm, tokenizer, frozenset([eos]), ngram_drafter(), turn_ids=frozenset([end]))
    options: dict[str, Any] = {"logit_bias": {end: 100.0}, "max_new_tokens": 4, "num_draft_tokens": 3}
    chat = [USER]
    for prompt in (chat, Chat(chat), decoder.encode(chat), tokenizer.apply_chat_template(chat, tokenize=False)):
        (output,) = decoder.generate([prompt], **options)
        assert (output.finish_reason, output.token_ids) == ("eos", (end,))
    for prompt, own in ((chat, {"ignore_eos": True}), ("w3 w1", {})):
        (output,) = decoder.generate([prompt], **own, **options)
        assert (output.finish_reason, output.token_ids) == ("length", (end,) * 4)
    text = ends_text("m", tokenizer, [eos], [end])
    assert text == f"m: texts end with {eos} <eos>; chats also with {end} <|im_end|>"
