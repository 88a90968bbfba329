"""A stream that is cut and resumed goes on as if it had not been: tokens and text. (All rules: tests/decoding.)"""

import pytest

from outrider.api import load
from outrider.decoder import Decoder
from outrider.errors import OptionError
from pairs import byte_level_tokenizer, embedded, random_llama


def _parts(decoder: Decoder, prompt: str, cut: int, **options: object) -> tuple[str, str, tuple[int, ...]]:
    """The text before the cut, after so many chunks; the text after it; and all tokens."""
    before, ids = "", []
    for number, chunk in enumerate(decoder.stream(prompt, **options)):
        if number == cut:
            break
        before += chunk.text
        ids += chunk.token_ids
    after = list(decoder.stream(prompt, resume_ids=ids, **options))
    return before, "".join(chunk.text for chunk in after), (*ids, *(i for chunk in after for i in chunk.token_ids))


def test_a_stop_string_across_the_cut() -> None:
    """Wherever it is cut; and after a cut within the stop string the part before it was held back, and is not text."""
    decoder = embedded("float64")
    options = {"seed": 3, "max_new_tokens": 24, "temperature": 0.9}
    (whole,) = decoder.generate("Once upon a time", **options)
    stop = whole.text[24:38]
    (uncut,) = decoder.generate("Once upon a time", stop=stop, **options)
    assert uncut.finish_reason == "stop" and uncut.text == whole.text[: whole.text.index(stop)]
    num_chunks = len(list(decoder.stream("Once upon a time", stop=stop, **options)))
    assert num_chunks > 3
    for cut in range(1, num_chunks):
        before, after, ids = _parts(decoder, "Once upon a time", cut, stop=stop, **options)
        assert before + after == uncut.text
        assert ids == uncut.token_ids


def test_a_cut_within_a_character() -> None:
    """Each character is several tokens; cut after every token. The characters that were complete before the cut, and
    the text after it, are the whole text."""
    tokenizer = byte_level_tokenizer()
    decoder = load(random_llama(len(tokenizer)), tokenizer=tokenizer, acceptance="gumbel")
    prompt, letters = tokenizer("a").input_ids, tokenizer("🐉 é 你好").input_ids
    for cut in range(1, len(letters)):
        chunks = list(decoder.stream(prompt, resume_ids=letters[:cut], seed=1, max_new_tokens=cut + 4))
        whole = tokenizer.decode([*letters[:cut], *(i for chunk in chunks for i in chunk.token_ids)])
        given = tokenizer.decode(letters[:cut]).rstrip("\ufffd")
        assert given + "".join(chunk.text for chunk in chunks) == whole


def test_tokens_before_the_cut_are_output() -> None:
    """To the penalties that count output, to ``min_tokens`` and to ``max_new_tokens``."""
    decoder = embedded("float64")
    (eos,) = decoder.eos_ids
    options = {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_tokens": 15, "logit_bias": {eos: 1e6}}
    for limit in (12, 30):
        settings = {"seed": 3, "max_new_tokens": limit, **options}
        (uncut,) = decoder.generate("Once upon a time", **settings)
        assert len(uncut.token_ids) == min(limit, 16)
        for cut in range(1, len(list(decoder.stream("Once upon a time", **settings))), 2):
            before, after, ids = _parts(decoder, "Once upon a time", cut, **settings)
            assert (before + after, ids) == (uncut.text, uncut.token_ids)


def test_what_cannot_be_resumed() -> None:
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
    for form in ([[1]], "ab", 5):
        with pytest.raises(OptionError, match="a list of token ids for each prompt"):
            decoder.stream("Once", resume_ids=form)
