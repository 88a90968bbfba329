"""Samples from the OpenAI-compatible endpoint of any server, one request each.

Servers name the same option differently and have defaults of their own, so every option that changes the distribution
is sent. They return token ids in different fields, or text only. The list of models (``/v1/models``) tells most of them
apart, by the models' owner or by a field that others lack.

Sources: vLLM, vllm/entrypoints/openai/completion/protocol.py (return_token_ids); llama.cpp, tools/server/
server-schema.cpp and server-task.cpp (return_tokens, __verbose); llama-cpp-python, llama_cpp/server/types.py and
llama_cpp/llama.py (the end token is not counted); Transformers, cli/serving/utils.py (generation_config) and
model_manager.py (owner and status of a model).
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.errors import MissingExtra, OptionError, WorkerError
from outrider.options import Sampling
from outrider.text.chat import Chat
from outrider.text.spelling import token_bytes

try:
    import httpx
except ImportError:
    raise MissingExtra("httpx", "serve", "--server") from None

API_KEY = "OPENAI_API_KEY"
_WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between tries
_MOST_WAIT_S = 60.0  # that a server can ask for
_BUSY = (408, 429, 502, 503, 504)
_MOST_S = 600.0  # for an answer
_TOKEN_ID = "token_id:"


@dataclass(frozen=True, slots=True)
class ServerApi:
    """The API of a kind of server.

    Attributes:
        fields: sampling options; the server has no other options of the same meaning.
        always: fields of every request: they ask for token ids, and switch off what a server has on by default.
        has_logprobs: token ids are in the log-probabilities.
        nested: field that holds the options as JSON.
        counts_end: the number of tokens in ``usage`` includes the end token.
    """

    fields: Sequence[str]
    always: Mapping[str, Any] = field(default_factory=dict)
    has_logprobs: bool = False
    nested: str | None = None
    counts_end: bool = True


_FILTERS = ("temperature", "top_k", "top_p", "min_p")
_ALL = (*_FILTERS, "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
_NO_PENALTY = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_IN_ORDER = {"samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"]}
ENGINES = {
    "outrider": ServerApi(_ALL, {"return_tokens_as_token_ids": True}, has_logprobs=True),
    "vllm": ServerApi(_ALL, {"return_token_ids": True}),
    "llama.cpp": ServerApi(_FILTERS, _NO_PENALTY | _IN_ORDER | {"return_tokens": True, "verbose": True}),
    "llama-cpp-python": ServerApi(_FILTERS, _NO_PENALTY, counts_end=False),
    "transformers": ServerApi((*_FILTERS, "repetition_penalty"), nested="generation_config"),
    "openai": ServerApi(("temperature", "top_p", "presence_penalty", "frequency_penalty"), has_logprobs=True),
}
_OWNERS = {"outrider": "outrider", "vllm": "vllm", "llamacpp": "llama.cpp", "me": "llama-cpp-python"}


class _Refused(WorkerError):
    """The server refuses a request, and would again."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The endpoint of a server for one model, with the sampling options of all requests; and the id of each token by
    its bytes, for servers that return tokens as text."""

    url: str
    client: httpx.Client
    engine: str
    model: str
    is_chat: bool
    body: Mapping[str, Any]
    ids_of: Mapping[bytes, int]
    has_seeds: bool = True

    @classmethod
    def open(
        cls, url: str, model: str | None, engine: str, prompt: str | Chat, sampling: Sampling, *, tokenizer: Any
    ) -> Endpoint:
        """Find a server's API and model, and send one request for one token to see which fields it takes. Raises
        OptionError, WorkerError. ``model``: None for the only one. ``engine``: a name of ``ENGINES``, or "auto".
        ``prompt``: of that request; if it is a chat, all are. ``tokenizer``: the target's."""
        key = os.environ.get(API_KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            base = httpx.URL(f"{url.rstrip('/').removesuffix('/v1')}/v1/")
        except httpx.InvalidURL as error:
            raise OptionError("--server", url, str(error)) from None
        client = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(_MOST_S, connect=10.0))
        with ExitStack() as on_error:
            on_error.enter_context(client)
            try:
                listed = _read(client.get("models"))["data"]
            except httpx.TransportError as error:
                raise OptionError("--server", url, f"no server answers there ({error})") from None
            except (KeyError, TypeError):
                raise OptionError("--server", url, "no OpenAI-compatible server: /v1/models lists nothing") from None
            names = [one["id"] for one in listed]
            if model is None and len(names) != 1:
                remedy = f"the server has several: {', '.join(names)}" if names else "name one"
                raise OptionError("--model", model, remedy)
            model = model or names[0]
            if engine == "auto":
                engine = _engine_of([one for one in listed if len(names) == 1 or one["id"] == model])
            own = ENGINES[engine]
            body = {"model": model, **own.always, **_options(own, engine, sampling)}
            ids = _ids_by_bytes(tokenizer) if own.has_logprobs and engine == "openai" else {}
            is_chat = isinstance(prompt, Chat)
            logprobs: dict[str, Any] = {"logprobs": True if is_chat else 1} if own.has_logprobs else {}
            fallbacks = [cls(url, client, engine, model, is_chat, body | logprobs, ids)]
            if engine != "outrider":  # whose ids are in the log-probabilities
                fallbacks += [replace(fallbacks[0], body=body)] if logprobs else []
                fallbacks.append(replace(fallbacks[0], body=body, has_seeds=False))
            for one in fallbacks:
                try:
                    answer = one.sample(prompt, seed=0, max_tokens=1)
                except _Refused as error:
                    reason = error
                    continue
                if is_chat and "token_ids" not in answer:
                    remedy = "the server returns no token ids of whole answers: sample plain texts"
                    raise OptionError("--chat", True, remedy)
                on_error.pop_all()
                return one
            raise reason

    def sample(self, prompt: str | Chat, *, seed: int, max_tokens: int | None = None) -> dict[str, Any]:
        """Fields of a sample (``outrider.offline.jsonl``). Raises WorkerError."""
        own = {"seed": seed if self.has_seeds else None, "max_tokens": max_tokens}
        body = {**self.body, **{name: value for name, value in own.items() if value is not None}}
        body |= _chat_fields(prompt) if isinstance(prompt, Chat) else {"prompt": prompt}
        answer = self._post("chat/completions" if self.is_chat else "completions", body)
        try:
            (choice,), usage = answer["choices"], answer.get("usage") or {}
            text = (choice["message"]["content"] or "") if self.is_chat else choice["text"]
            ids = _token_ids(answer, choice, self.ids_of)
        except (KeyError, TypeError, ValueError, AttributeError):
            raise WorkerError(f"{self.url}: the answer is no completion: {json.dumps(answer)[:200]}") from None
        has_ended, num_tokens = choice.get("finish_reason") == "stop", usage.get("completion_tokens")
        if ids is not None and num_tokens is not None and ENGINES[self.engine].has_logprobs:
            # Log-probabilities may be of a part of the output: not of a thought or a call. An end token may be counted
            # and not be listed.
            ids = ids if abs(len(ids) - num_tokens) <= int(has_ended) else None
        if has_ended and num_tokens is not None:
            num_tokens -= ENGINES[self.engine].counts_end
        read = {"num_prompt_tokens": usage.get("prompt_tokens"), "num_tokens": num_tokens}
        output = {"text": text} if ids is None else {"text": text, "token_ids": ids}
        return {**output, "has_ended": has_ended, **read, "seed": seed if self.has_seeds else None}

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        for wait_s in (*_WAITS_S, None):
            try:
                response = self.client.post(path, json=body)
                if response.status_code not in _BUSY or wait_s is None:
                    return _read(response)
                asked = response.headers.get("Retry-After", "")
                wait_s = min(max(wait_s, float(asked) if asked.isdigit() else 0.0), _MOST_WAIT_S)
            except httpx.TransportError as error:
                if wait_s is None:
                    kept = "the samples so far are kept, and the same command continues after them"
                    raise WorkerError(f"{self.url} does not answer ({error or type(error).__name__}): {kept}") from None
            time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")


