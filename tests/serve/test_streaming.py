"""Text over HTTP, with the clients that people use: it is the library's own text, whatever the neighbours."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI
from servers import Running, running

from outrider.api import load
from outrider.decoder import Decoder
from outrider.records import Completion
from outrider.serve.about import fingerprint_of, same_bytes_of
from outrider.serve.bodies import CompletionBody
from pairs import embedded, random_llama, word_tokenizer

PROMPT = "Once upon a time there was a"


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return embedded("float64")


@pytest.fixture(scope="module")
def server(decoder: Decoder) -> Iterator[Running]:
    with running(decoder, context_len=512, names=("fable", "another-name")) as one:
        yield one


def alone(decoder: Decoder, prompt: object, **options: object) -> Completion:
    (completion,) = decoder.generate([prompt], **options)
    return completion


def test_the_text_is_that_of_the_library(decoder: Decoder, client: OpenAI) -> None:
    mine = {"top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "min_tokens": 3}
    named = {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    asked: dict[str, Any] = {"model": "fable", "prompt": PROMPT, "seed": 3, "max_tokens": 16, **named}
    asked |= {"logit_bias": {"11": -4.0, "12": 3.0}, "extra_body": mine, "logprobs": 2}
    answer = client.completions.create(**asked)
    more = {"seed": 3, "max_new_tokens": 16, "logit_bias": {11: -4.0, 12: 3.0}, "logprobs": 2}
    expected = alone(decoder, PROMPT, **more, **mine, **named)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert choice.logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert "".join(choice.logprobs.tokens) == expected.text
    for token, top, one in zip(choice.logprobs.tokens, choice.logprobs.top_logprobs, expected.logprobs, strict=True):
        assert top[token] == pytest.approx(one.logprob) and max(top.values()) == pytest.approx(one.top[0][1])
    assert answer.usage is not None and answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens == len(decoder.encode(PROMPT))
    assert "fable+fable-draft-float64-block-k4" in answer.system_fingerprint
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert "".join(part.choices[0].text for part in parts) == expected.text
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert last.choices == [] and last.usage is not None and last.usage.completion_tokens == 16
    assert len({chunk.id for chunk in chunks}) == 1


def test_eight_clients_get_their_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than slots; common prefixes are reused; others without a seed between them, whose K changes."""
    monkeypatch.setattr("outrider.decoding.schedule.Estimates.choose", lambda self, rows, num_rows: (6 // num_rows, 2))
    decoder = replace(embedded("float64"), num_draft_tokens="auto")
    stem = "Once upon a time there was a king who had three sons, and the youngest of them was called"
    prompts = [f"{stem} {name}" for name in ("Hans", "the fool", "Dummling", "John")] + [PROMPT, "The fox", stem, "A"]
    lengths = [7 + 3 * (seed % 3) for seed in range(len(prompts))]
    expected = [alone(decoder, prompts[i], seed=i, max_new_tokens=lengths[i]).text for i in range(len(prompts))]
    with running(decoder, num_slots=3, context_len=256) as server, server.openai() as client:
        num_clients = len(prompts) + 2
        gate = threading.Barrier(num_clients)

        def generate(seed: int) -> str:
            gate.wait()
            options = {"model": "toy", "prompt": prompts[seed], "seed": seed, "max_tokens": lengths[seed]}
            if seed % 2:
                chunks = client.completions.create(**options, stream=True)
                return "".join(chunk.choices[0].text for chunk in chunks)
            return client.completions.create(**options).choices[0].text

        def disturb(which: int) -> None:
            gate.wait()
            client.completions.create(model="toy", prompt=prompts[which], max_tokens=20)

        for _ in range(2):  # again, with other texts in the slots
            with ThreadPoolExecutor(num_clients) as pool:
                others = pool.map(disturb, range(2))
                assert list(pool.map(generate, range(len(prompts)))) == expected and len(list(others)) == 2
        assert server.metric("outrider:cached_tokens_total") > 0


def test_several_prompts_and_choices(decoder: Decoder, client: OpenAI) -> None:
    """Texts or ids; choice i of the answer has the seed + i."""
    prompts: list[Any] = [PROMPT, decoder.encode("The king")]
    asked: dict[str, Any] = {"model": "fable", "prompt": prompts, "n": 2, "seed": 7, "max_tokens": 8}
    answer = client.completions.create(**asked)
    rows = [(prompts[0], 7), (prompts[0], 8), (prompts[1], 9), (prompts[1], 10)]
    expected = [alone(decoder, prompt, seed=seed, max_new_tokens=8).text for prompt, seed in rows]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.prompt_tokens == len(decoder.encode(PROMPT)) + len(prompts[1])
    streamed = [""] * 4
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_without_a_seed_the_answer_tells_which(decoder: Decoder, server: Running) -> None:
    seeds = set()
    with server.http() as http:
        for given in ({}, {"seed": -1}):
            body = {"prompt": PROMPT, "max_tokens": 12, **given}
            (choice,) = http.post("/v1/completions", json=body).json()["choices"]
            assert choice["text"] == alone(decoder, PROMPT, seed=choice["seed"], max_new_tokens=12).text
            assert choice["seed"] < 2**53  # what JavaScript can read
            seeds.add(choice["seed"])
    assert len(seeds) == 2


_SCHEMA = {"type": "object", "properties": {"name": {"enum": ["fox", "hen"]}}, "required": ["name"]}
_FORM = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": _SCHEMA}}
_GRAMMAR = 'root ::= " a" "b"*'
NAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_new_tokens": 9}, {"max_tokens": 9}),
    ({"n_predict": 9, "repeat_penalty": 1.3, "repeat_last_n": -1}, {"max_tokens": 9, "repetition_penalty": 1.3}),
    ({"max_tokens": 9, "min_new_tokens": 7, "max_completion_tokens": 9}, {"max_tokens": 9, "min_tokens": 7}),
    ({"seed": -2}, {"seed": 2**63 - 2}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"stop_token_ids": [5], "bad_words": [[6]], "ignore_eos": True},) * 2,
    ({"response_format": _FORM}, {"json_schema": _SCHEMA}),
    ({"structured_outputs": {"choice": [" a", ' "b"']}}, {"grammar": 'start: CHOICE\nCHOICE: " a" | " \\"b\\""'}),
    ({"guided_regex": " (fox|hen)s?"}, {"regex": " (fox|hen)s?"}),
    ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
    ({"guided_json": json.dumps(_SCHEMA)}, {"json_schema": _SCHEMA}),
    ({"guided_grammar": _GRAMMAR}, {"grammar": _GRAMMAR}),
    ({"json_schema": '{"enum": ["fox", "hen"]}'}, {"json_schema": {"enum": ["fox", "hen"]}}),
]


