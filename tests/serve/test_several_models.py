"""Several models on one server, each with a name, a draft and an engine of its own."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import peft
import pytest
from scripted import MARKERS, TEMPLATES, talker
from servers import LIMIT_S, Running, running, wait_until, words

import outrider
from outrider.decoder import Decoder
from outrider.requests.loop_thread import LoopThread
from outrider.serve import engine_thread
from outrider.serve.engine_thread import EngineThread
from outrider.serve.quota import Quota, place
from outrider.serve.readiness import Readiness
from pairs import random_llama, save, word_tokenizer
from peft_adapters import WIDE, adapted

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
PROMPT = "w3 w5 w8"
ENDLESS = {"prompt": "w1", "max_tokens": 900_000}
POETS = ("epic", "lyric")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, two adapters of it, and a draft for each."""
    path = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(POETS):
        base = random_llama(tie_word_embeddings=False, context_len=4096)
        adapted(path, peft.LoraConfig(**WIDE), base, folder=name, seed=seed)
        save(path / f"{name}-draft", random_llama(hidden_size=16, seed=seed, context_len=4096), word_tokenizer())
    return path


@pytest.fixture(scope="module")
def decoders(folder: Path) -> dict[str, Decoder]:
    found: dict[str, Decoder] = {}
    for name in POETS:
        options = {"device": "cpu", "dtype": "float64", "shares_with": list(found.values())}
        found[name] = outrider.load(folder / name, folder / f"{name}-draft", **options)
    return found


@pytest.fixture
def server(decoders: dict[str, Decoder]) -> Iterator[Running]:
    with running(*decoders.values(), names=POETS, num_slots=2, context_len=2048) as one:
        yield one


def alone(folder: Path, name: str, **options: Any) -> str:
    """What the merged model says, loaded by itself, without a draft."""
    decoder = outrider.load(folder / name, device="cpu", dtype="float64")
    (done,) = decoder.generate([PROMPT], max_new_tokens=24, ignore_eos=True, **options)
    return done.text


def test_each_says_what_the_merged_model_says(server: Running, folder: Path) -> None:
    """At the same time, whole and streamed; a request that names none gets the first."""
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    want = {name: alone(folder, name, temperature=0) for name in POETS}
    assert len(set(want.values())) == 2
    with server.openai() as client, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda name: client.completions.create(model=name, **asked), POETS * 4))
        assert [one.choices[0].text for one in answers] == [want[name] for name in POETS * 4]
        assert [one.model for one in answers] == [*POETS * 4]
        assert len({one.system_fingerprint for one in answers}) == 2
        for name in POETS:
            parts = list(client.completions.create(model=name, stream=True, **asked))
            assert "".join(part.choices[0].text for part in parts) == want[name]
            assert {part.model for part in parts} == {name}
    with server.http() as http:
        body = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body).json()
        assert (answer["model"], answer["choices"][0]["text"]) == ("epic", want["epic"])


def test_names(server: Running, folder: Path) -> None:
    with server.openai() as client:
        cards = client.models.list().data
        assert [card.id for card in cards] == [*POETS]
        assert [card.root for card in cards] == [str(folder / name) for name in POETS]
        assert client.models.retrieve("lyric").id == "lyric"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("tragic")
        for send in (
            lambda: client.completions.create(model="tragic", prompt="w1"),
            lambda: client.chat.completions.create(model="tragic", messages=[{"role": "user", "content": "w1"}]),
            lambda: client.responses.create(model="tragic", input="w1"),
        ):
            with pytest.raises(openai.NotFoundError) as error:
                send()
            assert error.value.code == "model_not_found" and error.value.param == "model"
            assert "this server has epic, lyric" in error.value.message
    with server.http() as http:
        for path in ("/tokenize", "/detokenize", "/v1/race"):
            assert http.post(path, json={"model": "tragic", "prompt": "w1"}).status_code == 404
        for path in ("/tokenizer_info", "/v1/race/choices"):
            assert http.get(path, params={"model": "tragic"}).status_code == 404
        assert http.post("/tokenize", json={"model": 7, "prompt": "w1"}).json()["error"]["param"] == "model"


