"""Chats: messages in parts, and options, in the form that the template takes. Nothing is dropped silently."""

import dataclasses
import functools
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.errors import OptionError, PromptError
from outrider.options import CallOptions
from outrider.text.chat import Chat, ChatChanges, ChatOptions, chat_text, ends_text, turn_end
from outrider.text.tokenizer import encode
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
    """As text or in parts, for templates that take either, and for those that change the text; the last message can be
    continued."""
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    for template in (OF_STRINGS, OF_PARTS):
        for content in ("w1 w2", parts):
            user = {"role": "user", "content": content}
            assert written(template, [{"role": "system", "content": "w0"}, user]) == "[system] w0 [user] w1 w2 "
            assert written(template, [user], system="w0") == "[system] w0 [user] w1 w2 "
        messages = [USER, {"role": "assistant", "content": "w2 w3"}]
        assert written(template, messages, continue_final_message=True) == "[user] w1 [assistant] w2 w3"
    for change, want in ((" | upper", "W1 W2"), ("[:4]", "w1 w"), (".replace('1', '')", "w w2")):
        assert written("{{ messages[0].content" + change + " }}", "w1 w2") == want


NO_CHATS: list[tuple[Any, str]] = [
    ([], "a chat is a list of messages, at least one"),
    (USER, "a chat is a list of messages, at least one"),
    ([{"role": None, "content": "w1"}], "message 0 is not an object with a 'role' and a 'content'"),
    ([USER, "w1"], "message 1 is not an object with a 'role' and a 'content'"),
    ([{"role": "user"}], "the content of message 0 is text"),
    ([{"role": "assistant", "refusal": 5}], "a part of type 'refusal'"),
    ([{"role": "user", "content": [{"type": "image", "url": "a.png"}]}], "message 0 has a part of type 'image': only"),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "a part of type 'text'"),
    ([{"role": "user", "content": ["w1"]}], "a part of type 'str'"),
    ([{"role": "user", "content": 5}], "the content of message 0 is text, or a list of parts of text"),
]
BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"system": 5}, "system = 5 is invalid: a string"),
    ({"tools": {"name": "w7"}}, "tools = .* is invalid: a list"),
    ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs = .* an object"),
    ({"continue_final_message": "content"}, "continue_final_message = 'content' is invalid: true or false"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "no new message begins"),
]
NOT_READ: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL]}, "tools = .* the model's chat template does not read it"),
    ({"documents": [{"title": "w5"}]}, "documents = .* does not read it"),
    ({"chat_template": "rag"}, "chat_template = 'rag' .* no named templates"),
    ({"add_generation_prompt": False}, "add_generation_prompt = False is invalid: .* does not read it"),
    ({"chat_template_kwargs": {"thinking": True}}, "does not read 'thinking', but enable_thinking, style"),
    ({"chat_template_kwargs": {"tools": [TOOL]}}, "'tools' is not one of them"),
    ({"chat_template_kwargs": {"reasoning_effort": "low"}}, "does not read 'reasoning_effort'"),
    ({"system": "w0"}, "system = 'w0' is invalid: the model's chat template skips system messages"),
]


def test_what_is_no_chat_and_what_no_template_reads_is_refused() -> None:
    """Rather than written as Python shows it, or dropped."""
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
    chats = {field.name for field in dataclasses.fields(ChatOptions)}
    assert ChatChanges.__annotations__.keys() == chats | CallOptions.__annotations__.keys()


def test_an_assistant_may_refuse_or_say_nothing() -> None:
    """As in OpenAI's chats. Templates know no refusals: these are text."""
    answers: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"content": None, "refusal": None, "tool_calls": []}, ""),
        ({"content": [{"type": "refusal", "refusal": "w5"}]}, "w5"),
        ({"content": "w4 ", "refusal": "w5", "tool_calls": [TOOL]}, "w4 w5"),
    ]
    for answer, want in answers:
        chat = Chat([USER, {"role": "assistant", **answer}])
        assert chat_text(with_template(OF_STRINGS), chat) == f"[user] w1 [assistant] {want} "
        assert Chat(chat.messages) == chat