def test_option_names_of_other_servers() -> None:
    """OpenAI's, vLLM's, SGLang's, llama.cpp's and Transformers' names for options that the library has."""
    for fields, options in NAMES:
        asks = (CompletionBody.read_request({"prompt": "A", **one}) for one in (fields, {}))
        found, usual = (ask.options | {"max_tokens": ask.max_tokens} for ask in asks)
        assert found == usual | options


def test_what_became_of_the_drafts(decoder: Decoder, server: Running) -> None:
    """vLLM's names, as AIPerf checks them; and its counters, as its benchmark reads them."""
    counters = [f"vllm:spec_decode_num_{kind}_tokens_total" for kind in ("draft", "accepted")]
    before = list(map(server.metric, counters))
    with server.http() as http:
        body = {"prompt": PROMPT, "seed": 3, "max_tokens": 24}
        found = http.post("/v1/completions", json=body).json()["metrics"]["speculative_decoding"]
    stats, histogram = alone(decoder, PROMPT, seed=3, max_new_tokens=24).stats, found["acceptance_histogram"]
    assert len(histogram) == found["num_spec_tokens"] + 1 == 5 and sum(histogram) == found["num_spec_steps"]
    assert sum(i * n for i, n in enumerate(histogram)) == stats.num_accepted_draft_tokens
    counts = [stats.num_draft_tokens, stats.num_accepted_draft_tokens]
    assert [found["num_draft_tokens"], found["num_accepted_draft_tokens"]] == counts
    assert [b - a for a, b in zip(before, map(server.metric, counters), strict=True)] == counts