def _engine_of(listed: Sequence[Mapping[str, Any]]) -> str:
    """The API of a server that lists these models. Transformers' models have their makers as owners, and a status."""
    for one in listed:
        if one.get("owned_by") in _OWNERS:
            return _OWNERS[one["owned_by"]]
        if "status" in one:
            return "transformers"
    return "openai"


def samples(
    endpoint: Endpoint, jobs: Iterable[tuple[int, str | Chat, int]], concurrency: int, rate: float | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the index and the fields of each sample, in any order, of jobs with an index, a prompt and a seed: at most
    ``concurrency`` at a time, and ``rate`` per second."""
    running: dict[Future[dict[str, Any]], int] = {}
    next_s = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        for job in (*jobs, None):
            if job is not None:
                index, prompt, seed = job
                time.sleep(max(0.0, next_s - time.monotonic()))
                next_s = max(next_s, time.monotonic()) + (1 / rate if rate else 0.0)
                running[pool.submit(endpoint.sample, prompt, seed=seed)] = index
            while running and (job is None or len(running) == concurrency):
                for one in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(one), one.result()


def _options(engine: ServerApi, name: str, sampling: Sampling) -> dict[str, Any]:
    """Fields of the sampling options. Raises OptionError: the server's API lacks one that is given."""
    neutral, given = asdict(Sampling()), asdict(sampling)
    for option in ("logit_bias", *_ALL):
        if option not in engine.fields and given[option] != neutral[option]:
            flag = f"--{option.replace('_', '-')}"
            raise OptionError(flag, given[option], f"the API of {name} has no field of this meaning: leave it out")
    options = {option: given[option] for option in engine.fields}
    limit = {"max_tokens": sampling.max_new_tokens}
    if engine.nested is None:
        return options | limit
    if sampling.temperature == 0:
        options = {}
    return {engine.nested: json.dumps({"do_sample": sampling.temperature > 0, **options})} | limit


def _chat_fields(chat: Chat) -> dict[str, Any]:
    """Raises OptionError: an option of the chat has no field in common."""
    options = chat.options.given()
    system = options.pop("system", None)
    for name in options.keys() - {"chat_template_kwargs"}:
        raise OptionError(name, options[name], "servers have no common field for this: leave it out")
    first = [] if system is None else [{"role": "system", "content": system}]
    return {"messages": [*first, *chat.messages], **options}


def _read(response: httpx.Response) -> Any:
    """The JSON of a successful response. Raises OptionError, WorkerError."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.status_code == 200 and answer is not None:
        return answer
    said = answer.get("error") or answer.get("detail") if isinstance(answer, dict) else response.text
    message = said.get("message", said) if isinstance(said, dict) else said
    where = f"{response.request.url} answers {response.status_code}: {str(message)[:300]}".replace("\n", " ")
    if response.status_code in (401, 403):
        raise WorkerError(f"{where}: set the environment variable {API_KEY}")
    raise _Refused(where)


def _token_ids(answer: Any, choice: Any, ids_of: Mapping[bytes, int]) -> list[int] | None:
    logprobs = choice.get("logprobs") or {}
    listed = logprobs.get("content") or logprobs.get("tokens") or []
    verbose = answer.get("__verbose") or {}
    found = choice.get("token_ids") or verbose.get("tokens") or [_token_id(one, ids_of) for one in listed]
    return found if found and None not in found else None


def _token_id(token: Any, ids_of: Mapping[bytes, int]) -> int | None:
    """Id of a token: a number, a text, or an object with an id, bytes or a text."""
    if isinstance(token, dict):
        if "id" in token:
            return int(token["id"])
        text, spelled = token["token"], token.get("bytes")
        if spelled is None or text.startswith(_TOKEN_ID):
            return _token_id(text, ids_of)
        return ids_of.get(bytes(spelled))
    if isinstance(token, int):
        return token
    return int(token.removeprefix(_TOKEN_ID)) if token.startswith(_TOKEN_ID) else ids_of.get(token.encode())


def _ids_by_bytes(tokenizer: Any) -> dict[bytes, int]:
    """Id of each token that no other is spelled like; only for tokenizers whose tokens are bytes everywhere. (Others
    drop the space of a first token.)"""
    spelled = None if tokenizer is None else token_bytes(tokenizer)
    if spelled is None or not spelled.has_letters:
        return {}
    texts = [spelled.of(token_id) for token_id in range(len(tokenizer))]
    counts = Counter(texts)
    return {text: token_id for token_id, text in enumerate(texts) if text and counts[text] == 1}
