"""Tokens in log-probabilities: their texts, bytes and places, whole and streamed, however long a round is."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripted import MARKERS, TEMPLATES, scripted, tool
from servers import Running, running
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from outrider.decoder import Decoder
from outrider.drafters.model import model_drafter
from pairs import metaspace_tokenizer
from toys import random_table, table_lm

SMILE = "🙂"
PARTS = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\x99", r"bytes:\x82"]
CHAT: Any = [{"role": "user", "content": "Once"}]


def spaced() -> Any:
    pieces = metaspace_tokenizer().convert_ids_to_tokens(range(len(metaspace_tokenizer())))
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = metaspace_tokenizer().backend_tokenizer.decoder
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<end>")
    wrapped.chat_template = "{{ messages[0].content }}"
    return wrapped


def saying(tokenizer: Any, tokens: Sequence[str]) -> Decoder:
    ids = tokenizer.convert_tokens_to_ids([*tokens, "<end>"])
    assert len(set(ids)) == len(ids) and None not in ids
    table = random_table(len(tokenizer), 0)
    table[:, ids[0]] += 100
    for one, following in itertools.pairwise(ids):
        table[one, ids[0]] -= 100
        table[one, following] += 100
    lm, draft = table_lm(table), table_lm(table, name="draft")
    return Decoder(lm, tokenizer, frozenset([ids[-1]]), model_drafter(draft), num_draft_tokens=8)


def asked(server: Running, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of a response; and those that its stream adds up to are the same, for any K."""
    chat = path.startswith("chat")
    body = {"model": "toy", "temperature": 0, "prompt": None if chat else "Once"} | dict(body)
    with server.http() as http:
        whole = http.post(f"/v1/{path}", json=body).json()["choices"]
        for k in (0, 1, 2, 8):
            lines = http.post(f"/v1/{path}", json=body | {"num_draft_tokens": k, "stream": True}).text.split("\n\n")
            parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
            for choice in whole:
                of_choice = [part for part in parts if part["index"] == choice["index"]]
                for name, values in choice["logprobs"].items():
                    found = [item for part in of_choice if part["logprobs"] for item in part["logprobs"][name] or ()]
                    assert found == (values or [])
                shown = ""
                for part in () if chat else of_choice:  # tokens come with their text
                    shown += part["text"]
                    at_end = part["finish_reason"] is not None
                    assert at_end or all(at < len(shown) for at in part["logprobs"]["text_offset"])
                assert chat or shown == choice["text"]
    return whole


def sliced(choice: Mapping[str, Any]) -> list[str]:
    offsets = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    return [choice["text"][begin:end] for begin, end in itertools.pairwise(offsets)]


def test_logprobs_have_texts_and_places() -> None:
    """A character is at the place of its tokens; the end is after the text, and is no content of a chat."""
    tokens = ["▁upon", "<0xF0>", "<0x9F>", "<0x99>", "<0x82>", "▁a", "s", "▁time", "."]
    texts = [" upon", *PARTS, " a", "s", " time", ".", "<end>"]
    slices = [" upon", "", "", "", SMILE, " a", "s", " time", ".", ""]
    with running(saying(spaced(), tokens)) as server:
        ids = server.model.decoder.tokenizer.convert_tokens_to_ids([*tokens, "<end>"])
        for echo, as_ids in ((False, True), (True, False)):
            body = {"echo": echo, "n": 2, "logprobs": 20, "return_tokens_as_token_ids": as_ids}
            for choice in asked(server, "completions", body):
                own, values, tops = (
                    choice["logprobs"][name][echo:] for name in ("tokens", "token_logprobs", "top_logprobs")
                )
                assert choice["text"] == "Once" * echo + f" upon{SMILE} as time."
                assert sliced(choice) == ["Once"] * echo + slices
                assert own == ([f"token_id:{i}" for i in ids] if as_ids else texts)
                for token, value, top in zip(own, values, tops, strict=True):
                    assert top[token] == value and len(top) == 20
        for echo in (False, True):  # within a character
            (choice,) = asked(server, "completions", {"echo": echo, "logprobs": 0, "max_tokens": 3})
            assert choice["text"] == "Once" * echo + " upon\ufffd\ufffd"
            assert choice["logprobs"]["tokens"][echo:] == [" upon", *PARTS[:2]]
            assert sliced(choice) == ["Once"] * echo + [" upon", "", "\ufffd\ufffd"]
        (choice,) = asked(server, "chat/completions", {"messages": CHAT, "logprobs": True, "top_logprobs": 3})
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == texts[:-1]
        assert bytes(itertools.chain(*(one["bytes"] for one in content))).decode() == f" upon{SMILE} as time."
        for one in content:
            assert len(one["top_logprobs"]) == 3
            assert {key: one[key] for key in ("token", "logprob", "bytes")} == one["top_logprobs"][0]