def test_a_request_may_do_without_the_draft(decoder: Decoder, server: Running) -> None:
    plain = alone(decoder.plain(), PROMPT, seed=3, max_new_tokens=16)
    shorter = alone(replace(decoder, num_draft_tokens=2), PROMPT, seed=3, max_new_tokens=16)
    with server.http() as http:
        for own, expected in (({"draft": False}, plain), ({"num_draft_tokens": 2}, shorter)):
            answer = http.post("/v1/completions", json={"prompt": PROMPT, "seed": 3, "max_tokens": 16} | own).json()
            assert answer["choices"][0]["text"] == expected.text
            assert (answer["metrics"]["speculative_decoding"] is None) == ("draft" in own)


def test_models_endpoint(client: OpenAI, server: Running) -> None:
    cards = client.models.list().data
    assert [card.id for card in cards] == ["fable", "another-name"]
    assert {card.max_model_len for card in cards} == {512}
    assert {card.same_bytes for card in cards} == {server.model.decoder.target.same_bytes}
    answer = client.completions.create(model="another-name", prompt="A", max_tokens=1)
    assert answer.model == "another-name"


def test_tokens_and_back(decoder: Decoder, server: Running) -> None:
    with server.http() as http:
        # Some clients take U+2028 for the end of a line.
        body = {"prompt": "A\u2028B\x85C", "echo": True, "max_tokens": 1, "stream": True}
        text = http.post("/v1/completions", json=body).text
        assert text.isascii() and text.endswith("\n\ndata: [DONE]\n\n")
        assert json.loads(text.split("\n\n")[0].removeprefix("data: "))["choices"][0]["text"] == body["prompt"]
        answer = http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
        assert answer["tokens"] == decoder.encode(PROMPT)
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
        assert answer["max_model_len"] == 512
        assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": PROMPT}
        assert http.get("/tokenizer_info").json()["eos_token"] == decoder.tokenizer.eos_token


def test_chat_completions() -> None:
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    decoder = load(random_llama(), random_llama(seed=1), tokenizer=tokenizer, draft_tokenizer=tokenizer)
    messages: Any = [{"role": "system", "content": "w1 w2"}, {"role": "user", "content": "w3"}]
    expected = alone(decoder, messages, seed=1, max_new_tokens=20)
    messages[0]["content"] = [{"type": "text", "text": "w1 w2"}]
    asked: dict[str, Any] = {"model": "toy", "messages": messages, "seed": 1, "max_completion_tokens": 20}
    with running(decoder) as server, server.openai() as client:
        whole = client.chat.completions.create(**asked).choices[0]
        first, *streamed = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
        longest = client.chat.completions.create(model="toy", messages=messages, extra_body={"ignore_eos": True})
        assert longest.usage.total_tokens == server.model.capacity  # as long as there is room
    assert first.delta.role == whole.message.role == "assistant" and first.delta.content == ""
    assert "".join(choice.delta.content or "" for choice in streamed) == whole.message.content == expected.text
    reason = "stop" if expected.finish_reason == "eos" else "length"
    assert whole.finish_reason == streamed[-1].finish_reason == reason


def test_the_fingerprint_changes_with_a_weight() -> None:
    models = [random_llama() for _ in range(3)]
    models[2].model.layers[0].mlp.up_proj.weight.data += 1e-6
    prints = [fingerprint_of(load(model, "ngram", tokenizer=word_tokenizer())) for model in models]
    assert prints[0] == prints[1] != prints[2]
    # The model's own code reads images.
    assert same_bytes_of(embedded()) == "promised"
    assert same_bytes_of(replace(embedded(), processor=object())) == "promised, but for images"