def test_other_traffic_changes_no_seed(server: Running, folder: Path) -> None:
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 5, "ignore_eos": True}
    with server.http() as http:
        quiet = [http.post("/v1/completions", json=body | {"model": name}).json() for name in POETS]
        for busy, name in zip(POETS, reversed(POETS), strict=True):
            others = {"prompt": "w1", "max_tokens": 2000, "ignore_eos": True, "model": busy, "stream": True, "n": 2}
            with http.stream("POST", "/v1/completions", json=others) as stream:
                assert stream.status_code == 200
                lines = stream.iter_lines()  # kept, since the response is closed with it
                next(lines)
                beside = http.post("/v1/completions", json=body | {"model": name}).json()
                assert server.metric("outrider:num_requests_running", of=busy) == 2
            (before,) = (one for one in quiet if one["model"] == name)
            assert beside["choices"][0]["text"] == before["choices"][0]["text"]
            assert beside["system_fingerprint"] == before["system_fingerprint"]


def test_a_full_queue_is_that_of_one_model() -> None:
    """Two slots and one that waits, of each; who leaves frees those of its own."""
    long = {"num_slots": 2, "context_len": 1_000_000, "max_queue": 1}
    with (
        ThreadPoolExecutor(1) as pool,
        running(words(1_000_000), words(1_000_000), names=("a", "b"), **long) as server,
        server.http() as http,
    ):
        streams = [http.stream("POST", "/v1/completions", json=ENDLESS | {"model": "a", "stream": True}) for _ in "123"]
        *begun, last = streams
        for stream in begun:
            stream.__enter__()
        waiting = pool.submit(last.__enter__)  # in a thread: for 15 seconds it is sent nothing, not even headers
        wait_until(lambda: server.metric("outrider:num_requests_waiting", of="a") == 1)
        assert http.post("/v1/completions", json=ENDLESS | {"model": "a"}).status_code == 503
        answer = http.post("/v1/completions", json={"prompt": "w1", "max_tokens": 60, "model": "b"})
        assert answer.json()["usage"]["completion_tokens"] == 60
        assert server.metric("outrider:num_requests_running", of="a") == 2
        assert server.metric("outrider:num_free_slots", of="b") == 2
        assert server.metric("outrider:requests_total", 'finished_reason="length"', of="b") == 1
        for stream in begun:
            stream.__exit__(None, None, None)
        waiting.result(LIMIT_S)
        last.__exit__(None, None, None)
        wait_until(lambda: server.worker.num_open == 0)
        assert server.metric("outrider:requests_total", 'finished_reason="abort"', of="a") == 3
        assert server.metric("outrider:requests_total", 'finished_reason="abort"', of="b") == 0


def test_places_are_taken_in_all_models_until_one_is_known() -> None:
    rooms = [Quota(3, 2), Quota(3, 2)]
    with place(rooms, "me") as keep:
        assert [room.places for room in rooms] == [["me"], ["me"]]
        keep(rooms[1])
        assert [room.places for room in rooms] == [[], ["me"]]
    assert [room.places for room in rooms] == [[], []]
    with place(rooms, "me"):
        pass
    assert [room.places for room in rooms] == [[], []]


def test_tokens_and_formats_are_those_of_the_model() -> None:
    """Each has its own tokenizer, template and format of calls."""
    hermes = talker(TEMPLATES["hermes"], MARKERS["hermes"])
    with running(words(), hermes, names=("plain", "talker")) as server, server.http() as http:
        sent = {"prompt": "w3 w5"}
        assert http.post("/tokenize", json=sent | {"model": "plain"}).json()["tokens"] == [3, 5]
        assert http.post("/tokenize", json=sent | {"model": "talker"}).json()["count"] == 5
        ids = {"tokens": [3, 5]}
        assert http.post("/detokenize", json=ids | {"model": "plain"}).json() == {"prompt": "w3 w5"}
        assert http.post("/detokenize", json=ids | {"model": "talker"}).json() != {"prompt": "w3 w5"}
        found = http.get("/tokenizer_info", params={"model": "talker"}).json()
        assert found["chat_template"] == TEMPLATES["hermes"]
        assert http.get("/tokenizer_info").json()["chat_template"] is None
        tools = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
        chat = {"messages": [{"role": "user", "content": "w1"}], "tools": tools, "max_tokens": 4}
        assert http.post("/v1/chat/completions", json=chat | {"model": "plain"}).status_code == 400
        assert http.post("/v1/chat/completions", json=chat | {"model": "talker"}).status_code == 200
        answer = http.post("/v1/responses", json={"input": "w1", "model": "talker", "max_output_tokens": 4}).json()
        assert answer["model"] == "talker"


def test_a_race_of_each(server: Running) -> None:
    with server.http() as http:
        for name in POETS:
            found = http.get("/v1/race/choices", params={"model": name}).json()
            assert found["models"] == [*POETS] and found["drafts"][0].endswith(f"{name}-draft")
            body = {"model": name, "prompt": PROMPT, "max_tokens": 8, "seed": 1}
            lines = http.post("/v1/race", json=body).text.splitlines()
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
            assert events[0]["target"].endswith(name) and events[-1]["type"] == "end"


