"""``/v1/race``: plain and speculative decoding side by side, in events."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Running, running, wait_until, words

from outrider.api import load
from outrider.decoder import Decoder
from pairs import broken_model, embedded, word_tokenizer

PROMPT = "Once upon a time there was a"
BODY = {"prompt": PROMPT, "seed": 3, "max_tokens": 24}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return embedded("float64")


@pytest.fixture(scope="module")
def server(decoder: Decoder) -> Iterator[Running]:
    with running(decoder, context_len=256) as one:
        yield one


def events_of(text: str) -> list[dict[str, Any]]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if event != ": keep-alive"]


def race(server: Running, **fields: object) -> list[dict[str, Any]]:
    with server.http() as http:
        response = http.post("/v1/race", json=BODY | fields)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def ids_of(events: list[dict[str, Any]], arm: int) -> list[int]:
    return [token["id"] for event in events[1:-1] if event["arm"] == arm for token in event["tokens"]]


def test_a_race_is_of_the_texts_of_the_library(decoder: Decoder, server: Running) -> None:
    """And its last event counts what the others tell; the arm that is behind is stepped."""
    acceptance = "rejection"
    events = race(server, acceptance=acceptance, num_draft_tokens=3, temperature=0.8)
    start, *rounds, end = events
    assert (start["type"], {one["type"] for one in rounds}, end["type"]) == ("start", {"round"}, "end")
    assert (start["target"], start["prompt"], start["seed"], start["acceptance"]) == ("toy", PROMPT, 3, acceptance)
    assert [(arm["draft"], arm["k"]) for arm in start["arms"]] == [(None, None), ("fable-draft", 3)]
    options: dict[str, Any] = {"seed": 3, "max_new_tokens": 24, "temperature": 0.8, "acceptance": acceptance}
    for which, one in enumerate((decoder.plain(), decoder)):
        (alone,) = one.generate(PROMPT, num_draft_tokens=3, **options)
        own = [event for event in rounds if event["arm"] == which]
        assert ids_of(events, which) == list(alone.token_ids)
        assert "".join(token["text"] for event in own for token in event["tokens"]) == alone.text
        assert [token["origin"] for event in own for token in event["tokens"]] == list(alone.origins)
        assert end["arms"][which]["stats"] == alone.stats.to_json()
        assert [event["finish_reason"] for event in own] == [None] * (len(own) - 1) + [alone.finish_reason]
    clocks = [0.0, 0.0]
    for event in rounds:
        which = event["arm"]
        assert clocks[which] <= clocks[1 - which]
        clocks[which] = float("inf") if event["finish_reason"] else event["seconds"]

    # Drafts are told with p and q: those accepted are the tokens themselves, and a rejected one has p < q.
    num_rejected = 0
    for event in rounds:
        accepted = [(token["id"], token["text"]) for token in event["tokens"] if token["origin"] == "accepted"]
        assert [(one["id"], one["text"]) for one in event["drafted"][: len(accepted)]] == accepted
        assert all(0 <= one["p"] <= 1 and 0 < one["q"] <= 1 for one in event["drafted"])
        if event["tokens"][-1]["origin"] == "correction":
            first = event["drafted"][len(accepted)]
            assert first["p"] < first["q"] and first["id"] != event["tokens"][-1]["id"]
            num_rejected += 1
    assert num_rejected > 1


def test_a_race_that_is_left_ends() -> None:
    """And the next one has its turn: there is one at a time."""
    with running(words(1_000_000), context_len=1_000_000) as server, server.http() as http:
        body = {"prompt": "w1", "max_tokens": 900_000, "drafter": "ngram"}
        with http.stream("POST", "/v1/race", json=body) as response:
            next(lines := response.iter_lines())
            other = http.post("/v1/race", json=body)
            assert other.status_code == 503 and int(other.headers["retry-after"]) >= 1
            next(lines)
            assert server.num_open == 1
        wait_until(lambda: server.num_open == 0)
        assert race(server, prompt="w1")[-1]["type"] == "end"


def test_a_model_that_fails_ends_the_race_alone(tmp_path: Path) -> None:
    """NaN for this prompt; the server goes on."""
    word_tokenizer().save_pretrained(broken_model(tmp_path))
    with running(load(tmp_path, device="cpu")) as server, server.http() as http:
        *_, last = events_of(http.post("/v1/race", json={"prompt": "w3 w7", "max_tokens": 9, "drafter": "ngram"}).text)
        assert "NaN" in last["error"]["message"]
        assert race(server, prompt="w1 w2", max_tokens=2)[-1]["type"] == "end"
