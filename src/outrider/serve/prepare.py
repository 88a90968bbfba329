"""From a request's body to rows for the engine. Runs in a thread pool, since tokenizing is slow."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.decoder import Decoder
from outrider.errors import PromptError
from outrider.options import CONSTRAINTS
from outrider.requests.state import RequestState
from outrider.serve.completion_json import ChatForm, CompletionForm, Form, TokenTexts
from outrider.serve.fields import check_names
from outrider.serve.http_errors import Refusal, refusal_of
from outrider.serve.protocol import ParsedRequest, parse_body, parse_chat, parse_completions, parse_messages
from outrider.serve.streaming import PreparedRequest
from outrider.text.constraint_check import Reading
from outrider.text.structure import read_constraint
from outrider.text.tokenizer import Prompt, encode

# Assumed bytes per token if no token is longer: some tokenizers drop spaces or map unknown words to one token.
_LEAST_BYTES_A_TOKEN = 64
_MOST_TOKENIZED_BYTES = 2**20  # for /tokenize, which has no other limit


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed body.

    Attributes:
        prepare: does the slow rest. It may be stopped while it reads a constraint, and then raises some error.
    """

    ask: ParsedRequest
    prepare: Callable[[Reading], Any]


@dataclass(frozen=True, slots=True)
class Preparer:
    """Prepares requests for one server.

    Attributes:
        capacity: maximum tokens of a sequence, prompt included.
        max_k: maximum tokens drafted per round.
        most_rows: maximum rows of a request.
        names: of the model; responses use the first.
        fingerprint: ``system_fingerprint``.
        most_bytes: of a prompt that may fit; longer ones are refused before tokenizing.
    """

    decoder: Decoder
    capacity: int
    max_k: int
    most_rows: int
    names: tuple[str, ...]
    fingerprint: str
    most_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        longest = max(len(token.encode()) for token in self._tokenizer.get_vocab())
        object.__setattr__(self, "most_bytes", self.capacity * max(longest, _LEAST_BYTES_A_TOKEN))

    def completions(self, body: bytes) -> Parsed:
        """Parse a completion request; prepares a ``PreparedRequest``. Raises Refusal."""
        ask = parse_completions(parse_body(body))
        return Parsed(ask, lambda reading: self._prepare(ask, CompletionForm, reading))

    def chat(self, body: bytes) -> Parsed:
        """Parse a chat request; prepares a ``PreparedRequest``. Raises Refusal."""
        ask = parse_chat(parse_body(body))
        return Parsed(ask, lambda reading: self._prepare(ask, ChatForm, reading))

    def check_model(self, name: Any) -> str:
        """Name to use in the response; the default is the first. Raises Refusal."""
        if name is not None and name not in self.names:
            message = f"unknown model {name!r:.100}: this server has {', '.join(self.names)}"
            raise Refusal(message, status=404, type_="NotFoundError", param="model", code="model_not_found")
        return name or self.names[0]

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that fits. Raises Refusal."""
        assert not isinstance(prompt, Mapping), "no request holds a tokenizer's result"
        is_chat = not isinstance(prompt, str) and isinstance(prompt[0], Mapping)
        try:
            if is_chat or isinstance(prompt, str):
                self._check_room(_num_bytes(prompt), self.most_bytes, "bytes")
            ids = self.decoder.encode(prompt)
            self._check_room(len(ids), self.capacity - 1, "tokens")
        except PromptError as error:
            raise Refusal(str(error), param="messages" if is_chat else "prompt") from None
        return ids

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Tokenize a prompt or messages of any length. Raises Refusal."""
        value = parse_body(body)
        self.check_model(value.get("model"))
        check_names(value, "tokenize")
        prompt = value.get("prompt")
        has_special = value.get("add_special_tokens")
        if not isinstance(has_special, bool | None):
            raise Refusal("add_special_tokens must be true or false", param="add_special_tokens")
        if prompt is None:
            prompt = parse_messages(value.get("messages"))
        elif not isinstance(prompt, str):
            raise Refusal("prompt must be a string", param="prompt")
        if (num_bytes := _num_bytes(prompt)) > _MOST_TOKENIZED_BYTES:
            message = f"{num_bytes} bytes are too many: at most {_MOST_TOKENIZED_BYTES} are tokenized per request"
            raise Refusal(message, param="prompt" if isinstance(prompt, str) else "messages")
        try:
            ids = encode(self.decoder.tokenizer, prompt, has_special=has_special is not False)
        except PromptError as error:
            if prompt:
                raise refusal_of(error) from None
            ids = []
        answer = {"count": len(ids), "max_model_len": self.capacity, "tokens": ids}
        if value.get("return_token_strs") is True:
            answer["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
        return answer

    def tokenizer_info(self) -> dict[str, Any]:
        """Tokenizer facts for clients without its files."""
        tokenizer = self._tokenizer
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"))
        return special | {
            **tokenizer.special_tokens_map,
            "tokenizer_class": type(tokenizer).__name__,
            "model_max_length": self.capacity,
            "chat_template": tokenizer.chat_template,
            "added_tokens_decoder": {str(i): token.content for i, token in tokenizer.added_tokens_decoder.items()},
        }

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Decode token ids. Raises Refusal."""
        value = parse_body(body)
        self.check_model(value.get("model"))
        check_names(value, "detokenize")
        ids, vocab_size = value.get("tokens"), self.decoder.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise Refusal(f"tokens must be a list of token ids below {vocab_size}", param="tokens")
        return {"prompt": self._decode(ids)}

    def _prepare(self, ask: ParsedRequest, form: Callable[[TokenTexts], Form], reading: Reading) -> PreparedRequest:
        model = self.check_model(ask.model)
        self._check_rule_and_k(ask)
        if len(ask.prompts) * ask.n > self.most_rows:  # before they are tokenized
            message = f"the request needs {len(ask.prompts) * ask.n} completions: this server allows {self.most_rows}"
            raise Refusal(message, param="n" if len(ask.prompts) <= self.most_rows else "prompt")
        all_ids = [self.token_ids(prompt) for prompt in ask.prompts]
        jobs: list[RequestState] = []
        if ask.max_tokens != 0:
            try:
                read_constraint(ask.options, reading)
                for ids in all_ids:
                    room = self.capacity - len(ids)
                    max_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)
                    for _ in range(ask.n):
                        jobs.append(self._job(ask, ids, max_tokens, len(jobs)))
            except Exception as error:
                raise named_refusal(ask, error) from None
        texts = []
        if ask.echo:
            pairs = zip(ask.prompts, all_ids, strict=True)
            texts = [prompt if isinstance(prompt, str) else self._decode(ids) for prompt, ids in pairs]
        tokens = TokenTexts(self._tokenizer, ask.as_token_ids)
        return PreparedRequest(ask, all_ids, texts, jobs, form(tokens), model, self.fingerprint)

    def _job(self, ask: ParsedRequest, ids: list[int], max_tokens: int, choice: int) -> RequestState:
        seed = ask.options["seed"]
        own = {"max_new_tokens": max_tokens, "seed": None if seed is None else (seed + choice) % 2**63}
        job = self.decoder.request(ids, {**ask.options, **own})
        if ask.num_draft_tokens is not None:
            job.request = replace(job.request, num_draft_tokens=ask.num_draft_tokens)
        return job

    def _check_rule_and_k(self, ask: ParsedRequest) -> None:
        own = self.decoder.acceptance
        if ask.acceptance not in (None, own):
            raise Refusal(
                f"acceptance = {ask.acceptance!r:.60} is not supported: this server's rule is {own}", param="acceptance"
            )
        if ask.num_draft_tokens is not None and ask.num_draft_tokens > self.max_k:
            raise Refusal(
                f"num_draft_tokens = {ask.num_draft_tokens} is not supported: this server drafts at most {self.max_k}",
                param="num_draft_tokens",
            )

    def _check_room(self, size: int, most: int, unit: str) -> None:
        """Raises PromptError."""
        if size > most:
            raise PromptError(
                f"the prompt has {size} {unit}, but the context is {self.capacity} tokens, prompt and output together: "
                "shorten it"
            )

    @property
    def _tokenizer(self) -> Any:
        return self.decoder.tokenizer

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def named_refusal(ask: ParsedRequest, error: Exception) -> Refusal:
    """Refusal for a library error, with the option under the request's name for it."""
    refusal = refusal_of(error)
    if refusal.param in CONSTRAINTS:
        refusal.param = ask.structured_by
    elif refusal.param is not None:
        refusal.param = ask.names.get(refusal.param, refusal.param)
    return refusal


def _num_bytes(prompt: str | Sequence[Any]) -> int:
    """UTF-8 size of a string, or of a chat's messages."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)
    return len(text.encode(errors="surrogatepass"))