def test_what_runs_when_the_server_ends_may_end(decoders: dict[str, Decoder]) -> None:
    options = {"names": POETS, "context_len": 2048, "shutdown_timeout_s": 10 * LIMIT_S}
    body = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool, running(*decoders.values(), **options) as server, server.http() as http:
        answers = [pool.submit(http.post, "/v1/completions", json=body | {"model": name}) for name in POETS]
        wait_until(lambda: all(server.metric("outrider:generation_tokens_total", of=name) > 0 for name in POETS))
        server.server.stop()
        wait_until(lambda: server.worker.readiness.state == "draining")
        assert [one.result().json()["usage"]["completion_tokens"] for one in answers] == [400, 400]


class Rounds:
    """A model whose rounds take a given time."""

    def __init__(self, clock: list[float], round_s: float) -> None:
        self.clock, self.round_s, self.has_work = clock, round_s, True
        self.begun_s: list[float] = []

    def run_on_thread(self) -> None:
        self.begun_s.append(self.clock[0])
        self.clock[0] += self.round_s


def test_models_share_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its share, however long its rounds are; one that has been idle gets no more than that."""
    clock = [0.0]
    monkeypatch.setattr(engine_thread, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    slow, quick, late = Rounds(clock, 1.0), Rounds(clock, 0.125), Rounds(clock, 0.25)
    late.has_work = False
    thread: Any = EngineThread(LoopThread("none"), Readiness(), [slow, quick, late])  # type: ignore[list-item]

    def run_until(end_s: float) -> None:
        while clock[0] < end_s:
            assert thread._run_on_thread()

    run_until(16.0)
    assert (len(slow.begun_s), len(quick.begun_s)) == (8, 64)
    late.has_work = True
    run_until(40.0)
    assert [len(one.begun_s) * one.round_s for one in (slow, quick, late)] == [16.0, 16.0, 8.0]
    assert min(late.begun_s) < 17.5, "it waits for a round or two of the others"
    assert max(b - a for a, b in zip(quick.begun_s, quick.begun_s[1:], strict=False)) <= 1.0 + 0.25 + 0.125
    slow.has_work = quick.has_work = False
    run_until(44.0)
    assert len(late.begun_s) * late.round_s == 12.0
    late.has_work = False


def test_the_command(folder: Path) -> None:
    """Adapters beside their base, one with the draft of the base. At SIGTERM what runs goes on to its end, then the
    process ends."""
    base, epic, lyric, draft = (str(folder / name) for name in ("base", *POETS, "lyric-draft"))
    arguments = ["serve", "--target", base, "--served-model-name", "base", "--draft", "ngram", "--device", "cpu"]
    arguments += ["-k", "2", "--context", "512"]
    arguments += ["--shutdown-timeout", "3600"]  # not to be a race against a busy machine
    arguments += ["--add-model", f"epic={base}+{epic}", "--add-model", f"lyric={lyric},draft={draft}", "--port", "0"]
    code = "import sys; from outrider.cli.app import main; main()"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not lines or " ready: " not in lines[-1]:
                lines.append(next(process.stderr))
            url = lines[-1].rpartition("ready: ")[2].strip()
            assert next(process.stderr).rstrip().endswith(f"speculative decoding: {url.removesuffix('/v1')}")
            found = [card["id"] for card in httpx.get(f"{url}/models", timeout=LIMIT_S).json()["data"]]
            assert found == ["base", "epic", "lyric"]
            body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
            answers = [httpx.post(f"{url}/completions", json=body | {"model": name}, timeout=LIMIT_S) for name in found]
            assert len({one.json()["choices"][0]["text"] for one in answers}) == 3
            drafts = [line.partition("drafts by ")[2].partition(",")[0] for line in lines if "drafts by " in line]
            assert drafts == ["ngram", "ngram", draft]
            assert any(f"lyric: {lyric} with draft {draft}" in line for line in lines)
            body = {"prompt": "w1", "max_tokens": 300, "seed": 1, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=LIMIT_S) as response:
                parts = response.iter_lines()
                next(parts)
                process.send_signal(signal.SIGTERM)
                *_, last, done = (part for part in parts if part)
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert done == "data: [DONE]"
            assert process.wait(LIMIT_S) == -signal.SIGTERM
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/models")
        finally:
            process.kill()
