"""A stream that is cut and resumed goes on as if it had not been: tokens and text. (All rules: tests/decoding.)"""

from typing import Any

import pytest

from outrider.api import load
from outrider.errors import OptionError
from pairs import byte_level_tokenizer, embedded, random_llama


def test_resumed_texts_equal_uncut() -> None:
    """Wherever it is, also within a stop string. The tokens before it are output to penalties and to limits."""
    decoder, prompt = embedded("float64"), "Once upon a time"
    (eos,) = decoder.eos_ids
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 24, "temperature": 0.9}
    (whole,) = decoder.generate(prompt, **options)
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 15, "logit_bias": {eos: 1e6}}
    for own in ({"stop": whole.text[24:38]}, penalties, penalties | {"max_new_tokens": 12}):
        (uncut,) = decoder.generate(prompt, **options | own)
        chunks = list(decoder.stream(prompt, **options | own))
        assert len(chunks) > 2
        for cut in range(1, len(chunks)):
            ids = [i for chunk in chunks[:cut] for i in chunk.token_ids]
            after = list(decoder.stream(prompt, resume_ids=ids, **options | own))
            assert "".join(chunk.text for chunk in [*chunks[:cut], *after]) == uncut.text
            assert (*ids, *(i for chunk in after for i in chunk.token_ids)) == uncut.token_ids


def test_a_cut_within_a_character() -> None:
    """The characters that were complete before the cut, and the text after it, are the whole text."""
    tokenizer = byte_level_tokenizer()
    decoder = load(random_llama(len(tokenizer)), tokenizer=tokenizer, acceptance="gumbel")
    prompt, letters = tokenizer("a").input_ids, tokenizer("🐉 é 你好").input_ids
    for cut in range(1, len(letters)):
        chunks = list(decoder.stream(prompt, resume_ids=letters[:cut], seed=1, max_new_tokens=cut + 4))
        whole = tokenizer.decode([*letters[:cut], *(i for chunk in chunks for i in chunk.token_ids)])
        given = tokenizer.decode(letters[:cut]).rstrip("\ufffd")
        assert given + "".join(chunk.text for chunk in chunks) == whole


def test_resume_refuses_other_texts() -> None:
    decoder = embedded()
    (done,) = decoder.generate("Once", seed=1, max_new_tokens=8, temperature=0.0)
    for options, message in (
        ({"max_new_tokens": 8}, "8 tokens' is invalid: the output is complete"),
        ({"max_new_tokens": 20, "stop": done.text[:4]}, "the output ended with this token"),
    ):
        with pytest.raises(OptionError, match=message):
            decoder.stream("Once", resume_ids=done.token_ids, **options)
    with pytest.raises(OptionError, match="token ids from 0 to"):
        decoder.stream("Once", resume_ids=[-1])
    with pytest.raises(OptionError, match="one list for each of the 2 completions"):
        decoder.stream_many(["a", "b"], resume_ids=[[1]])
    with pytest.raises(OptionError, match="a list of token ids for each prompt"):
        decoder.stream("Once", resume_ids="ab")