def test_options_reach_the_template() -> None:
    """So do calls of tools and their results; a template may be chosen by its name."""

    def w6(place: str) -> str:
        """Tell the weather.

        Args:
            place: a town.
        """
        return place

    assert written(WITH_TOOLS, "w1") == "w9 [user] w1 [assistant]"
    assert written(WITH_TOOLS, "w1", add_generation_prompt=False) == "w9 [user] w1 "
    assert written(WITH_TOOLS, "w1", chat_template_kwargs={"enable_thinking": False}).endswith("[assistant]</think>")
    given = {"tools": [TOOL, w6], "documents": [{"title": "w5", "text": ""}], "chat_template_kwargs": {"date": "w8"}}
    assert written(WITH_TOOLS, "w1", **given) == "w8 <w7> <w6> (w5) [user] w1 [assistant]"
    assert written(OF_STRINGS, "w1", chat_template="{{ messages[0].content }}!") == "w1!"
    call = {"id": "c1", "type": "function", "function": {"name": "w7", "arguments": {"w": 1}}}
    for content in ({"content": None}, {"content": ""}, {}):
        called = {"role": "assistant", "tool_calls": [call], **content}
        messages = [USER, called, {"role": "tool", "tool_call_id": "c1", "content": "w2"}]
        want = 'w9 <w7> [user] w1 [assistant] {"name": "w7", "arguments": {"w": 1}} [tool] w2 [assistant]'
        assert written(WITH_TOOLS, messages, tools=[TOOL]) == want
    templates = {"default": "w1 {{ add_generation_prompt }}", "tool_use": "w2 {{ tools | length }}", "short": "w3"}
    found = [written(templates, "w1", **own) for own in ({}, {"tools": [TOOL]}, {"chat_template": "short"})]
    assert found == ["w1 True", "w2 1", "w3"]
    # No effort is no thinking, whatever a template calls it; most have no word for it.
    for template, want in (("{{ reasoning_effort }}", "none"), ("{{ enable_thinking }}", "False"), ("w", "w")):
        assert written(template, "w1", chat_template_kwargs={"reasoning_effort": "none"}) == want


@pytest.mark.parametrize(
    "template",
    [
        OF_STRINGS,
        "{% if messages[1].role != 'user' %}{{ raise_exception('one system message') }}{% endif %}" + OF_STRINGS,
        "{% for m in messages if m == messages[0] or m.role == 'user' %}[{{ m.role }}] {{ m.content }} {% endfor %}",
    ],
    ids=["of several", "fails", "skips"],
)
def test_system_messages_are_joined_where_the_template_takes_one(template: str) -> None:
    """Those at the beginning. The role ``developer`` is another name for the same."""
    first = [{"role": "system", "content": "w1"}, {"role": "developer", "content": "w2"}]
    want = "[system] w1 [system] w2 [user] w1 " if template == OF_STRINGS else "[system] w1\n\nw2 [user] w1 "
    assert written(template, [*first, USER]) == want
    assert written(template, [first[1], USER]) == "[system] w2 [user] w1 "
    with pytest.raises(OptionError, match="the chat has a system message"):
        Chat([first[1], USER], ChatOptions(system="w1"))
    if template != OF_STRINGS:
        with pytest.raises(PromptError, match="chat template"):
            written(template, [USER, *first, USER])


