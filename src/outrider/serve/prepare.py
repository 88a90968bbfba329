"""From the body of a request to rows for the engine. Runs in a pool of threads, since tokenizing takes its time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

from outrider.decoder import Decoder
from outrider.errors import PromptError
from outrider.jobs import Job
from outrider.serve.answers import ChatForm, CompletionForm, Form, TokenTexts
from outrider.serve.generation import Prepared
from outrider.serve.refusal import Refusal, refusal_of
from outrider.serve.schemas import Ask, parse_body, parse_chat, parse_completions, parse_messages
from outrider.text.tokenizer import encode


@dataclass(frozen=True, slots=True)
class Preparer:
    """What requests are prepared for.

    Attributes:
        capacity: most tokens in a row, prompt included.
        max_k: the most tokens that the engine drafts for a row.
        names: of the model, the first is used in answers.
        fingerprint: see ``fingerprint_of``.
    """

    decoder: Decoder
    capacity: int
    max_k: int
    names: tuple[str, ...]
    fingerprint: str

    def completions(self, body: bytes) -> Prepared:
        """Raises Refusal."""
        return self._prepare(parse_completions(parse_body(body)), CompletionForm)

    def chat(self, body: bytes) -> Prepared:
        """Raises Refusal."""
        return self._prepare(parse_chat(parse_body(body)), ChatForm)

    def check_model(self, name: Any) -> str:
        """Raises Refusal. No name is the first one."""
        if name is not None and name not in self.names:
            message = f"there is no model {name!r:.100} here, but {', '.join(self.names)}"
            raise Refusal(message, status=404, type_="NotFoundError", param="model", code="model_not_found")
        return name or self.names[0]

    def token_ids(self, prompt: Any) -> list[int]:
        """Of a prompt that has room. Raises Refusal."""
        try:
            ids = self.decoder.encode(prompt)
            if len(ids) >= self.capacity:
                raise PromptError(
                    f"the prompt has {len(ids)} tokens, but there is room for {self.capacity} in all, prompt and "
                    "output together: shorten it"
                )
        except PromptError as error:
            is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
            raise Refusal(str(error), param="messages" if is_chat else "prompt") from None
        return ids

    def tokenize(self, body: bytes) -> dict[str, Any]:
        """Of a prompt or messages, however long. Raises Refusal."""
        value = parse_body(body)
        self.check_model(value.get("model"))
        prompt = value.get("prompt")
        if prompt is None:
            prompt = parse_messages(value.get("messages"))
        elif not isinstance(prompt, str):
            raise Refusal("prompt is a text", param="prompt")
        try:
            ids = encode(self.decoder.tokenizer, prompt)
        except PromptError as error:
            raise refusal_of(error) from None
        answer = {"count": len(ids), "max_model_len": self.capacity, "tokens": ids}
        if value.get("return_token_strs") is True:
            answer["token_strs"] = self._tokenizer.convert_ids_to_tokens(ids)
        return answer

    def detokenize(self, body: bytes) -> dict[str, Any]:
        """Raises Refusal."""
        value = parse_body(body)
        self.check_model(value.get("model"))
        ids, vocab_size = value.get("tokens"), self.decoder.target.vocab_size
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise Refusal(f"tokens is a list of token ids below {vocab_size}", param="tokens")
        return {"prompt": self._decode(ids)}

    def _prepare(self, ask: Ask, form: Callable[[TokenTexts], Form]) -> Prepared:
        model = self.check_model(ask.model)
        self._check_law(ask)
        all_ids = [self.token_ids(prompt) for prompt in ask.prompts]
        jobs = []
        if ask.max_tokens != 0:
            for ids in all_ids:
                room = self.capacity - len(ids)
                max_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)
                for child in range(ask.n):
                    jobs.append(self._job(ask, ids, max_tokens, child))
        texts = []
        if ask.echo:
            pairs = zip(ask.prompts, all_ids, strict=True)
            texts = [prompt if isinstance(prompt, str) else self._decode(ids) for prompt, ids in pairs]
        tokens = TokenTexts(self._tokenizer, ask.as_token_ids)
        return Prepared(ask, all_ids, texts, jobs, form(tokens), model, self.fingerprint)

    def _job(self, ask: Ask, ids: list[int], max_tokens: int, child: int) -> Job:
        seed = ask.options["seed"]
        own = {"max_new_tokens": max_tokens, "seed": None if seed is None else (seed + child) % 2**63}
        try:
            job = self.decoder.job(ids, {**ask.options, **own})
        except Exception as error:
            raise refusal_of(error) from None
        if ask.num_draft_tokens is not None:
            job.request = replace(job.request, num_draft_tokens=ask.num_draft_tokens)
        return job

    def _check_law(self, ask: Ask) -> None:
        own = self.decoder.acceptance
        if ask.acceptance not in (None, own):
            raise Refusal(
                f"acceptance = {ask.acceptance!r:.60} is not served: this server's rule is {own}", param="acceptance"
            )
        if ask.num_draft_tokens is not None and ask.num_draft_tokens > self.max_k:
            raise Refusal(
                f"num_draft_tokens = {ask.num_draft_tokens} is not served: this server drafts at most {self.max_k}",
                param="num_draft_tokens",
            )

    @property
    def _tokenizer(self) -> Any:
        return self.decoder.tokenizer

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def fingerprint_of(decoder: Decoder) -> str:
    """With the same fingerprint, the same seed gives the same text, up to rounding (docs/numerics.md)."""
    target, drafter = decoder.target, decoder.drafter
    names = f"{target.name}+{drafter.name}"
    dtype = str(target.dtype).removeprefix("torch.")
    facts = version("outrider"), names, dtype, decoder.acceptance, decoder.num_draft_tokens, target.execution.name
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:8]
    return f"outrider-{facts[0]}-{names}-{dtype}-{decoder.acceptance}-k{decoder.num_draft_tokens}-{digest}"