def test_places_beyond_a_stop_string() -> None:
    with running(saying(spaced(), ["▁upon", "▁a", "▁time", "s", "."])) as server:
        (choice,) = asked(server, "completions", {"stop": ["n a times"], "logprobs": 0})
    assert choice["text"] == " upo" and choice["logprobs"]["text_offset"] == [0, 4, 4, 4]
    assert choice["logprobs"]["tokens"] == [" upon", " a", " time", "s"]


def test_logprobs_of_an_echo() -> None:
    """Of texts and of ids; special tokens are where they are written, and nowhere if they were added."""
    tokenizer = spaced()
    with running(saying(tokenizer, ["▁upon", "▁time"])) as server:
        for prompt, expected in (
            (f"Once a{SMILE}s.", ["Once", " a", *PARTS, "s", "."]),
            ("<s> Once a", ["<s>", " Once", " a"]),
            ("Once <s> a", ["Once", " ", "<s>", " a"]),
        ):
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
            for given in (prompt, ids, [tokenizer.bos_token_id, *ids]):
                (choice,) = asked(server, "completions", {"prompt": given, "echo": True, "logprobs": 1})
                text, found = choice["text"], choice["logprobs"]
                begun = len(text) - len(" upon time")
                assert text[:begun] == (prompt if given == prompt else tokenizer.decode(given))
                assert found["tokens"][-3:] == [" upon", " time", "<end>"]
                assert found["text_offset"][-3:] == [begun, begun + 5, len(text)]
                assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
                of_prompt = found["tokens"][-3 - len(expected) : -3]
                assert [one.strip() for one in of_prompt] == [one.strip() for one in expected]
                for token, part in zip(found["tokens"], sliced(choice), strict=True):
                    assert part in (token, "", SMILE)


THINK = {"<think>": False, "</think>": False}
CALL = ["<tool_call>", '{"name": "weather", ', '"arguments": {"city"', ': "Rome"}}', "</tool_call>"]


def test_tokens_of_content_alone() -> None:
    for script, expected in (
        (["<think>", "Hm", "</think>", "\n", "\nYes", " and", "\n", *CALL], ["\nYes", " and"]),
        (["<think>", "Hm", "</think>", *CALL, "\n", "So", "."], ["\n", "So", "."]),
        (["Yes", "\n", "<tool", "_call", " or so"], ["Yes", "\n", "<tool", "_call", " or so"]),
        (["Yes", "\n", "<tool_call>", "no"], ["Yes", "\n", "<tool_call>", "no"]),
    ):
        with running(scripted(script, TEMPLATES["hermes"], MARKERS["hermes"] | THINK, has_draft=True)) as server:
            body = {"messages": CHAT, "logprobs": True, "tools": [tool()]}
            (choice,) = asked(server, "chat/completions", body)
            assert [one["token"] for one in choice["logprobs"]["content"]] == expected
            assert "".join(expected).strip() == (choice["message"]["content"] or "").strip()