def test_a_message_that_the_template_skips_is_refused() -> None:
    """Also where its text occurs elsewhere in the chat, and one among many."""
    template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    for role in ("system", "tool", "usr"):
        with pytest.raises(PromptError, match=f"skips messages of the role '{role}'"):
            written(template, [{"role": role, "content": "w1"}, {"role": "user", "content": "w1 w2"}])
    template = "{% for m in messages %}{% if 'w3' not in m.content %}{{ m.content }} {% endif %}{% endfor %}"
    messages = [USER, *[{"role": "tool", "content": "w2"}] * 50]
    messages[30] = {"role": "tool", "content": "w3"}
    with pytest.raises(PromptError, match="skips messages of the role 'tool'"):
        written(template, messages)
    for template in ("{{ raise_exception('no system') }}", "{% if %}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(PromptError, match="the model's chat template does not accept these messages: "):
            written(template, "w1")
    with pytest.raises(PromptError, match="no chat template"):
        encode(word_tokenizer(), Chat("w1"))


@pytest.mark.parametrize("template", [OF_STRINGS, WITH_TOOLS, OF_STRINGS.replace("m.content", "m.content | upper")])
def test_a_long_chat_is_not_written_once_for_each_message(template: str) -> None:
    """Results of tools, and texts that the template changes: a template takes as long as the chat is."""
    tokenizer = with_template(template)
    write, num_written = tokenizer.apply_chat_template, 0

    @functools.wraps(write)
    def counted(*args: Any, **options: Any) -> Any:
        nonlocal num_written
        num_written += 1
        return write(*args, **options)

    tokenizer.apply_chat_template = counted
    messages = [USER, *[{"role": "tool", "content": "w2"}] * 200]
    assert chat_text(tokenizer, Chat(messages)).lower().count("w2") == 200
    assert num_written <= 12


# A chat ends with its template's end of a turn, too; other texts end as in ``generate``.

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
    "{% for m in messages %}{{ m.content[:3] }}<|im_end|>{% endfor %}": None,
    # The same token ends a thought, or the content before a call.
    "{% for m in messages %}{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_end|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}": None,
    "{% for m in messages %}{{ m.content }}<|im_end|>"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}<|im_end|>{% endfor %}{% endfor %}": None,
    "{{ raise_exception('only tools') }}": None,
    "{% for m in messages %}{{ m.content }}{{ m.content.none.none }}{% endfor %}": None,
}


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["user", "assistant", "Hi", *(f"w{i}" for i in range(30))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="w0")
    specials = ["<|im_start|>", "<|im_end|>", "<eos>", "<|im_end|>s"]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", _TEMPLATES)
def test_the_end_that_a_template_writes(template: str) -> None:
    tokenizer = _tokenizer(template)
    name = _TEMPLATES[template]
    assert turn_end(tokenizer) == (None if name is None else tokenizer.convert_tokens_to_ids(name))
    assert turn_end(None) is turn_end(_tokenizer()) is None


@pytest.mark.parametrize("drafter", [NO_DRAFTER, ngram_drafter()])
def test_chats_end_there_and_other_texts_do_not(drafter: Drafter) -> None:
    tokenizer = _tokenizer(_CHATML)
    end, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<eos>"))
    assert isinstance(end, int) and isinstance(eos, int)
    decoder = Decoder(as_lm(tiny_llama()), tokenizer, frozenset([eos]), drafter, turn_ids=frozenset([end]))
    options: dict[str, Any] = {"logit_bias": {end: 100.0}, "max_new_tokens": 4, "num_draft_tokens": 3}
    chat = [{"role": "user", "content": "Hi"}]
    for prompt in (chat, Chat(chat), decoder.encode(chat), tokenizer.apply_chat_template(chat, tokenize=False)):
        for own, want in (({}, ("eos", 1)), ({"ignore_eos": True}, ("length", 4))):
            (output,) = decoder.generate([prompt], **own, **options)
            assert (output.finish_reason, output.token_ids) == (want[0], (end,) * want[1])
    (output,) = decoder.generate(["Hi w1"], **options)
    assert (output.finish_reason, output.token_ids) == ("length", (end,) * 4)
    text = ends_text("m", tokenizer, [eos], [end])
    assert text == f"m: texts end with {eos} <eos>; chats also with {end} <|im_end|>"
    assert ends_text("m", None, [], []) == "m: texts end with no token"
