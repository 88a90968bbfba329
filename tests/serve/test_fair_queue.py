"""Clients take turns, and none may have all there is."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from servers import running, wait_until, words

from outrider.decoding.fair_queue import FairQueue
from outrider.serve import admission
from outrider.serve.admission import Admission


@pytest.mark.parametrize(
    ("priorities", "is_across", "expected"),
    [
        ({"a1": 0, "a2": 5, "a3": -2, "b1": 0, "b2": -1}, False, ["a3", "b2", "a1", "b1", "a2"]),
        ({"a1": 0, "a2": 0, "b1": -9, "b2": -9}, False, ["a1", "b1", "a2", "b2"]),
        (dict.fromkeys("a1 a2 a3 b1 a4 c1 b2".split(), 0), False, "a1 b1 c1 a2 b2 a3 a4".split()),
        ({"a1": 0, "a2": 0, "b1": -9, "b2": -9}, True, ["b1", "b2", "a1", "a2"]),
    ],
)
def test_clients_take_turns_by_priority(priorities: dict[str, int], is_across: bool, expected: list[str]) -> None:
    """And across clients only where it is allowed. Removed items lose their turn."""
    turns: FairQueue[str] = FairQueue(has_priority_across_clients=is_across)
    for name, priority in priorities.items():
        turns.push(name, name[0], priority)
    for name in ("d1", "d2"):
        turns.push(name, name[0])
    turns.remove(lambda name: name in ("d1", "d2"))
    assert len(turns) == len(expected) and sorted(turns) == sorted(expected)
    assert [turns.pop()[1] for _ in expected] == expected and turns.pop() is None


LONG = {"prompt": "w1", "max_tokens": 900_000, "seed": 1}


@pytest.mark.parametrize("is_across", [False, True])
def test_clients_and_priorities(is_across: bool) -> None:
    """A request that came later than others and has waited for a shorter time certainly began before them."""
    requests = [("a", 1), ("a", 0), ("b", -3), ("b", 2), ("a", 0), ("a", -2)]  # while a text of a has the only slot
    options = {"num_slots": 1, "context_len": 1_000_000, "has_priority_across_clients": is_across}
    with (
        running(words(1_000_000), api_keys=("a", "b"), **options) as server,
        server.http() as http,
        ThreadPoolExecutor(len(requests)) as pool,
    ):

        def send(key: str, priority: int) -> float:
            body = {"prompt": "w1", "max_tokens": 100, "seed": 1, "priority": priority}  # longer than it takes to send
            answer = http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.json()["metrics"]["queue_time_ms"]

        found, headers = [], {"authorization": "Bearer a"}
        with http.stream("POST", "/v1/completions", json=LONG | {"stream": True}, headers=headers) as stream:
            lines = stream.iter_lines()  # kept, since the response is closed with it
            next(lines)
            for number, request in enumerate(requests, 1):
                found.append(pool.submit(send, *request))
                wait_until(lambda number=number: server.metric("outrider:num_requests_waiting") == number)
        a_last, a_second, _, b_last, a_third, a_first = (one.result() for one in found)
    assert a_first < min(a_second, a_third, a_last)
    # Across clients -3 of b, -2, 0, 0, 1, 2 of b; else a, b, a, b, a, a.
    assert a_third < b_last if is_across else b_last < a_last


def test_a_client_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_KEEP_ALIVE_S", 0.05)  # so that streams begin while they wait
    options = {"num_slots": 1, "context_len": 1_000_000, "max_per_client": 2, "api_keys": ("a", "b")}
    with running(words(1_000_000), **options) as server, server.openai() as one:
        streams = [one.completions.create(model="toy", **LONG, stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            one.completions.create(model="toy", prompt="w1")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        other = one.with_options(api_key="b")  # on the same connections
        streams.append(other.completions.create(model="toy", **LONG, stream=True))
        with pytest.raises(openai.RateLimitError):
            other.completions.create(model="toy", prompt="w1", n=2)
        with pytest.raises(openai.BadRequestError, match="this server allows 2"):
            other.completions.create(model="toy", prompt="w1", n=3)
        assert server.num_open == 3
        for stream in reversed(streams):
            stream.close()
        wait_until(lambda: server.num_open == 0)
    assert (
        Admission(8, None, set(), lambda: 1).most_of_one == 6
    )  # a quarter stays free for others, unless told otherwise


def test_a_prompt_that_cannot_have_room_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 tokens hold at most 4,096 bytes here."""
    with running(words()) as server, server.http() as http:
        monkeypatch.setattr("outrider.decoder.encode", None)
        monkeypatch.setattr("outrider.serve.prepare.encode", None)
        for path, body, param in (
            ("/v1/completions", {"prompt": "w1 " * 2000}, "prompt"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "w1 " * 2000}]}, "messages"),
            ("/tokenize", {"prompt": "w1 " * 400_000}, "prompt"),
        ):
            error = http.post(path, json=body).json()["error"]
            assert error["param"] == param and " bytes" in error["message"]
