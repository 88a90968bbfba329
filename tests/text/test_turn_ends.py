"""A chat ends with its template's end of a turn, too; other texts end as in ``generate``."""

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from outrider.decoder import Decoder
from outrider.drafters.base import NO_DRAFTER, Drafter
from outrider.drafters.lookups import ngram_drafter
from outrider.text.chat import Chat, ends_text, turn_end
from toys import as_lm, tiny_llama

_SPECIALS = ["<|im_start|>", "<|im_end|>", "<eos>", "<|im_end|>s"]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAST = "{% for m in messages %}{{ m.content }}{% if loop.last %} <eos>{% else %}<|im_end|>{% endif %}{% endfor %}"
# The same token ends a thought, or the content before a call.
_PARTS = (
    "{% for m in messages %}{% if m.reasoning_content %}{{ m.reasoning_content }}<|im_end|>{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
_CALLS = (
    "{% for m in messages %}{{ m.content }}<|im_end|>"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}<|im_end|>{% endfor %}{% endfor %}"
)
_TEMPLATES = {
    _CHATML: "<|im_end|>",
    _LAST: "<eos>",  # as in channels: other turns end with another token
    "{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}": "<eos>",
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}": None,
    "{% for m in messages %}{{ m.content[:3] }}<|im_end|>{% endfor %}": None,
    _PARTS: None,
    _CALLS: None,
    "{{ raise_exception('only tools') }}": None,
    "{% for m in messages %}{{ m.content }}{{ m.content.none.none }}{% endfor %}": None,
}


def _tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    words = ["user", "assistant", "Hi", *(f"w{i}" for i in range(30))]
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="w0")
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIALS})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("template", _TEMPLATES)
def test_the_end_that_a_template_writes(template: str) -> None:
    tokenizer = _tokenizer(template)
    name = _TEMPLATES[template]
    assert turn_end(tokenizer) == (None if name is None else tokenizer.convert_tokens_to_ids(name))


def test_models_without_a_template() -> None:
    assert turn_end(None) is None
    assert turn_end(_tokenizer()) is None


@pytest.mark.parametrize("drafter", [NO_DRAFTER, ngram_drafter()])
def test_chats_end_there_and_other_texts_do_not(drafter: Drafter) -> None:
    tokenizer = _tokenizer(_CHATML)
    end, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<eos>"))
    assert isinstance(end, int) and isinstance(eos, int)
    lm = as_lm(tiny_llama())
    decoder = Decoder(lm, tokenizer, frozenset([eos]), drafter, turn_ids=frozenset([end]))
    options: dict[str, Any] = {"logit_bias": {end: 100.0}, "max_new_tokens": 4, "num_draft_tokens": 3}
    chat = [{"role": "user", "content": "Hi"}]
    for prompt in (chat, Chat(chat), decoder.encode(chat), tokenizer.apply_chat_template(chat, tokenize=False)):
        (output,) = decoder.generate([prompt], **options)
        assert (output.finish_reason, output.token_ids) == ("eos", (end,))
        (output,) = decoder.generate([prompt], ignore_eos=True, **options)
        assert (output.finish_reason, len(output.token_ids)) == ("length", 4)
    (output,) = decoder.generate(["Hi w1"], **options)
    assert (output.finish_reason, output.token_ids) == ("length", (end,) * 4)
    assert decoder.ends_of([1, 2]) == {eos}
    assert decoder.ends_of(decoder.encode(chat)) == {eos, end}


def test_the_line_names_them() -> None:
    tokenizer = _tokenizer(_CHATML)
    end, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_end|>", "<eos>"))
    assert isinstance(end, int) and isinstance(eos, int)
    text = ends_text("m", tokenizer, [eos], [end])
    assert text == f"m: texts end with {eos} <eos>; chats also with {end} <|im_end|>"
    assert ends_text("m", None, [], []) == "m: texts end with no token"
    assert ends_text("m", None, [3], [3]) == "m: texts end with 3"
